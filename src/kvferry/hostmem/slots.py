"""Host memory: one run of bytes, a block per slot, at addresses a copy engine can reach."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np

from kvferry.errors import ClosedError, InputError
from kvferry.hostmem.slots import Bytes, Memory, PrivateMemory
from kvferry.types import HOST, TierName

CHUNK_BYTES = 64 << 20
"""16 GiB were ready in 0.6 s with 8 threads; 1 GiB chunks took 2 s (H200 host, driver 580)."""


@dataclass(frozen=True)
class Chunk:
    """A run of memory from ``start`` on; ``slots_after`` slots are ready when it is."""

    start: int
    num_bytes: int
    slots_after: int


@dataclass(frozen=True)
class Chunks:
    """Slots of ``slot_bytes``, one every ``pitch`` bytes, ``slots_per_chunk`` in every chunk."""

    num_slots: int
    slot_bytes: int
    pitch: int
    slots_per_chunk: int

    @classmethod
    def lay_out(
        cls,
        num_slots: int,
        slot_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        spare_bytes: int = 0,
    ) -> Chunks:
        """Chunks of at most ``chunk_bytes``, or of one slot where that is larger."""
        if num_slots < 1 or slot_bytes < 1 or chunk_bytes < mmap.PAGESIZE:
            raise InputError(
                f"{num_slots} slots of {slot_bytes} bytes in chunks of {chunk_bytes}: slots and "
                f"bytes must be positive, a chunk at least one page of {mmap.PAGESIZE} bytes"
            )
        pitch = _pitch(slot_bytes, chunk_bytes)
        if spare_bytes:
            pitch = _round_up(slot_bytes + spare_bytes, mmap.PAGESIZE)
        unit = math.lcm(pitch, mmap.PAGESIZE)
        size = unit * max(1, chunk_bytes // unit)
        return cls(num_slots, slot_bytes, pitch, size // pitch)

    @property
    def chunk_bytes(self) -> int:
        """Bytes from one chunk's start to the next one's."""
        return self.slots_per_chunk * self.pitch

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks: whole pages."""
        return _round_up(self.num_slots * self.pitch, mmap.PAGESIZE)

    def __len__(self) -> int:
        return (self.num_slots + self.slots_per_chunk - 1) // self.slots_per_chunk

    def __getitem__(self, index: int) -> Chunk:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} chunks, asked for number {index}")
        before = index * self.slots_per_chunk
        after = min(before + self.slots_per_chunk, self.num_slots)
        start = before * self.pitch
        end = _round_up(after * self.pitch, mmap.PAGESIZE)
        return Chunk(start, end - start, after)


def _pitch(slot_bytes: int, chunk_bytes: int) -> int:
    """The least distance between slots that lets a chunk end with a slot and a page."""
    step = 1
    while step < mmap.PAGESIZE:
        pitch = _round_up(slot_bytes, step)
        if math.lcm(pitch, mmap.PAGESIZE) <= chunk_bytes:
            return pitch
        step *= 2
    return _round_up(slot_bytes, mmap.PAGESIZE)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class HostFile:
    """Host memory as a file, for a child process of a tier: slot 0 is at its beginning.

    ``fd`` stays open until the tier is closed; ``address`` is where this process has it. Slots are
    ``pitch`` bytes apart.
    """

    fd: int
    address: int
    num_bytes: int
    pitch: int


class HostTier:
    """Slots in one run of memory, private by default, so that a crash leaves nothing behind.

    Owns the mapping; its pages come as they are touched, or when a ``Growth`` makes them ready.
    Copy engines and tiers take ``rows`` or ``address`` and need no other copy.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        name: TierName = HOST,
        chunks: Chunks | None = None,
        memory: Memory | None = None,
    ) -> None:
        """``memory`` (default: private) holds the slots as ``chunks`` lays them out."""
        self.name = name
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.chunks = chunks if chunks is not None else Chunks.lay_out(num_slots, slot_bytes)
        memory = memory if memory is not None else PrivateMemory(self.chunks.num_bytes)
        if memory.bytes.nbytes < self.chunks.num_bytes:
            raise InputError(
                f"{num_slots} slots need {self.chunks.num_bytes} bytes of memory, "
                f"got {memory.bytes.nbytes}"
            )
        self._memory: Memory | None = memory
        self._bytes: Bytes | None = memory.bytes[: self.chunks.num_bytes]
        self._rows: Bytes | None = np.lib.stride_tricks.as_strided(
            self._bytes, shape=(num_slots, slot_bytes), strides=(self.pitch, 1)
        )

    @property
    def pitch(self) -> int:
        """Bytes from one slot's beginning to the next one's."""
        return self.chunks.pitch

    @property
    def rows(self) -> Bytes:
        """All slots, one row each; writing to a row writes the slot."""
        if self._rows is None:
            raise ClosedError(f"tier {self.name} is closed")
        return self._rows

    @property
    def bytes(self) -> Bytes:
        """All of the memory, also the bytes between slots."""
        if self._bytes is None:
            raise ClosedError(f"tier {self.name} is closed")
        return self._bytes

    @property
    def address(self) -> int:
        """Where slot 0 begins; slot ``i`` begins ``i * pitch`` later."""
        return int(self.rows.ctypes.data)

    @property
    def file(self) -> HostFile | None:
        """The slots as a file; None where other processes cannot map them."""
        fd = self._memory.fd if self._memory is not None else None
        if fd is None:
            return None
        return HostFile(fd, self.address, self.bytes.nbytes, self.pitch)

    def close(self) -> None:
        # The mapping goes when the last array over it does: an engine may still hold one.
        self._memory = None
        self._rows = None
        self._bytes = None
