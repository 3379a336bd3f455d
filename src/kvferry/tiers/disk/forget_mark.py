"""An order to forget everything, left in a store's folder for whoever has it open or opens it next.

Who orders it may be another process than the engine that has the store open, and may not reach that
engine for a while (vLLM's scheduler speaks to its ranks with the next step only). The mark is good
from the moment it is on the medium::

    mark, sync: promised ──> the engine hears and its drive forgets, or there is a crash ──>
        whoever opens the store in the next life forgets first ──> epoch: the mark is settled

Until it is settled everything in the store is forgotten at the next opening. So is what an engine
that has not heard of it writes meanwhile; and what one that has heard writes has names that no
other life asks for. (So its drive settles nothing: it could not tell the two apart.)
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path

from kvferry.tiers.disk.epoch import read_epoch, write_epoch
from kvferry.tiers.disk.files import DiskFile, JournalFile, read_whole, write_whole

log = logging.getLogger(__name__)

FILE_NAME = "forget"
FILE_BYTES = 4096
_SECTOR_BYTES, _NUMBER_BYTES = 512, 8


def read_mark(file: JournalFile) -> int | None:
    """The number of the last order; 0: there was none; None: who knows, so there may be one."""
    data = read_whole(file, 0, 2 * _NUMBER_BYTES)
    number = data[:_NUMBER_BYTES]
    if not any(data):
        return 0
    return int.from_bytes(number, "little") if data == number + _digest(number) else None


def write_mark(file: JournalFile, number: int) -> None:
    """Order it; on the medium on return. The file has its bytes: a full disk is no reason to fail.

    One sector, in place: it is the old one or the new one after a crash, and any other counts as an
    order.
    """
    data = number.to_bytes(_NUMBER_BYTES, "little")
    write_whole(file, 0, (data + _digest(data)).ljust(_SECTOR_BYTES, b"\0"))
    file.sync()


def ordered_in(folder: Path) -> int | None:
    """As :func:`read_mark`, of a store; one from before there were marks has none."""
    try:
        file = DiskFile(folder / FILE_NAME, writable=False)
    except FileNotFoundError:
        return 0
    except OSError:
        return None
    try:
        return read_mark(file)
    except OSError:
        return None
    finally:
        file.close()


def is_due(folder: Path) -> bool:
    """Whether everything in this store counts as forgotten, though its journal knows nothing."""
    number = ordered_in(folder)
    return number is None or number > read_epoch(folder)


def settle(folder: Path) -> None:
    """Only after the store has forgotten, and while nobody can order anew: the mark is old now."""
    number = ordered_in(folder)
    try:
        if number is not None:
            write_epoch(folder, max(number, read_epoch(folder)))
            return
        file = DiskFile(folder / FILE_NAME)
        try:
            write_mark(file, 0)
        finally:
            file.close()
    except OSError as error:  # at worst it forgets once more when it is next opened
        log.warning("%s: that it has forgotten cannot be noted: %s", folder, error)


def _digest(number: bytes) -> bytes:
    return blake2b(number, digest_size=_NUMBER_BYTES, person=b"kvferry.forget").digest()
