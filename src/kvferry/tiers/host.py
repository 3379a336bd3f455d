"""Host memory: one run of bytes, a block per slot, at addresses a copy engine can reach."""

from __future__ import annotations

import numpy as np

from kvferry.errors import ClosedError, InputError
from kvferry.tiers.base import HostFile, Rows, check_size
from kvferry.tiers.chunks import Chunks
from kvferry.tiers.mapping import Bytes, Memory, PrivateMemory
from kvferry.types import HOST, TierName


class HostTier:
    """Slots in private anonymous memory, so that a crash leaves nothing behind.

    Owns the mapping; its pages come as they are touched, or when a ``Growth`` makes them ready.
    Copy engines and tiers take ``rows`` or ``address`` and move bytes in and out without another
    copy.
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
        check_size(name, num_slots, slot_bytes)
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
        self._rows: Rows | None = np.lib.stride_tricks.as_strided(
            self._bytes, shape=(num_slots, slot_bytes), strides=(self.pitch, 1)
        )

    @property
    def pitch(self) -> int:
        """Bytes from one slot's beginning to the next one's."""
        return self.chunks.pitch

    @property
    def rows(self) -> Rows:
        """All slots, one row each; writing to a row writes the slot."""
        if self._rows is None:
            raise ClosedError(f"tier {self.name} is closed")
        return self._rows

    @property
    def bytes(self) -> Bytes:
        """All of the memory, what lies between slots too."""
        if self._bytes is None:
            raise ClosedError(f"tier {self.name} is closed")
        return self._bytes

    @property
    def address(self) -> int:
        """Where slot 0 begins; slot ``i`` begins ``i * pitch`` later."""
        return int(self.rows.ctypes.data)

    @property
    def file(self) -> HostFile | None:
        """The slots as a file; None where no other process may map them."""
        fd = self._memory.fd if self._memory is not None else None
        if fd is None:
            return None
        return HostFile(fd, self.address, self.bytes.nbytes, self.pitch)

    def close(self) -> None:
        # The mapping goes when the last array over it does: an engine may still hold one.
        self._memory = None
        self._rows = None
        self._bytes = None
