"""Files of a store: opened without following links, given their bytes, synced.

A name in a store's folder that is a link, a pipe or anything else but a plain file is not ours:
nothing is read from it or written to it, and the error names it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.errors import StoreError

SECTOR = 4096
"""What O_DIRECT needs addresses, offsets and lengths to be multiples of."""

SECTOR_BYTES = 512
"""What a power cut leaves whole, old or new."""

DIGEST_BYTES = 16

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(path: Path) -> int:
    """Return a descriptor of a directory that is no link. StoreError if it is anything else."""
    try:
        return os.open(path, _DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise StoreError(
                f"{path} is a link or no directory; kvferry leaves it as it is: remove it by hand"
            ) from error
        raise


def open_file(name: str, flags: int, folder: int | None = None) -> int:
    """Open a plain file, in ``folder`` if given; a link or a pipe is a StoreError that names it."""
    # Without O_NONBLOCK opening a pipe waits for its other end.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise _not_plain(name)


def _not_plain(path: str | Path) -> StoreError:
    return StoreError(f"{path} is no plain file; kvferry leaves it as it is: remove it by hand")


def require_plain(path: Path, folder: int) -> None:
    """StoreError, with its path, if a folder has a name that is no plain file."""
    for name in os.listdir(folder):
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _not_plain(path / name)


class DiskFile:
    """A file of a store, open for reading or for both. Writes go through the page cache.

    Every call may raise OSError. After a failed ``sync`` nothing written since the last good one
    may be taken to be on the medium, not even after another ``sync`` that succeeds: the kernel has
    forgotten that those bytes were still to be written. They must be written again.
    """

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self._fd = open_file(str(path), os.O_RDWR if writable else os.O_RDONLY)

    def read_at(self, offset: int, count: int) -> bytes:
        return os.pread(self._fd, count, offset)

    def write_at(self, offset: int, data: memoryview) -> int:
        """Write bytes from the first on; return how many were taken."""
        return os.pwrite(self._fd, data, offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes that do the same out. Waits for them."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the file back; later calls raise OSError. Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def create_file(path: Path, num_bytes: int) -> None:
    """Make a small file of zeros, in place of what it held; on the medium on return."""
    fd = open_file(str(path), os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, bytes(num_bytes), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(file: DiskFile, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of ``data``, however short the single writes are."""
    rest = memoryview(data).cast("B")
    while rest:
        taken = file.write_at(offset, rest)
        if taken <= 0:
            raise OSError(errno.EIO, f"a write at {offset} took none of {len(rest)} bytes")
        rest = rest[taken:]
        offset += taken


def read_whole(file: DiskFile, offset: int, count: int) -> bytes:
    """Return ``count`` bytes, or fewer where the file ends."""
    data = b""
    while len(data) < count and (part := file.read_at(offset + len(data), count - len(data))):
        data = data + part if data else part
    return data


def runs(*positions: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the ranges within which all of these go up by one: neighbours, for one long call."""
    if not len(positions[0]):
        return []
    steps = [np.flatnonzero(np.diff(each) != 1) + 1 for each in positions]
    edges = [0, *np.unique(np.concatenate(steps)).tolist(), len(positions[0])]
    return list(itertools.pairwise(edges))


def sync_folder(folder: Path) -> None:
    """Return once names made, changed and removed in ``folder`` are on the medium."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int

_UNKNOWN = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_STEP = 1 << 30


def allocate(path: Path, num_bytes: int) -> bool:
    """Make ``path`` exactly so long, with its new bytes reserved on the file system.

    Returns whether the file system could reserve them; if not, the file is sparse and grows as it
    is written. Raises OSError if there is no room; the file is then as long as it was.
    """
    # Not posix_fallocate: where the file system has no such call it writes zeros, for minutes.
    fd = open_file(str(path), os.O_RDWR | os.O_CREAT)
    try:
        before = os.fstat(fd).st_size
        try:
            # Never over bytes that the file has: xfs wants as many free ones for them again.
            is_whole = all(
                _fallocate(fd, start, min(_STEP, num_bytes - start))
                for start in range(before, num_bytes, _STEP)
            )
            if num_bytes != before:
                os.ftruncate(fd, num_bytes)
        except OSError:
            os.ftruncate(fd, min(before, num_bytes))
            raise
        os.fsync(fd)
        return is_whole
    finally:
        os.close(fd)


def discard(name: str, folder: int) -> None:
    """Give a file's bytes back to the file system now, even while it is open elsewhere."""
    fd = open_file(name, os.O_RDWR, folder)
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _fallocate(fd: int, offset: int, count: int) -> bool:
    """Return whether the file system knows the call."""
    while _libc.fallocate(fd, 0, offset, count) != 0:
        code = ctypes.get_errno()
        if code in _UNKNOWN:
            return False
        if code != errno.EINTR:
            raise OSError(code, f"{count} bytes could not be had: {os.strerror(code)}")
    return True
