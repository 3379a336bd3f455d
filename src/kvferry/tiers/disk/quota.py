"""Stores under one directory: their locks, sizes and removal, and the share of each.

::

    bound of the directory  |  open stores of others  |  rank 0 here  |  rank 1 here  |  ...
                               never touched             equal shares

Idle stores are those that no process has open and that are not of this server. They are removed
when their bytes are needed, the longest unused first. Stores of this server's other ranks are kept:
they may be about to be opened. An existing store is opened at its size, whatever the file system
has left. All of this happens under the directory's lock, so two servers that start at once cannot
both take the last bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvferry.core.lifecycle import Closing
from kvferry.core.quantities import format_size
from kvferry.errors import KvferryError, StoreError, StoreInUseError
from kvferry.tiers.disk.files import (
    allocate,
    discard,
    open_file,
    open_folder,
    require_plain,
    sync_folder,
)
from kvferry.tiers.disk.index import FILE_NAME as INDEX_NAME
from kvferry.tiers.disk.index import MAX_PLACES, Shape
from kvferry.tiers.disk.superblock import (
    FOLDER,
    DiskBound,
    StoreIdentity,
    Superblock,
    read_superblock,
)

log = logging.getLogger(__name__)

BLOCKS_NAME = "blocks"
LOCK_NAME = "lock"

_REMOVED = ".kvferry-removed-"
_TIMED = (LOCK_NAME, INDEX_NAME)
_LOCK_BYTES = 1024
_MAX_COMMAND = 200
_TRIES, _PAUSE_SECONDS = 6, 0.02
_SMALL_FILES = 3 * 4096  # superblock, lock and state


class StoreLock(Closing):
    """Exclusive use of a folder's store, until ``close`` or the end of the process.

    The folder itself is locked: a lock file can be deleted. The file ``lock`` names the holder.
    """

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self.fd = fd

    @classmethod
    def take(cls, folder: Path, *, on_behalf_of: int | None = None) -> StoreLock:
        """Lock a store, and write into its lock file that ``on_behalf_of`` uses it.

        Raises StoreInUseError, with the process, if another process has it; StoreError if a name in
        it is no plain file.
        """
        lock = cls.try_once(folder)
        if lock is None:
            raise StoreInUseError(
                f"{folder} is open in {holder(folder) or 'another process'}; two servers cannot "
                "share a store: stop that one, or give this one another directory (setting disk)"
            )
        try:
            require_plain(folder, lock.fd)
            pid, since = on_behalf_of or os.getpid(), time.strftime("%F %T", time.gmtime())
            words = f"process {pid} on {socket.gethostname()} ({_command(pid)}) since {since} UTC"
            lock._write(words.encode())
        except BaseException:
            lock.close()
            raise
        return lock

    def _write(self, words: bytes) -> None:
        """Overwrite the lock file's bytes in place. The lock holds even if that fails."""
        with contextlib.suppress(OSError, StoreError):  # the drive may be gone, or full
            create = os.O_CREAT if words else 0  # on release the folder may be in removal
            file = open_file(LOCK_NAME, os.O_RDWR | create, self.fd)
            try:
                os.pwrite(file, words[:_LOCK_BYTES].ljust(_LOCK_BYTES), 0)
                os.utime(file)
            finally:
                os.close(file)

    @classmethod
    def try_once(cls, folder: Path) -> StoreLock | None:
        """Lock a store without writing; return None while another process has it."""
        for turn in range(_TRIES):
            if turn:
                time.sleep(_PAUSE_SECONDS)  # another process may only be testing the lock
            fd = open_folder(folder)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # If the store was removed between the two calls, this locks a deleted folder.
                if os.path.samestat(os.fstat(fd), os.lstat(folder)):
                    return cls(folder, fd)
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        return None

    def close(self) -> None:
        """Release the store. Safe to call twice."""
        if self.fd >= 0:
            self._write(b"")
            os.close(self.fd)
            self.fd = -1


def holder(folder: Path) -> str:
    """Return the process that has the store open, by its lock file; empty if there is none.

    The kernel's lock decides: the file of a killed process is not believed.
    """
    try:
        fd = open_folder(folder)
    except (OSError, StoreError):
        return ""
    try:
        # Shared, and released at once: a process that is opening the store tries again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        with contextlib.suppress(OSError, StoreError):
            lock = open_file(LOCK_NAME, os.O_RDONLY, fd)
            try:
                return _printable(os.pread(lock, _LOCK_BYTES, 0)) or "another process"
            finally:
                os.close(lock)
        return "another process"
    except OSError:
        return ""
    finally:
        os.close(fd)


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    return _printable(raw.replace(b"\0", b" "))[:_MAX_COMMAND] or "?"


def _printable(raw: bytes) -> str:
    text = raw.decode(errors="replace").strip()
    return "".join(c if c.isprintable() else "?" for c in text)


@dataclass(frozen=True)
class StoreFolder:
    """A store as seen from outside, without opening it."""

    path: Path
    superblock: Superblock | None
    trouble: str
    """Why it cannot be opened; empty if it can."""
    num_bytes: int
    """Bytes that it may grow to: the lengths of its files, rounded up to pages."""
    last_used: float
    """Time of the last open, close or write, in seconds since 1970."""
    holder: str
    """The process that has it open, for people; empty if there is none."""

    @classmethod
    def of(cls, path: Path) -> StoreFolder:
        superblock, trouble = None, ""
        try:
            fd = open_folder(path)
            try:
                require_plain(path, fd)
            finally:
                os.close(fd)
            superblock = read_superblock(path)
            if superblock is None:
                trouble = "it was never finished"
        except (StoreError, OSError) as error:
            trouble = str(error)
        last_used = 0.0
        for name in _TIMED:
            with contextlib.suppress(OSError):
                last_used = max(last_used, (path / name).lstat().st_mtime)
        return cls(path, superblock, trouble, apparent_bytes(path), last_used, holder(path))


def stores_under(root: Path) -> list[StoreFolder]:
    """Return all stores in a directory, sorted by name."""
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{root} cannot be read: {error.strerror or error}") from error
    return [StoreFolder.of(root / name) for name in names if FOLDER.fullmatch(name)]


def apparent_bytes(folder: Path) -> int:
    """Return the bytes that a store may take: its files' lengths, rounded up to pages."""
    return sum(-(-found.st_size // 4096) * 4096 for found in _files(folder))


def allocated_bytes(folder: Path) -> int:
    return sum(found.st_blocks * 512 for found in _files(folder))


def _files(folder: Path) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError):  # the folder may be in removal
        for entry in os.scandir(folder) if not folder.is_symlink() else ():
            if entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False)


@contextlib.contextmanager
def directory_lock(root: Path) -> Iterator[None]:
    """Hold the lock under which a directory's bytes are shared out. Waits for it."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def remove_store(path: Path) -> None:
    """Remove a store, all of it or nothing. StoreInUseError if a process has it open.

    Its bytes go back to the file system; an SSD may still hold them.
    """
    lock = StoreLock.try_once(path)
    if lock is None:
        raise StoreInUseError(
            f"{path} is open in {holder(path) or 'another process'}; stop that one first"
        )
    with lock:
        require_plain(path, lock.fd)
        gone = path.parent / f"{_REMOVED}{secrets.token_hex(8)}"
        os.rename(path, gone)  # from here on it no longer counts as a store
        sync_folder(path.parent)
        _delete(gone)


def _delete(folder: Path) -> None:
    """Delete a store's folder. StoreError, and nothing is deleted, if a name is no plain file."""
    fd = open_folder(folder)
    try:
        require_plain(folder, fd)
        for name in os.listdir(fd):
            discard(name, fd)
        for name in os.listdir(fd):
            os.unlink(name, dir_fd=fd)
        os.rmdir(folder)
    finally:
        os.close(fd)


def purge_store(path: Path) -> str:
    """Remove a store; return a message about its bytes, for people.

    Raises StoreInUseError if a process has it open, StoreError if there is none.
    """
    found = next((each for each in stores_under(path.parent) if each.path == path), None)
    if found is None:
        raise StoreError(f"{path} is no store of kvferry; kvferry disk ls shows which there are")
    with directory_lock(path.parent):
        remove_store(path)
    rest = (
        "its bytes were given back to the file system, not overwritten: an SSD may hold them "
        "until it needs the room. Encrypt (disk_key_file) what must never be read again"
    )
    if found.superblock is not None and found.superblock.identity.is_sealed:
        rest = "its blocks were encrypted: without the key, what a drive may still hold is noise"
    return f"{path} is gone, {found.num_bytes} bytes; {rest}"


def store_bytes(num_places: int, identity: StoreIdentity) -> int:
    """Return the bytes of all files of a store with ``num_places`` places."""
    index = Shape(identity.proof_bytes).file_bytes(num_places)
    return num_places * identity.pitch + index + _SMALL_FILES


def most_places(num_bytes: int, identity: StoreIdentity) -> int:
    """Return the most places whose store takes at most ``num_bytes``; 0 if none fits."""
    shape = Shape(identity.proof_bytes)
    of_page = shape.per_page * identity.pitch + shape.file_bytes(1)
    pages, rest = divmod(max(0, num_bytes - _SMALL_FILES), of_page)
    rest = max(0, rest - shape.file_bytes(1)) // identity.pitch
    return min(pages * shape.per_page + rest, MAX_PLACES - 1)


def free_bytes(root: Path) -> int:
    """Return the free bytes of the file system, for users that are not root."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def set_lengths(folder: Path, superblock: Superblock) -> list[str]:
    """Make a store's files as long as its size requires; return what could not be reserved.

    Raises OSError if there is no room.
    """
    mine, notes = superblock.identity, []
    for name, length in (
        (INDEX_NAME, Shape(mine.proof_bytes).file_bytes(superblock.num_places)),
        (BLOCKS_NAME, superblock.num_places * mine.pitch),
    ):
        path = folder / name
        if not (path.exists() and path.lstat().st_size == length) and not allocate(path, length):
            notes.append(
                f"{folder}: the file system cannot reserve space for {name}; it grows as it fills"
            )
    return notes


def _shrink_store(folder: Path, superblock: Superblock) -> None:
    with StoreLock.take(folder):
        superblock.write(folder)
        set_lengths(folder, superblock)


class SpaceQuota:
    """Computes the space for one store of ``identity`` that is about to be opened, and frees it.

    ``notes`` names the changes to other stores. To be used only under the directory's lock.
    """

    def __init__(self, root: Path, identity: StoreIdentity, bound: DiskBound) -> None:
        self.notes: list[str] = []
        self._root = root
        self._identity = identity
        self._bound = bound
        self._mine = root / identity.folder_name
        for name in os.listdir(root):  # removals that were interrupted
            if name.startswith(_REMOVED):
                try:
                    _delete(root / name)
                except (StoreError, OSError) as error:
                    log.warning("%s", error)
        self._find_stores()

    def _find_stores(self) -> None:
        """Find the other stores, and among them idle ones and siblings of this server."""
        self._others = [each for each in stores_under(self._root) if each.path != self._mine]
        self._siblings = [each for each in self._others if self._is_sibling(each)]
        idle = [o for o in self._others if not o.holder and o not in self._siblings]
        self._idle = sorted(idle, key=lambda each: each.last_used)

    def claim(self, num_places: int = 0) -> int:
        """Free space; return the number of places that the store may have. StoreError if none.

        A store that has ``num_places`` gets fewer only if the bound requires it. A file system that
        is full, or below its floor, only keeps it from growing.
        """
        fair = self._bound.size // self._bound.num_ranks_here
        for other in self._siblings:
            if other.num_bytes > fair and not other.holder:
                self._shrink(other, fair)
        held = min(apparent_bytes(self._mine), fair) if num_places else 0
        strangers = [o for o in self._others if o.holder and o not in self._siblings]
        left = self._bound.size - sum(other.num_bytes for other in strangers)
        wanted = max(held, left // self._bound.num_ranks_here)
        idle = sum(other.num_bytes for other in self._idle)
        if most_places(min(wanted, self._room(held, idle)), self._identity) < 1:
            raise StoreError(self._no_room_reason(wanted))  # before anything is removed in vain
        for other in self._idle:
            if self._room(held) >= wanted:
                break
            how = f"removed: {format_size(other.num_bytes)} were needed"
            self._change(other, how, partial(remove_store, other.path))
        num_places = most_places(min(wanted, self._room(held)), self._identity)
        if num_places < 1:
            raise StoreError(self._no_room_reason(wanted))
        return num_places

    def _room(self, held: int, freed: int = 0) -> int:
        """Return the bytes for our store, now ``held``, if others gave up ``freed`` bytes."""
        return min(self._left_of_bound() + freed, max(held, self._above_floor() + freed))

    def _left_of_bound(self) -> int:
        return self._bound.size - sum(other.num_bytes for other in self._others)

    def _above_floor(self) -> int:
        """Return the bytes left above the floor, if every rank of this server here gets as much."""
        spare = free_bytes(self._root) - self._bound.keep_free
        mine = spare + allocated_bytes(self._mine)
        kin = sum(allocated_bytes(each.path) for each in self._siblings)
        return min(mine, (mine + kin) // self._bound.num_ranks_here)

    def _is_sibling(self, other: StoreFolder) -> bool:
        """Return whether it is of another rank of this server, which may be about to open it."""
        if other.superblock is None or other.trouble:
            return False
        mine, its = self._identity, other.superblock.identity
        kin = its.family == mine.family if mine.family else its.namespace == mine.namespace
        parts = (its.num_ranks, its.stripe, its.num_stripes)
        if parts != (mine.num_ranks, mine.stripe, mine.num_stripes):
            return False
        return its.rank != mine.rank if kin else its.family in self._bound.families

    def _shrink(self, other: StoreFolder, share: int) -> None:
        """Cut the store of another rank, whose blocks are useless without those of all ranks."""
        assert other.superblock is not None
        num_places = most_places(share, other.superblock.identity)
        superblock = replace(other.superblock, num_places=num_places)
        self._change(other, "made smaller", lambda: _shrink_store(other.path, superblock))

    def _change(self, other: StoreFolder, how: str, change: Callable[[], object]) -> None:
        try:
            change()
        except (KvferryError, OSError) as error:  # opened just now, or not ours to change
            log.warning("%s is in the way, and stays as it is: %s", other.path, error)
            return
        self._find_stores()
        self.notes.append(f"{other.path} was {how}")
        log.info("%s", self.notes[-1])

    def _no_room_reason(self, share: int) -> str:
        bound, least = self._bound, store_bytes(1, self._identity)
        held = sum(other.num_bytes for other in self._others)
        reason = (
            f"the bound is {format_size(bound.size)} (disk_size over its directories), other "
            f"stores there hold {format_size(held)}, a rank's share is {format_size(share)}"
        )
        if min(share, self._left_of_bound()) >= least:
            reason = (
                f"{format_size(bound.keep_free)} of the file system must stay free "
                f"(disk_keep_free), which leaves {format_size(max(0, self._above_floor()))}"
            )
        return (
            f"{self._root}: no room for a store: it needs {format_size(least)} for one block, but "
            f"{reason}; raise the bound, free some space, or see kvferry disk ls"
        )
