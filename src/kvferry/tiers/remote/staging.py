"""Memory of the process beside the engine: objects on their way to a store, or from it."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

_PAGE = 4096


class Staging:
    """Room for ``count`` objects in one piece. Owns it; lends it out object by object.

    One piece, so that an engine that registers memory can register it whole.
    """

    def __init__(self, object_bytes: int, count: int) -> None:
        self.pitch = -(-object_bytes // _PAGE) * _PAGE
        self.num_bytes = self.pitch * count
        memory = memoryview(_memory(self.num_bytes))
        self.address = address_of(memory)
        self._rooms = [
            memory[at : at + object_bytes] for at in range(0, self.num_bytes, self.pitch)
        ]
        self._free = list(range(count))

    def lend(self, count: int) -> list[memoryview]:
        """So many of them, or none where there are not so many."""
        if count > len(self._free):
            return []
        return [self._rooms[self._free.pop()] for _ in range(count)]

    def give_back(self, memory: memoryview) -> None:
        """Memory that was lent; what was never lent is its owner's."""
        offset = address_of(memory) - self.address
        if 0 <= offset < self.num_bytes:
            self._free.append(offset // self.pitch)


def _memory(num_bytes: int) -> mmap.mmap:
    """Pages of 2 MiB where they can be had: every copy here touches all of them."""
    memory = mmap.mmap(-1, num_bytes)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
