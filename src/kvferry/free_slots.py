"""The free slots of a pool, in the order in which they are given out."""

from __future__ import annotations

import numpy as np

from kvferry.errors import InputError
from kvferry.types import SlotArray


class FreeSlots:
    """A stack of free slots. Owns their order; what else is true of a slot the pool knows."""

    __slots__ = ("_stack", "count")

    def __init__(self, num_slots: int) -> None:
        self._stack = np.empty(num_slots, dtype=np.int32)
        self.count = 0

    @property
    def slots(self) -> SlotArray:
        """All of them; the last is given out next."""
        return self._stack[: self.count].astype(np.int64)

    def push(self, ascending: SlotArray) -> None:
        """The lowest is given out first.

        What is stored together then lies in as few runs as the slots allow, which the index looks
        up faster.
        """
        end = self.count + len(ascending)
        self._stack[self.count : end] = ascending[::-1]
        self.count = end

    def take(self, count: int, beside: object = None) -> SlotArray:
        """As many slots, of which there are enough; wherever they are."""
        self.count -= count
        return self._stack[self.count : self.count + count][::-1].astype(np.int64)

    def give_out_next(self, slots: SlotArray) -> None:
        """The next ones taken are these, in this order."""
        free = np.zeros(len(self._stack), dtype=bool)
        free[self._stack[: self.count]] = True
        if not free.take(slots).all():
            raise InputError(f"{len(slots)} slots cannot be given out next: some are not free")
        free[slots] = False
        others = np.flatnonzero(free)
        self._stack[: len(others)] = others[::-1]
        self._stack[len(others) : self.count] = slots[::-1]
