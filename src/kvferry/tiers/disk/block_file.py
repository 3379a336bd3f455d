"""The file of places: place ``p`` is the ``pitch`` bytes from ``p * pitch`` on.

Neighbouring places are read and written by one long call. O_DIRECT where the file system has it:
the page cache would only hold a second copy of what is in the host's memory anyway. Where it has
not, ordinary calls, and the kernel is told that we shall not come back for these pages.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

from kvferry.errors import TransferError

SECTOR = 4096

_Call = Callable[[int, list[memoryview], int], int]


def pitch_of(block_bytes: int) -> int:
    """Bytes from one place to the next: whole sectors, so that every place can be read directly."""
    return -(-block_bytes // SECTOR) * SECTOR


class BlockFile:
    """Places on one drive. Owns the descriptor. Any thread may read and write."""

    def __init__(self, path: str, pitch: int, *, direct: bool = True) -> None:
        self._path = path
        self._pitch = pitch
        self.is_direct = False
        self._fd = -1
        if direct:
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
                self.is_direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        if self._fd < 0:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def read(self, place: int, data: memoryview) -> None:
        """Fill ``data`` (whole places) from ``place`` on."""
        at, end = place * self._pitch, place * self._pitch + len(data)
        while at < end:
            got = self._call(os.preadv, at, data)
            if not got:
                raise OSError(errno.EIO, f"the file of blocks ends at {at}")
            got = got if got == len(data) else got - got % SECTOR
            if not got:
                raise OSError(errno.EIO, f"less than a sector was read at {at}")
            at, data = at + got, data[got:]
        if not self.is_direct:
            start = place * self._pitch
            os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def write(self, place: int, data: memoryview) -> None:
        """Write ``data`` (whole places) from ``place`` on."""
        at = place * self._pitch
        while len(data):
            done = self._call(os.pwritev, at, data)
            done = done if done == len(data) else done - done % SECTOR
            if not done:
                raise OSError(errno.EIO, f"less than a sector was written at {at}")
            at, data = at + done, data[done:]

    def sync(self) -> None:
        """What was written is on the medium when this returns."""
        os.fdatasync(self._fd)
        if not self.is_direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """OSError or TransferError where this is not the file any more, or cannot be read."""
        mine, named = os.fstat(self._fd), os.stat(self._path)
        if (mine.st_dev, mine.st_ino) != (named.st_dev, named.st_ino):
            raise TransferError(f"{self._path} is another file now")

    @property
    def is_whole(self) -> bool:
        """Whether all of it has its room on the file system: nothing can grow by being written."""
        found = os.fstat(self._fd)
        return found.st_blocks * 512 >= found.st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _call(self, call: _Call, at: int, data: memoryview) -> int:
        try:
            return call(self._fd, [data], at)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
        # The file system took the flag and refuses the call: from now on without it.
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False
        return call(self._fd, [data], at)
