"""What an eviction policy is: an order of slots, nothing more."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.types import SlotArray


class EvictionOrder(Protocol):
    """In which order cached slots should go. Owns the order; leaves claims and keys to the pool.

    A slot is in the order from its first ``touch`` until it is discarded or taken.
    """

    def __len__(self) -> int:
        """How many slots are in the order."""

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether it is in the order."""

    def touch(self, slots: SlotArray) -> None:
        """These distinct slots were used, the least valuable first."""

    def discard(self, slots: SlotArray) -> None:
        """These slots left the cache; unknown ones are ignored."""

    def take_oldest(self, count: int) -> SlotArray:
        """Remove up to ``count`` slots from the order and return them, the first to go first.

        The pool evicts what it can of them, touches those it must keep for the sake of others,
        and puts back what it did not need.
        """

    def peek_oldest(self, count: int) -> SlotArray:
        """Up to ``count`` slots that would go first, in that order; changes nothing."""

    def put_back(self, slots: SlotArray) -> None:
        """These slots, taken before, stay for now: the first to go again, in this order."""

    def clear(self) -> None:
        """Forget every slot."""
