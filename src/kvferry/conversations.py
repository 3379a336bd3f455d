"""How deep in its chain each block is, and which conversation it belongs to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.chains import Chains
from kvferry.types import NO_SLOT, SlotArray


class Conversations:
    """Position and conversation of each slot's block, from when it is given out. Owns these two.

    A number is never used for two conversations. What is said of a free slot has no meaning.
    """

    def __init__(self, num_slots: int) -> None:
        # Not touched where no policy wants them, so they take no memory then.
        self._position = np.zeros(num_slots, dtype=np.int64)
        self._conversation = np.zeros(num_slots, dtype=np.int64)
        self._next = 0

    def positions_of(self, slots: SlotArray) -> npt.NDArray[np.int64]:
        return self._position.take(slots)

    def conversations_of(self, slots: SlotArray) -> npt.NDArray[np.int64]:
        return self._conversation.take(slots)

    def arrive(
        self,
        slots: SlotArray,
        positions: SlotArray,
        found: SlotArray,
        above: int,
        chains: Chains | None,
    ) -> None:
        """Say where in which conversation new blocks are, before ``chains`` links them.

        They are at ``positions`` of a call whose blocks are where ``found`` says, and which follow
        slot ``above``. Without ``chains`` they stand alone.
        """
        if chains is None:
            self.alone(slots)
            return
        first = positions.item(0)
        before = found.item(first - 1) if first else above
        goes_on = before == NO_SLOT or not chains.has_children(before)
        self.join(slots, positions, before, goes_on=goes_on)

    def alone(self, slots: SlotArray) -> None:
        """These new blocks belong to no chain."""
        self._position[slots] = 0
        self._conversation[slots] = np.arange(self._next, self._next + len(slots))
        self._next += len(slots)

    def join(self, slots: SlotArray, places: SlotArray, before: int, *, goes_on: bool) -> None:
        """New blocks of one chain, at these places of it, the first right after slot ``before``.

        ``goes_on`` says that nothing followed that one so far. ``before`` may be ``NO_SLOT``.
        """
        first = self._position.item(before) + 1 if before != NO_SLOT else 0
        self._position[slots] = places + (first - places.item(0))
        if goes_on and before != NO_SLOT:
            self._conversation[slots] = self._conversation.item(before)
        else:
            self._conversation[slots] = self._next
            self._next += 1
