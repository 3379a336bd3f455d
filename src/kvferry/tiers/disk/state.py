"""The state file of a store: its reset number.

The file has its bytes from the day the store is made, so it can be written on a full drive. The
reset number separates blocks stored before a reset of the cache from those stored after it: a page
of the index says under which number its blocks were stored, and only those of the present number
count. So a reset is one sector, written and synced::

    pages of 5 │ the number becomes 8, synced: promised │ pages of 5 do not count │ pages of 8 do

It is written by the drive process once its engine has told it, and by :func:`reset_apart` for an
engine that cannot wait until then (vLLM's scheduler speaks to its ranks only with the next step).
What an engine stores that has not heard of the reset has the older number, and does not count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvferry.errors import StoreError
from kvferry.tiers.disk.files import DIGEST_BYTES, SECTOR_BYTES, DiskFile, read_whole, write_whole
from kvferry.tiers.disk.superblock import StoreAt, read_superblock
from kvferry.tiers.ipc.process import run_module

log = logging.getLogger(__name__)

FILE_NAME = "state"
FILE_BYTES = 4096
NOT_KEPT = (1 << 64) - 1
"""A page with this number never counts for another process: its blocks end with their engine."""

MODULE = "kvferry.tiers.disk.state"
_RESET, _FIND = "reset", "find"


def _sector(number: int) -> bytes:
    data = number.to_bytes(8, "little")
    digest = blake2b(data, digest_size=DIGEST_BYTES, person=b"kvferry.reset").digest()
    return (digest + data).ljust(SECTOR_BYTES, b"\0")


def read_reset(file: DiskFile) -> int | None:
    """Return the reset number, from whichever copy is whole; None if both are damaged."""
    data = read_whole(file, 0, 2 * SECTOR_BYTES)
    found = []
    for at in (0, SECTOR_BYTES):
        sector = data[at : at + SECTOR_BYTES]
        number = int.from_bytes(sector[DIGEST_BYTES : DIGEST_BYTES + 8], "little")
        if sector == _sector(number):
            found.append(number)
    return max(found, default=None)


def write_reset(file: DiskFile, number: int) -> None:
    """Make this the reset number; on the medium on return."""
    write_whole(file, 0, _sector(number) * 2)
    file.sync()


def raise_reset(file: DiskFile, number: int) -> None:
    """Make this the reset number unless it is greater already; on the medium on return."""
    with file.locked():  # the drive process and the scheduler's child may both write
        # One that can be read may not be on the medium, after a sync that failed.
        write_reset(file, max(number, read_reset(file) or 0))


# -- from outside ---------------------------------------------------------------------------------


def reset_stores(stores: Sequence[StoreAt], number: int) -> str:
    """Give each store this reset number; return why not all of them have it, or nothing."""
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
    """Whether this very store lies under its name on this host."""
    try:
        superblock = read_superblock(Path(store.folder))
    except (OSError, StoreError):
        return False
    return superblock is not None and superblock.store_id == store.store_id


# A drive that hangs may hang the process that reads or writes there, and keep that process from
# ending. So stores that other processes have open are looked at and reset from a child process.


def find_apart(stores: Sequence[StoreAt], timeout: float) -> list[StoreAt]:
    """Return those stores that are on this host; all, if that is not known in ``timeout`` seconds.

    To take a store that hangs for another host's would claim a reset that was not made.
    """
    try:
        found = _apart([_FIND, 0], stores, timeout)
        return [store for store, is_so in zip(stores, found, strict=True) if is_so]
    except (OSError, ValueError, TypeError) as error:
        log.warning("whether stores on disk are on this host is not known: %s", error)
        return list(stores)


def reset_apart(stores: Sequence[StoreAt], number: int, timeout: float) -> str:
    """As :func:`reset_stores`, from a child process, in ``timeout`` seconds at most."""
    try:
        return str(_apart([_RESET, number], stores, timeout))
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _apart(what: list[Any], stores: Sequence[StoreAt], timeout: float) -> Any:
    told = [*what, [[store.folder, store.store_id.hex()] for store in stores]]
    answer = run_module(MODULE, json.dumps(told).encode(), timeout)
    # What Python loads at its start may print something first.
    return json.loads(answer.splitlines()[-1] if answer else b"")


def main() -> None:
    """Run in the child: read what to do with which stores, print the answer, both as JSON."""
    what, number, told = json.load(sys.stdin)
    stores = [StoreAt(folder, bytes.fromhex(store_id)) for folder, store_id in told]
    is_reset = what == _RESET
    print(json.dumps(reset_stores(stores, number) if is_reset else [is_here(s) for s in stores]))
