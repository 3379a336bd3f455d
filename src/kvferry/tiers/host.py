"""Host memory: one run of bytes, a block per slot, at addresses a copy engine can reach."""

from __future__ import annotations

import mmap

import numpy as np

from kvferry.errors import ClosedError
from kvferry.tiers.base import Rows, check_rows, check_size
from kvferry.types import HOST, SlotArray, TierName


class HostTier:
    """Slots in private anonymous memory, so that a crash leaves nothing behind.

    Owns the mapping. Copy engines take ``rows`` or ``address`` and move bytes in and out without
    another copy; ``read`` and ``write`` are for everything else.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, name: TierName = HOST) -> None:
        check_size(name, num_slots, slot_bytes)
        self.name = name
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._mapping: mmap.mmap | None = mmap.mmap(-1, num_slots * slot_bytes)
        self._rows: Rows | None = np.frombuffer(self._mapping, dtype=np.uint8).reshape(
            num_slots, slot_bytes
        )

    @property
    def rows(self) -> Rows:
        """All slots, one row each; writing to a row writes the slot."""
        if self._rows is None:
            raise ClosedError(f"tier {self.name} is closed")
        return self._rows

    @property
    def address(self) -> int:
        """Where slot 0 begins; slot ``i`` begins ``i * slot_bytes`` later."""
        return int(self.rows.ctypes.data)

    def write(self, slots: SlotArray, rows: Rows) -> None:
        own = self.rows
        check_rows(self, slots, rows)
        own[slots] = rows

    def read(self, slots: SlotArray, rows: Rows) -> None:
        own = self.rows
        check_rows(self, slots, rows)
        np.take(own, slots, axis=0, out=rows, mode="clip")

    def close(self) -> None:
        # The mapping goes when the last array over it does: an engine may still hold one.
        self._rows = None
        self._mapping = None
