"""A journal's file: bytes at offsets, and a barrier that says they are on the medium."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol


class JournalFile(Protocol):
    """What a journal needs of a file; tests put one in its place that loses and tears sectors.

    Every call may raise OSError. After a failed ``sync`` nothing written since the last good one
    may be taken to be on the medium, not even after another ``sync`` that succeeds: the kernel has
    forgotten that those bytes were still to be written. Whoever wants them there writes them again.
    """

    @property
    def num_bytes(self) -> int: ...

    def read_at(self, offset: int, count: int) -> bytes:
        """At most ``count`` bytes; fewer at the end of the file."""

    def write_at(self, offset: int, data: memoryview) -> int:
        """How many bytes were taken, from the first on."""

    def sync(self) -> None:
        """Return once everything written so far is on the medium."""

    def close(self) -> None:
        """Give the file back. Safe to call twice."""


class DiskFile:
    """A real file, open for reading or for both. Writes go through the page cache."""

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        flags = os.O_RDWR if writable else os.O_RDONLY
        self._fd: int | None = os.open(path, flags | os.O_CLOEXEC)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._number).st_size

    @property
    def _number(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, "the journal is closed")
        return self._fd

    def read_at(self, offset: int, count: int) -> bytes:
        return os.pread(self._number, count, offset)

    def write_at(self, offset: int, data: memoryview) -> int:
        return os.pwrite(self._number, data, offset)

    def sync(self) -> None:
        os.fdatasync(self._number)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def write_whole(file: JournalFile, offset: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of it, however short the single writes are; OSError where it does not go on."""
    rest = memoryview(data).cast("B")
    while rest:
        taken = file.write_at(offset, rest)
        if taken <= 0:
            raise OSError(errno.EIO, f"a write at {offset} took none of {len(rest)} bytes")
        rest = rest[taken:]
        offset += taken


def read_whole(file: JournalFile, offset: int, count: int) -> bytes:
    """``count`` bytes, or fewer where the file ends; OSError where the medium gives none."""
    parts = []
    while count > 0:
        part = file.read_at(offset, count)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
