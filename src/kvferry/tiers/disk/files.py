"""Files of a store: opened without following links, preallocated, synced.

A name in a store's folder that is a link, a pipe or anything but a plain file is not ours. It is
neither read nor written, and the error names it.
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
"""Addresses, offsets and lengths must be multiples of this for O_DIRECT, in bytes."""

SECTOR_BYTES = 512
"""Bytes that a power cut leaves whole, either old or new."""

DIGEST_BYTES = 16

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(path: Path) -> int:
    """Open a directory and return its descriptor. StoreError if it is a link or no directory."""
    try:
        return os.open(path, _DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise StoreError(
                f"{path} is a link or no directory; kvferry leaves it as it is: remove it by hand"
            ) from error
        raise


def open_file(name: str, flags: int, folder: int | None = None) -> int:
    """Open a plain file, in ``folder`` if given. StoreError, naming it, if it is not plain."""
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
    """Raise StoreError, with the path, if a name in a folder is no plain file."""
    for name in os.listdir(folder):
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _not_plain(path / name)


class DiskFile:
    """A file of a store, open for reading or for both. Writes go through the page cache.

    Every call may raise OSError. After a failed ``sync``, nothing written since the last good one
    is certainly on the medium, not even after a later ``sync`` succeeds. The kernel has forgotten
    that those bytes were still to be written. They must be written again.
    """

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self._fd = open_file(str(path), os.O_RDWR if writable else os.O_RDONLY)

    def read_at(self, offset: int, count: int) -> bytes:
        return os.pread(self._fd, count, offset)

    def write_at(self, offset: int, data: memoryview) -> int:
        """Write from the start of ``data``; return the number of bytes written."""
        return os.pwrite(self._fd, data, offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file's lock against other processes. Waits until they release it."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file; later calls raise OSError. Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def create_file(path: Path, num_bytes: int) -> None:
    """Create a small file, or overwrite its start, with ``num_bytes`` zeros; durable on return."""
    fd = open_file(str(path), os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, bytes(num_bytes), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(file: DiskFile, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of ``data``, in as many calls as it takes."""
    rest = memoryview(data).cast("B")
    while rest:
        taken = file.write_at(offset, rest)
        if taken <= 0:
            raise OSError(errno.EIO, f"a write at {offset} took none of {len(rest)} bytes")
        rest = rest[taken:]
        offset += taken


def read_whole(file: DiskFile, offset: int, count: int) -> bytes:
    """Return ``count`` bytes, or fewer if the file ends."""
    data = b""
    while len(data) < count and (part := file.read_at(offset + len(data), count - len(data))):
        data = data + part if data else part
    return data


def runs(*positions: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the index ranges within which all arrays go up by one: each is one long call."""
    if not len(positions[0]):
        return []
    steps = [np.flatnonzero(np.diff(each) != 1) + 1 for each in positions]
    edges = [0, *np.unique(np.concatenate(steps)).tolist(), len(positions[0])]
    return list(itertools.pairwise(edges))


def sync_folder(folder: Path) -> None:
    """Sync a folder: names created, changed and removed in it are on the medium on return."""
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
    """Make ``path`` exactly ``num_bytes`` long, its new bytes reserved on the file system.

    Returns whether the file system could reserve them; if not, the file is sparse and takes space
    as it is written. Raises OSError if there is no room; the file is then as long as it was.
    """
    # Not posix_fallocate: without the file system's support it writes zeros, for minutes.
    fd = open_file(str(path), os.O_RDWR | os.O_CREAT)
    try:
        before = os.fstat(fd).st_size
        try:
            # Only beyond the file's end: xfs needs free space again even for bytes the file has.
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
    """Truncate a file: the file system has its bytes back now, even while it is open elsewhere."""
    fd = open_file(name, os.O_RDWR, folder)
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _fallocate(fd: int, offset: int, count: int) -> bool:
    """Reserve bytes of a file; return False if the file system cannot."""
    while _libc.fallocate(fd, 0, offset, count) != 0:
        code = ctypes.get_errno()
        if code in _UNKNOWN:
            return False
        if code != errno.EINTR:
            raise OSError(code, f"{count} bytes could not be had: {os.strerror(code)}")
    return True
