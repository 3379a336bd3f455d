"""Stores under one directory: what there is, how large, and how one is removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import StoreError, StoreInUseError
from kvferry.tiers.disk import lock as locks
from kvferry.tiers.disk.allocation import discard
from kvferry.tiers.disk.lock import StoreLock, holder, last_used, try_lock
from kvferry.tiers.disk.store_identity import FOLDER
from kvferry.tiers.disk.superblock import Superblock, SuperblockError, read_superblock, sync_folder

BLOCKS_NAME = "blocks"
_ROOT_LOCK = ".kvferry-lock"
_REMOVED = ".kvferry-removed-"
_NAMES = re.compile(FOLDER.pattern + r"(?:\.aside-[0-9]+)?")


@dataclass(frozen=True)
class StoreFolder:
    """A store as it lies there, seen from outside."""

    path: Path
    superblock: Superblock | None
    trouble: str
    """Why it cannot be opened; empty if it can."""
    num_bytes: int
    """What it may grow to without asking anybody."""
    last_used: float
    holder: str
    """Who has it open, for people; empty if nobody has."""

    @property
    def is_open(self) -> bool:
        return bool(self.holder)


def stores_under(root: Path) -> list[StoreFolder]:
    """All stores in a directory, in the order of their names."""
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{root} cannot be read: {error.strerror or error}") from error
    return [look_at(root / name) for name in names if _NAMES.fullmatch(name)]


def look_at(path: Path) -> StoreFolder:
    """One store, seen from outside."""
    superblock, trouble = None, ""
    try:
        superblock = read_superblock(path)
        if superblock is None:
            trouble = "it was never finished"
        elif not FOLDER.fullmatch(path.name):
            trouble = "it was set aside"
    except SuperblockError as error:
        trouble = str(error)
    return StoreFolder(
        path, superblock, trouble, apparent_bytes(path), last_used(path), holder(path)
    )


def apparent_bytes(folder: Path) -> int:
    """The lengths of a store's files, a whole page each: what they may take, and mostly do."""
    return sum(-(-found.st_size // 4096) * 4096 for found in _files(folder))


def allocated_bytes(folder: Path) -> int:
    """What a store takes on the file system now."""
    return sum(found.st_blocks * 512 for found in _files(folder))


def _files(folder: Path) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError):  # it may be going away
        for entry in os.scandir(folder):
            if entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False)


@contextlib.contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """While this lasts nobody else shares out the directory's bytes. Waits for whoever does."""
    fd = os.open(root / _ROOT_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def remove_store(path: Path) -> None:
    """Remove a store that nobody has open; StoreInUseError if somebody has. All of it or nothing.

    Its bytes go back to the file system. Whether an SSD still holds them somewhere is beyond us.
    """
    lock = try_lock(path)
    if lock is None:
        raise StoreInUseError(
            f"{path} is open in {holder(path) or 'another process'}; stop that one first"
        )
    try:
        gone = path.parent / f"{_REMOVED}{secrets.token_hex(8)}"
        os.rename(path, gone)  # from here on it is no store, whatever happens
        sync_folder(path.parent)
        _delete(gone)
    finally:
        lock.release()


def remove_remains(root: Path) -> None:
    """Finish removals that were cut short. Only while :func:`alone_in` the directory."""
    for entry in os.scandir(root):
        if entry.name.startswith(_REMOVED):
            _delete(Path(entry.path))


def set_aside(lock: StoreLock) -> Path:
    """Rename a store that cannot be read, so that another can take its place; its new path.

    It counts as a store that nobody uses: it goes when its bytes are needed.
    """
    path = lock.folder
    for number in range(1, 1000):
        aside = path.with_name(f"{path.name}.aside-{number}")
        if not aside.exists():
            os.rename(path, aside)
            sync_folder(path.parent)
            return aside
    raise StoreError(f"{path} cannot be read, and cannot be set aside; remove it by hand")


def _delete(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_file(follow_symlinks=False) and entry.name != locks.FILE_NAME:
            discard(Path(entry.path))
    shutil.rmtree(folder)
