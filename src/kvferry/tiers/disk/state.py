"""The state file of a store: its reset number, and the budget of bytes written per day.

The file has its full length from the start, so it can be written on a full drive. The reset number
separates blocks stored before a reset of the cache from later ones. Each page of the index has the
number under which its blocks were stored, and only pages of the current number count. So a reset is
one sector, written and synced::

    pages of 5 │ the number becomes 8, synced: promised │ pages of 5 do not count │ pages of 8 do

The drive process writes it on its engine's order; :func:`reset_in_child` does so for an engine that
cannot wait until then (vLLM's scheduler reaches its ranks only with the next step). Blocks that an
engine stores before it hears of the reset have the older number, and do not count.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from kvferry.errors import StoreError, words_of
from kvferry.tiers.disk.files import DIGEST_BYTES, SECTOR_BYTES, DiskFile, read_whole, write_whole
from kvferry.tiers.disk.superblock import StoreAt, read_superblock
from kvferry.tiers.ipc.process import run_module

FILE_NAME = "state"
FILE_BYTES = 4096
NOT_KEPT = (1 << 64) - 1
"""Reset number of pages that count for no other process: their blocks end with their engine."""

_BUDGET_AT = 2 * SECTOR_BYTES
MODULE = "kvferry.tiers.disk.state"


def _pack(numbers: Sequence[int], person: bytes) -> bytes:
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    digest = blake2b(data, digest_size=DIGEST_BYTES, person=person).digest()
    return (digest + data).ljust(SECTOR_BYTES, b"\0")


def _unpack(sector: bytes, count: int, person: bytes) -> list[int] | None:
    """Return the numbers in a sector; None if it is damaged or was never written."""
    ends = range(DIGEST_BYTES, DIGEST_BYTES + 8 * count, 8)
    numbers = [int.from_bytes(sector[at : at + 8], "little") for at in ends]
    return numbers if sector == _pack(numbers, person) else None


def read_reset(file: DiskFile) -> int | None:
    """Return the reset number, the greater of the intact copies; None if both are damaged."""
    data = read_whole(file, 0, 2 * SECTOR_BYTES)
    copies = [
        _unpack(data[at : at + SECTOR_BYTES], 1, b"kvferry.reset") for at in (0, SECTOR_BYTES)
    ]
    return max([copy[0] for copy in copies if copy is not None], default=None)


def write_reset(file: DiskFile, number: int) -> None:
    """Set the reset number; durable on return."""
    write_whole(file, 0, _pack([number], b"kvferry.reset") * 2)
    file.sync()


def raise_reset(file: DiskFile, number: int) -> None:
    """Set the reset number unless it is greater already; durable on return."""
    with file.locked():  # the drive process and the scheduler's child may both write
        # Always written: after a failed sync, the number read may not be on the medium.
        write_reset(file, max(number, read_reset(file) or 0))


class DayBudget:
    """Decides whether bytes may be written, so that no 24 hours see more than ``per_day``.

    Owns the number of spent bytes, in the state file of the store::

        burst: 1/8 of a day's bytes;  refill: 7/8 of a day's bytes per day
    """

    def __init__(self, file: DiskFile, per_day: float) -> None:
        self._file = file
        self._at_once = per_day / 8
        self._rate = (per_day - self._at_once) / 86400.0
        self._lock = threading.Lock()  # guards what is below
        sector = read_whole(file, _BUDGET_AT, SECTOR_BYTES)
        self._spent, self._at = _unpack(sector, 2, b"kvferry.budget") or (0, 0)

    def take(self, num_bytes: int) -> bool:
        """Return whether ``num_bytes`` may be written now; if so, they count as written."""
        with self._lock:
            now = int(time.time())
            back = int(max(0, now - self._at) * self._rate)
            self._spent, self._at = max(0, self._spent - back), now
            may = self._spent + num_bytes <= self._at_once
            self._spent += num_bytes * may
            return may

    def save(self) -> None:
        """Write the spent bytes. Not synced: a power cut may lose half a minute of them."""
        with self._lock, contextlib.suppress(OSError):  # the drive's health is checked elsewhere
            write_whole(self._file, _BUDGET_AT, _pack([self._spent, self._at], b"kvferry.budget"))


# -- from outside ---------------------------------------------------------------------------------


def reset_stores(stores: Sequence[StoreAt], number: int) -> str:
    """Set the reset number of each store; return why some do not have it, or nothing."""
    failed = []
    for store in stores:
        try:
            if not is_here(store):
                raise OSError("the store is no longer there")
            with contextlib.closing(DiskFile(Path(store.folder) / FILE_NAME)) as file:
                raise_reset(file, number)
        except (OSError, StoreError) as error:
            failed.append(f"{store.folder}: {getattr(error, 'strerror', None) or error}")
    return "; ".join(failed)


def is_here(store: StoreAt) -> bool:
    """Return whether the folder on this host still holds this very store."""
    try:
        superblock = read_superblock(Path(store.folder))
    except (OSError, StoreError):
        return False
    return superblock is not None and superblock.store_id == store.store_id


def this_host() -> str:
    """Return an id of this host: the kernel's boot id, else its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def reset_in_child(stores: Sequence[StoreAt], number: int, timeout: float) -> str:
    """As :func:`reset_stores`, in a child process, within ``timeout`` seconds.

    A drive that hangs may hang the process that writes to it, and keep that process from ending.
    """
    told = [number, [[store.folder, store.store_id.hex()] for store in stores]]
    try:
        answer = run_module(MODULE, json.dumps(told).encode(), timeout)
        # What Python loads at its start may print something first.
        return str(json.loads(answer.splitlines()[-1] if answer else b""))
    except (OSError, ValueError) as error:
        return words_of(error)


def main() -> None:
    """Run in the child: read the reset number and the stores, print the answer, both as JSON."""
    number, told = json.load(sys.stdin)
    stores = [StoreAt(folder, bytes.fromhex(store_id)) for folder, store_id in told]
    print(json.dumps(reset_stores(stores, number)))
