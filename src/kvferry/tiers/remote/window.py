"""The engine's host slots, mapped here: a client reads and writes blocks where they lie.

::

    slot   | the block's bytes        | seal | ...    begins on a page
           └── one object of the store ──────┘

A call to a store that is given up may still write, at any later time. So its slots are cut off
before their batch ends: other pages, which are nobody's, take their place here, and what comes late
falls into those. The kernel does that for all threads at once; when it returns, none of them can
reach the engine's memory there any more, not even in the middle of a copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
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


# ------------------------------------------------------------------------------------------------
# The engine's host slots, mapped here: a client reads and writes blocks where they lie.
#
# ::
#
#     slot   | the block's bytes        | seal | ...    begins on a page
#            └── one object of the store ──────┘
#
# A call to a store that is given up may still write, at any later time. So its slots are cut off
# before their batch ends: other pages, which are nobody's, take their place here, and what comes
# late
# falls into those. The kernel does that for all threads at once; when it returns, none of them can
# reach the engine's memory there any more, not even in the middle of a copy.

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NORESERVE = 0x10, 0x4000
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Window:
    """Owns the mapping, and which slots of it are cut off. One thread."""

    def __init__(self, fd: int, there: int, num_bytes: int, pitch: int) -> None:
        """Map ``fd``, the engine's memory from the address ``there`` on in the engine."""
        self._fd = fd
        self._there = there
        self._pitch = pitch
        self.num_bytes = num_bytes
        mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        self._memory = memoryview(mapping)
        self.address = address_of(self._memory)
        self._cut: set[int] = set()
        self._is_mapped = np.zeros(num_bytes // pitch, dtype=bool)

    @classmethod
    def of(cls, told: Mapping[str, int] | None) -> Window | None:
        """As the engine told us; None where it has no memory that we may map."""
        if told is None:
            return None
        return cls(told["fd"], told["address"], told["num_bytes"], told["pitch"])

    def rooms(
        self, there: np.ndarray[tuple[int], np.dtype[np.int64]], size: int
    ) -> list[memoryview]:
        """Objects of this size in the slots at these addresses of the engine's, where they lie.

        None at all where any of them is no slot of ours, has no room for it, or is cut off.
        """
        slots, odd = np.divmod(there - self._there, self._pitch)
        whole = size <= self._pitch and not odd.any() and slots.min() >= 0
        if not whole or slots.max() >= self.num_bytes // self._pitch:
            return []
        if self._cut and not self._cut.isdisjoint(slots.tolist()):
            return []
        starts = (slots * self._pitch).tolist()
        return [self._memory[at : at + size] for at in starts]

    def map_pages(self, addresses: Sequence[int]) -> None:
        """Bring the slots here into our page table, where they are not yet. Any thread.

        Else each page is a fault when it is first copied: 0.37 s for a GiB instead of 0.09.
        """
        slots = (np.array(addresses) - self.address) // self._pitch
        for slot in slots[~self._is_mapped[slots]].tolist():
            start = self.address + slot * self._pitch
            _libc.madvise(start, self._pitch, _MADV_POPULATE_READ)  # before Linux 5.14: none
            self._is_mapped[slot] = True

    def holds(self, room: memoryview) -> bool:
        return 0 <= address_of(room) - self.address < self.num_bytes

    def is_cut(self, room: memoryview) -> bool:
        return bool(self._cut) and self._slot(room) in self._cut

    def cut(self, room: memoryview) -> None:
        """Nobody here reaches this slot of the engine's any more. It is cut off until mended."""
        self._replace(room, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._cut.add(self._slot(room))

    def mend(self, room: memoryview) -> None:
        """Nothing writes there any more, for certain: it may be used again."""
        if self.is_cut(room):
            self._replace(room, self._fd, mmap.MAP_SHARED)
            self._cut.remove(self._slot(room))

    def _slot(self, room: memoryview) -> int:
        return (address_of(room) - self.address) // self._pitch

    def _replace(self, room: memoryview, fd: int, flags: int) -> None:
        start = self._slot(room) * self._pitch
        address = self.address + start
        offset = start if fd >= 0 else 0
        got = _libc.mmap(address, self._pitch, _READ_WRITE, flags | _FIXED, fd, offset)
        if got != address:
            # Whoever waits for this slot takes it back when we are gone, and not before.
            os._exit(1)
        self._is_mapped[start // self._pitch] = False
