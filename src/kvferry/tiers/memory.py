"""The reference tier: a dict. Slow where a real one is slow, lossy where a real one is lossy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvferry.errors import ClosedError, TransferError
from kvferry.tiers.base import Rows, check_rows, check_size
from kvferry.types import SlotArray, TierName

MEMORY = TierName("memory")


class MemoryTier:
    """Blocks in a dict, one ``bytes`` each. Owns the bytes; the contract's plainest reading.

    ``delay`` seconds per call, ``fault`` (called with "read" or "write"; what it raises is the
    call's error) and :meth:`lose` let it stand in for a disk or a network on a bad day.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        name: TierName = MEMORY,
        delay: float = 0.0,
        fault: Callable[[str], None] | None = None,
    ) -> None:
        check_size(name, num_slots, slot_bytes)
        self.name = name
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.delay = delay
        self.fault = fault
        self._blocks: dict[int, bytes] | None = {}
        self._lock = threading.Lock()

    def write(self, slots: SlotArray, rows: Rows) -> None:
        blocks = self._begin(slots, rows)
        with self._lock:
            for slot in slots.tolist():
                blocks.pop(slot, None)
        self._suffer("write")
        with self._lock:
            for slot, row in zip(slots.tolist(), rows, strict=True):
                blocks[slot] = row.tobytes()

    def read(self, slots: SlotArray, rows: Rows) -> None:
        blocks = self._begin(slots, rows)
        self._suffer("read")
        with self._lock:
            for row, slot in zip(rows, slots.tolist(), strict=True):
                if slot not in blocks:
                    raise TransferError(f"tier {self.name}: slot {slot} holds nothing")
                row[:] = memoryview(blocks[slot])

    def lose(self, slots: SlotArray) -> None:
        """Forget these slots' bytes, as a failing medium would: reads of them raise from now on."""
        if self._blocks is not None:
            with self._lock:
                for slot in slots.tolist():
                    self._blocks.pop(slot, None)

    def close(self) -> None:
        self._blocks = None

    def _begin(self, slots: SlotArray, rows: Rows) -> dict[int, bytes]:
        if self._blocks is None:
            raise ClosedError(f"tier {self.name} is closed")
        check_rows(self, slots, rows)
        return self._blocks

    def _suffer(self, what: str) -> None:
        if self.delay:
            time.sleep(self.delay)
        if self.fault is not None:
            self.fault(what)
