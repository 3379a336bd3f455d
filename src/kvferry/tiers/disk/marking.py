"""Orders stores that other processes have open to forget everything, from a process of its own.

Of its own because a drive that hangs may hang whoever reads or writes there, and keep that process
from ending. It is told what to do with which stores as JSON on its standard input, and answers
which of them are here, or what failed.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import StoreError
from kvferry.tiers.disk.journal import DiskFile
from kvferry.tiers.disk.setup import StoreAt
from kvferry.tiers.disk.superblock import FORGET_MARK_FILE_NAME as FILE_NAME
from kvferry.tiers.disk.superblock import ordered_in, read_epoch, read_superblock, write_mark
from kvferry.tiers.ipc.process import run_module

log = logging.getLogger(__name__)

MODULE = "kvferry.tiers.disk.marking"
_MARK, _LOOK = "mark", "look"


def is_here(store: StoreAt) -> bool:
    """Whether this very store can be reached under its name: a rank may be on another host."""
    try:
        superblock = read_superblock(Path(store.folder))
    except (OSError, StoreError):
        return False
    return superblock is not None and superblock.store_id == store.store_id


def here_apart(stores: Sequence[StoreAt], timeout: float) -> list[StoreAt]:
    """Those of them that are here. If that is not known in ``timeout`` seconds, all of them are.

    Whoever took what hangs for another host's would claim to have done what nobody did.
    """
    try:
        found = _apart(_LOOK, stores, timeout)
        return [store for store, is_so in zip(stores, found, strict=True) if is_so]
    except (OSError, ValueError, TypeError) as error:
        log.warning("whether stores on disk are of this host is not known: %s", error)
        return list(stores)


def mark_apart(stores: Sequence[StoreAt], timeout: float) -> str:
    """Mark these stores, in ``timeout`` seconds at most; why not all of them are, or nothing."""
    try:
        return str(_apart(_MARK, stores, timeout))
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _apart(what: str, stores: Sequence[StoreAt], timeout: float) -> Any:
    told = [what, [[store.folder, store.store_id.hex()] for store in stores]]
    answer = run_module(MODULE, json.dumps(told).encode(), timeout)
    # What Python loads at its start may have something to say before us.
    return json.loads(answer.splitlines()[-1] if answer else b"")


def mark_stores(stores: Sequence[StoreAt]) -> str:
    """Here and now; why not all of them are marked, or nothing."""
    folders = [Path(store.folder) for store in stores]
    known = [number for each in folders for number in (read_epoch(each), ordered_in(each) or 0)]
    # Newer than whatever any of them has forgotten, also where the clock was put back.
    number = max(time.time_ns(), *known) + 1
    failed = []
    for store, folder in zip(stores, folders, strict=True):
        try:
            if not is_here(store):
                raise OSError("the store is no longer there")
            file = DiskFile(folder / FILE_NAME)
            try:
                write_mark(file, number)
            finally:
                file.close()
        except OSError as error:
            failed.append(f"{folder}: {error.strerror or error}")
    return "; ".join(failed)


def main() -> None:
    what, told = json.load(sys.stdin)
    stores = [StoreAt(folder, bytes.fromhex(store_id)) for folder, store_id in told]
    answer = mark_stores(stores) if what == _MARK else [is_here(store) for store in stores]
    print(json.dumps(answer))
