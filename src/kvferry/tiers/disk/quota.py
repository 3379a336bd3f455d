"""Stores under one directory: their locks, their sizes, their removal, and each one's share.

::

    bound of the directory  |  open stores of others  |  rank 0 here  |  rank 1 here  |  ... | idle
                               never touched             equal shares

Idle are stores that no process has open and that are not of this server. Those used in the last
days keep a part of the bound, so that models that take turns stay warm; the others are removed when
their bytes are needed. Those used longest ago give first: what they must give is cut off their
ends. Stores of this server's other ranks are left alone: they may be about to be opened. A store
that is there is opened at its size, whatever the file system has left. All of this happens under
the directory's lock, so two servers that start at once cannot both take the last bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.core.lifecycle import Closing
from kvferry.core.quantities import format_size
from kvferry.errors import KvferryError, StoreError, StoreInUseError
from kvferry.tiers.disk.files import discard, open_file, open_folder, require_plain, sync_folder
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
RECENT_SECONDS = 7 * 86400.0
"""A store used since then counts as about to be used again."""

_REMOVED = ".kvferry-removed-"
_TIMED = (LOCK_NAME, INDEX_NAME)
_LOCK_BYTES = 1024
_MAX_COMMAND = 200
_SAID = ("host", "command", "since")
_TRIES, _PAUSE_SECONDS = 6, 0.02
_SMALL_FILES = 3 * 4096  # superblock, lock and state


class StoreLock(Closing):
    """The right to a folder's store, until ``close`` or the end of the process.

    The folder itself is locked: a lock file can be deleted. The file ``lock`` says who has it.
    """

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self.fd = fd

    @classmethod
    def take(cls, folder: Path, *, on_behalf_of: int | None = None) -> StoreLock:
        """Lock a store and write into its lock file that it is in use by ``on_behalf_of``.

        Raises StoreInUseError, with the process, if another process has it; StoreError if a name
        in it is no plain file.
        """
        lock = cls.try_once(folder)
        if lock is None:
            error = StoreInUseError(
                f"{folder} is open in {holder(folder) or 'another process'}; two servers cannot "
                "share a store: stop that one, or give this one another directory (setting disk)"
            )
            error.is_ending = not _is_held_by_another(folder, on_behalf_of or os.getpid())
            raise error
        try:
            require_plain(folder, lock.fd)
            lock._sign(on_behalf_of or os.getpid())
        except BaseException:
            lock.close()
            raise
        return lock

    def _sign(self, pid: int) -> None:
        words = {
            "pid": pid,
            "host": socket.gethostname(),
            "command": _command(pid),
            "since": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        }
        self._write(json.dumps(words).encode())

    def _write(self, words: bytes) -> None:
        """Write in place, in the bytes that the file has. It is locked all the same without."""
        with contextlib.suppress(OSError, StoreError):  # the drive may be gone, or full
            create = os.O_CREAT if words else 0  # at the end the folder may be going away
            file = open_file(LOCK_NAME, os.O_RDWR | create, self.fd)
            try:
                os.pwrite(file, words[:_LOCK_BYTES].ljust(_LOCK_BYTES), 0)
                os.utime(file)
            finally:
                os.close(file)

    @classmethod
    def try_once(cls, folder: Path) -> StoreLock | None:
        """Lock a store, writing nothing; None while another process has it."""
        for turn in range(_TRIES):
            if turn:
                time.sleep(_PAUSE_SECONDS)  # another process may only be looking
            fd = open_folder(folder)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A store that was removed between the two calls left us the lock of nothing.
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
        """Let the store go. Safe to call twice."""
        if self.fd >= 0:
            self._write(b"")
            os.close(self.fd)
            self.fd = -1


def _lock_words(folder: Path) -> dict[str, Any]:
    """What the process that has the store open says of itself; empty if that cannot be read."""
    try:
        fd = open_file(str(folder / LOCK_NAME), os.O_RDONLY)
        try:
            words = json.loads(os.pread(fd, _LOCK_BYTES, 0))
        finally:
            os.close(fd)
        return {"pid": int(words["pid"]), **{each: str(words[each]) for each in _SAID}}
    except (OSError, StoreError, ValueError, KeyError, TypeError):
        return {}


def holder(folder: Path) -> str:
    """Return which process says that it has the store open; empty if none has.

    The kernel is asked first: what a killed process wrote is not believed.
    """
    try:
        fd = open_folder(folder)
    except (OSError, StoreError):
        return ""
    try:
        # Shared, and released at once: a process that opens the store right now tries again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        if not (words := _lock_words(folder)):
            return "another process"
        process = f"process {words['pid']} on {words['host']}"
        return f"{process} ({words['command']}) since {words['since']} UTC"
    except OSError:
        return ""
    finally:
        os.close(fd)


def _is_held_by_another(folder: Path, pid: int) -> bool:
    """Whether an engine of this host that still runs, other than ``pid``, has the store open."""
    words = _lock_words(folder)
    if not words or words["pid"] == pid or words["host"] != socket.gethostname():
        return False
    try:
        state = Path(f"/proc/{words['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    # And no later process of that number.
    return state != "Z" and words["command"] == _command(words["pid"])


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    text = raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return "".join(c if c.isprintable() else "?" for c in text)[:_MAX_COMMAND] or "?"


@dataclass(frozen=True)
class StoreFolder:
    """A store as it is seen from outside."""

    path: Path
    superblock: Superblock | None
    trouble: str
    """Why it cannot be opened; empty if it can."""
    num_bytes: int
    """What it may grow to: the lengths of its files, whole pages each."""
    last_used: float
    """When it was last opened, closed or written to, in seconds since 1970."""
    holder: str
    """Which process has it open, for people; empty if none has."""

    @property
    def is_open(self) -> bool:
        return bool(self.holder)

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
    """Return all stores in a directory, in the order of their names."""
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{root} cannot be read: {error.strerror or error}") from error
    return [StoreFolder.of(root / name) for name in names if FOLDER.fullmatch(name)]


def apparent_bytes(folder: Path) -> int:
    """Return the lengths of a store's files, a whole page each: what they may take."""
    return sum(-(-found.st_size // 4096) * 4096 for found in _files(folder))


def allocated_bytes(folder: Path) -> int:
    return sum(found.st_blocks * 512 for found in _files(folder))


def _files(folder: Path) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError):  # it may be going away
        for entry in os.scandir(folder) if not folder.is_symlink() else ():
            if entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False)


@contextlib.contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """Hold the directory's lock, under which its bytes are shared out. Waits for it."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def remove_store(path: Path) -> None:
    """Remove a store, all of it or nothing. StoreInUseError if a process has it open.

    Its bytes go back to the file system. Whether an SSD still holds them is beyond us.
    """
    lock = StoreLock.try_once(path)
    if lock is None:
        raise StoreInUseError(
            f"{path} is open in {holder(path) or 'another process'}; stop that one first"
        )
    with lock:
        require_plain(path, lock.fd)
        gone = path.parent / f"{_REMOVED}{secrets.token_hex(8)}"
        os.rename(path, gone)  # from here on it is no store, whatever happens
        sync_folder(path.parent)
        _delete(gone)


def _delete(folder: Path) -> None:
    """Remove a store's folder. StoreError, and nothing is removed, if a name is no plain file."""
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


def store_bytes(num_places: int, identity: StoreIdentity) -> int:
    """Return what a store of so many places takes, everything counted."""
    index = Shape(identity.proof_bytes).file_bytes(num_places)
    return num_places * identity.pitch + index + _SMALL_FILES


def most_places(num_bytes: int, identity: StoreIdentity) -> int:
    """Return the most places whose store takes at most ``num_bytes``; 0 if not even one fits."""
    shape = Shape(identity.proof_bytes)
    of_page = shape.per_page * identity.pitch + shape.file_bytes(1)
    pages, rest = divmod(max(0, num_bytes - _SMALL_FILES), of_page)
    rest = max(0, rest - shape.file_bytes(1)) // identity.pitch
    return min(pages * shape.per_page + rest, MAX_PLACES - 1)


def free_bytes(root: Path) -> int:
    """Return what is free on the file system, for users that are not root."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


class SpaceQuota:
    """Shares out one directory, for one store of ``identity`` that is about to be opened.

    ``shrink`` cuts an idle store to so many places. ``notes`` says what was done to other stores.
    Only under the directory's lock.
    """

    def __init__(
        self,
        root: Path,
        identity: StoreIdentity,
        bound: DiskBound,
        shrink: Callable[[StoreFolder, int], None],
    ) -> None:
        self.notes: list[str] = []
        self._root = root
        self._identity = identity
        self._bound = bound
        self._shrink = shrink
        self._mine = root / identity.folder_name
        for name in os.listdir(root):  # removals that were cut short
            if name.startswith(_REMOVED):
                try:
                    _delete(root / name)
                except (StoreError, OSError) as error:
                    log.warning("%s", error)
        self._look()

    def _look(self) -> None:
        """Find the other stores: ``idle`` ones, ``siblings`` of this server, the rest is open."""
        self._others = [each for each in stores_under(self._root) if each.path != self._mine]
        self._siblings = [each for each in self._others if self._is_sibling(each)]
        idle = [o for o in self._others if not o.is_open and o not in self._siblings]
        self._idle = sorted(idle, key=lambda each: each.last_used)

    def claim(self, num_places: int = 0) -> int:
        """Make room, and return how many places the store may have. StoreError if none.

        A store that has ``num_places`` shrinks only where the bound asks for it. That the file
        system is full, or below its floor, keeps it from growing and no more.
        """
        held = store_bytes(num_places, self._identity) if num_places else 0
        allowed, share = self._share(self._for_all_by_bound()), self._share(self._for_all())
        share = min(allowed, max(share, held))
        grows = share > held
        reachable = self._room(share, grows=grows, without_idle=True)
        if most_places(min(share, reachable), self._identity) < 1:
            raise StoreError(self._why_not(share))  # before anything is removed in vain
        if self._left_of_bound() < share:
            self._shrink_siblings(share)
        self._make_room(share, grows=grows)
        given = max(self._room(share, grows=grows), min(held, self._left_of_bound()))
        num_places = most_places(min(share, given), self._identity)
        if num_places < 1:
            raise StoreError(self._why_not(share))
        return num_places

    def _share(self, for_all: int) -> int:
        """Our part, if every rank here gets as much and recently used idle stores keep theirs."""
        recent = sum(each.num_bytes for each in self._idle if _is_recent(each))
        kept = min(recent, max(0, int(for_all * self._bound.for_others)))
        share = max(0, for_all - kept) // self._bound.num_ranks_here
        if most_places(share, self._identity) < 1:
            share = max(0, for_all) // self._bound.num_ranks_here
        return share

    def _for_all(self) -> int:
        """What idle stores and all ranks of this server here may have together."""
        ours = [self._mine, *(each.path for each in (*self._idle, *self._siblings))]
        return min(self._for_all_by_bound(), self._spare() + sum(map(allocated_bytes, ours)))

    def _for_all_by_bound(self) -> int:
        ours = (*self._idle, *self._siblings)
        return self._left_of_bound() + sum(each.num_bytes for each in ours)

    def _left_of_bound(self) -> int:
        return self._bound.size - sum(other.num_bytes for other in self._others)

    def _spare(self) -> int:
        return free_bytes(self._root) - self._bound.keep_free

    def _above_floor(self) -> int:
        """What the file system has for us, if every rank of this server here gets as much."""
        mine = self._spare() + allocated_bytes(self._mine)
        kin = sum(allocated_bytes(each.path) for each in self._siblings)
        return min(mine, (mine + kin) // self._bound.num_ranks_here)

    def _room(self, share: int, *, grows: bool, without_idle: bool = False) -> int:
        """What the store could have now, or if everything went that may go."""
        idle = excess = 0
        if without_idle:
            idle = sum(other.num_bytes for other in self._idle)
            closed = [each.num_bytes for each in self._siblings if not each.is_open]
            excess = sum(max(0, num_bytes - share) for num_bytes in closed)
        by_bound = self._left_of_bound() + idle + excess
        return min(by_bound, self._above_floor() + idle) if grows else by_bound

    def _is_sibling(self, other: StoreFolder) -> bool:
        """Whether it belongs to another rank of this server, which may be about to open it."""
        if other.superblock is None or other.trouble:
            return False
        mine, its = self._identity, other.superblock.identity
        kin = its.family == mine.family if mine.family else its.namespace == mine.namespace
        parts = (its.num_ranks, its.stripe, its.num_stripes)
        if parts != (mine.num_ranks, mine.stripe, mine.num_stripes):
            return False
        return its.rank != mine.rank if kin else its.family in self._bound.families

    def _make_room(self, share: int, *, grows: bool) -> None:
        """Take what we lack from idle stores, those unused longest first: all or a part.

        A block counts if every rank has it: the stores of one server's ranks are cut alike.
        """
        servers: dict[object, list[StoreFolder]] = {}
        for other in self._idle:
            key: object = other.path
            if other.superblock is not None:
                its = other.superblock.identity
                key = (its.family or its.namespace, its.num_ranks, its.stripe, its.num_stripes)
            servers.setdefault(key, []).append(other)
        for kin in sorted(servers.values(), key=lambda kin: max(each.last_used for each in kin)):
            needed = share - self._room(share, grows=grows)
            held = sum(each.num_bytes for each in kin)
            if needed <= 0:
                return
            is_cut = needed < held and all(map(_is_recent, kin))
            for each in kin:
                if not is_cut:
                    self._resize(each, 0, f"{format_size(each.num_bytes)} were needed")
                elif each.superblock is not None:
                    places = most_places((held - needed) // len(kin), each.superblock.identity)
                    if places < each.superblock.num_places:
                        self._resize(each, places, f"{format_size(needed)} were needed")

    def _shrink_siblings(self, share: int) -> None:
        """Cut other ranks' stores to their share: the bound is smaller than it was."""
        for other in [o for o in self._siblings if not o.is_open and o.num_bytes > share]:
            if other.superblock is not None:
                num_places = most_places(share, other.superblock.identity)
                self._resize(other, num_places, "to its share of the bound")

    def _resize(self, other: StoreFolder, num_places: int, why: str) -> None:
        """Cut an idle store, which does not count as a use of it, or remove it."""
        try:
            if num_places:
                self._shrink(other, num_places)
                for name in _TIMED:
                    with contextlib.suppress(OSError):
                        times = (other.last_used, other.last_used)
                        os.utime(other.path / name, times, follow_symlinks=False)
            else:
                remove_store(other.path)
        except (KvferryError, OSError) as error:  # opened just now, or not ours to change
            log.warning("%s is in the way, and stays as it is: %s", other.path, error)
            return
        self._look()
        self.notes.append(f"{other.path} was {'made smaller' if num_places else 'removed'}: {why}")
        log.info("%s", self.notes[-1])

    def _why_not(self, share: int) -> str:
        bound, least = self._bound, store_bytes(1, self._identity)
        held = sum(other.num_bytes for other in self._others)
        reason = (
            f"the bound is {format_size(bound.size)} (disk_size over its directories), other "
            f"stores there hold {format_size(held)}, a rank's share is {format_size(share)}"
        )
        if min(self._for_all_by_bound() // bound.num_ranks_here, self._left_of_bound()) >= least:
            reason = (
                f"{format_size(bound.keep_free)} of the file system must stay free "
                f"(disk_keep_free), which leaves {format_size(max(0, self._above_floor()))}"
            )
        return (
            f"{self._root}: no room for a store: it needs {format_size(least)} for one block, but "
            f"{reason}; raise the bound, free some space, or see kvferry disk ls"
        )


def _is_recent(other: StoreFolder) -> bool:
    is_usable = other.superblock is not None and not other.trouble
    return is_usable and time.time() - other.last_used < RECENT_SECONDS
