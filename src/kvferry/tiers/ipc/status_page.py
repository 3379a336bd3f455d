"""A page of memory that an engine and a child process share: counters, a heartbeat, copy flags.

The child writes, the engine reads, and neither waits for the other::

    words 0..      counters, one word each; word 0 is the heartbeat
    words 64..     for each thread of the child: 1 while it writes into the engine's memory
    from 4096 on   arrays that the child lays down once for the engine
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import TransferError

PAGE_BYTES = 4096
MAX_THREADS = 64
HEARTBEAT = 0
_COPYING = 64


class StatusPage:
    """Owns its mapping and its descriptor, not the meaning of the counters."""

    def __init__(self, fd: int | None = None) -> None:
        """Open the page behind ``fd``, or make a new one."""
        self.fd = os.memfd_create("kvferry-child", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, PAGE_BYTES)
        self._mapping = mmap.mmap(self.fd, PAGE_BYTES)
        self._words = np.frombuffer(self._mapping, dtype=np.int64)
        self._lock = threading.Lock()

    def add(self, counter: int, amount: int) -> None:
        """Add to a counter. Threads of the child may add at the same time."""
        with self._lock:
            self._words[counter] += amount

    def put(self, counter: int, value: int) -> None:
        """Set a counter."""
        self._words[counter] = value

    def get(self, counter: int) -> int:
        """Return a counter."""
        return int(self._words[counter])

    def set_copying(self, thread: int, is_copying: bool) -> None:
        """Flag that a thread writes into the engine's memory; around every such write."""
        self._words[_COPYING + thread] = is_copying

    @property
    def is_copying(self) -> bool:
        """Whether any thread of the child writes into the engine's memory."""
        return bool(self._words[_COPYING : _COPYING + MAX_THREADS].any())

    def reserve(self, num_bytes: int) -> None:
        """Make room for ``num_bytes`` of arrays behind the page."""
        os.ftruncate(self.fd, PAGE_BYTES + num_bytes)

    def write_at(self, offset: int, array: npt.NDArray[Any]) -> None:
        """Write an array behind the page, ``offset`` bytes from its end."""
        data = np.ascontiguousarray(array).ravel().view(np.uint8).data
        at = PAGE_BYTES + offset
        while len(data):
            done = os.pwrite(self.fd, data, at)
            data, at = data[done:], at + done

    def read_from(self, num_bytes: int) -> memoryview:
        """Return the bytes behind the page: the shared memory itself, freed with the last view.

        Raises TransferError if the child wrote fewer.
        """
        if os.fstat(self.fd).st_size < PAGE_BYTES + num_bytes:
            raise TransferError("a child process announced more than it wrote")
        return memoryview(mmap.mmap(self.fd, PAGE_BYTES + num_bytes))[PAGE_BYTES:]

    def close(self) -> None:
        """Give the descriptor back; the counters can still be read."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
