"""Bytes on a file system: given to a file before they are needed, or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int

_UNKNOWN = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_PUNCH_HOLE_KEEP_SIZE = 0x03
_STEP = 1 << 30


def allocate(path: Path, num_bytes: int) -> bool:
    """Make ``path`` exactly so long, with room for all of it on the file system.

    Whether the file system could promise that: where it cannot, the file is sparse, and grows as it
    is written. OSError where there is no room; the file is then no longer than it was.
    """
    # Not posix_fallocate: where the file system has no such call it writes zeros, for minutes.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        before = os.fstat(fd).st_size
        if num_bytes < before:
            os.ftruncate(fd, num_bytes)
        try:
            is_whole = all(
                _fallocate(fd, 0, start, min(_STEP, num_bytes - start))
                for start in range(0, num_bytes, _STEP)
            )
        except OSError:
            os.ftruncate(fd, min(before, num_bytes))
            raise
        os.ftruncate(fd, num_bytes)
        os.fsync(fd)
        return is_whole
    finally:
        os.close(fd)


def discard(path: Path) -> None:
    """Give a file's bytes back to the file system now, whoever still has it open."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size:
            _fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, 0, size)
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _fallocate(fd: int, mode: int, offset: int, count: int) -> bool:
    """Whether the file system knows the call."""
    while _libc.fallocate(fd, mode, offset, count) != 0:
        code = ctypes.get_errno()
        if code in _UNKNOWN:
            return False
        if code != errno.EINTR:
            raise OSError(code, f"{count} bytes could not be had: {os.strerror(code)}")
    return True
