"""When a store last forgot everything, so that drives which were apart at that time can tell.

A tier on several drives may be told to forget while one of them is away. The others note the time
of it, each in a file of its store. When the one comes back, in this life of the server or a later
one, its time is older than theirs, and it forgets too before anything of it is read.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from kvferry.tiers.disk.superblock import sync_folder

FILE_NAME = "epoch"
_NUMBER_BYTES = 8


def read_epoch(folder: Path) -> int:
    """The store's epoch; 0 where there is none, or none that can be believed: older than all."""
    try:
        data = (folder / FILE_NAME).read_bytes()
    except OSError:
        return 0
    number = data[:_NUMBER_BYTES]
    return int.from_bytes(number, "little") if data == number + _digest(number) else 0


def write_epoch(folder: Path, epoch: int) -> None:
    """Only after the store has forgotten: one that says so and has not would keep what is stale."""
    number = epoch.to_bytes(_NUMBER_BYTES, "little")
    aside = folder / f"{FILE_NAME}.new"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, number + _digest(number))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(aside, folder / FILE_NAME)
    sync_folder(folder)


def _digest(number: bytes) -> bytes:
    return blake2b(number, digest_size=_NUMBER_BYTES, person=b"kvferry.epoch").digest()
