"""Which slots of a pool somebody asked to stay, until when, and how firmly.

::

    firm    pins and keeps: stay until their time, whoever needs room
    soft    high priorities, and conversations that go on: stay until their time, or until nothing
            else can make room; the lowest priority gives way first, then the one told longest ago

Both together are at most a share of the slots, so there is always room for who asked for nothing.
What is held is a beginning of its chain: a block is held no longer than those before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.types import NO_SLOTS, SlotArray

FOREVER = float("inf")
_STEP_SHARE = 16
"""Where some must give way, so large a part of the bound does: to find them takes a look at all."""

_LOOK_SECONDS = 0.25
"""A hold may end so much later than it could: to find what has ended is a look at all slots."""


class Holds:
    """Owns until when each slot is held, and the bound on how many are. The pool claims them."""

    def __init__(self, num_slots: int, most: int) -> None:
        self.most = most
        self.count = 0
        """Slots that are held."""
        self.num_refused = 0
        """Blocks that were to be held so far, and for which the bound left no room."""
        # Not touched where nobody asks for anything, so they take no memory then.
        self._firm = np.zeros(num_slots)
        self._soft = np.zeros(num_slots)
        self._priority = np.zeros(num_slots, dtype=np.int8)
        self._told = np.zeros(num_slots)
        self._next_end = FOREVER

    def bound(self, share: float) -> None:
        """At most this part of the slots is held from now on; what is held already stays."""
        self.most = int(len(self._firm) * share)

    def held(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether it is held."""
        return np.maximum(self._firm.take(slots), self._soft.take(slots)) > 0

    def all_held(self) -> SlotArray:
        return np.flatnonzero((self._firm > 0) | (self._soft > 0))

    def until(self, slots: SlotArray) -> npt.NDArray[np.float64]:
        """Until when each is held, zero for those that are not."""
        return np.maximum(self._firm.take(slots), self._soft.take(slots))

    def firmly(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether somebody pinned it or keeps it."""
        return self._firm.take(slots) > 0

    def add(
        self, slots: SlotArray, until: float, now: float, priority: int | None = None
    ) -> tuple[SlotArray, SlotArray]:
        """Hold a chain from its beginning on, as far as the bound lets us; softly by ``priority``.

        Returns the slots that are held from now on, and those that gave way for them.
        """
        fresh = np.flatnonzero(~self.held(slots))
        gave_way = NO_SLOTS
        lacking = len(fresh) - (self.most - self.count)
        if lacking > 0:
            gave_way = self._weakest(max(lacking, self.most // _STEP_SHARE), slots, priority)
            self.drop(gave_way)
            room = max(0, self.most - self.count)
            if len(fresh) > room:
                self.num_refused += len(fresh) - room
                slots, fresh = slots[: int(fresh[room])], fresh[:room]
        came = slots[fresh]
        self.count += len(came)
        self._told[slots] = now
        if priority is None:
            self._firm[slots] = np.maximum(self._firm.take(slots), until)
        else:
            self._soft[slots] = np.maximum(self._soft.take(slots), until)
            self._priority[slots] = np.maximum(self._priority.take(slots), priority)
        self._next_end = min(self._next_end, until)
        return came, gave_way

    def _weakest(self, count: int, spared: SlotArray, below: int | None) -> SlotArray:
        """About ``count`` slots that are held softly and give way first; firm holds never do.

        ``below`` a priority, where one is given: those of the same were told before and go as well.
        """
        soft = np.flatnonzero((self._soft > 0) & (self._firm == 0))
        soft = soft[~np.isin(soft, spared)]
        if below is not None:
            soft = soft[self._priority.take(soft) <= below]
        if not len(soft):
            return soft
        rank = np.lexsort((self._told.take(soft), self._priority.take(soft)))
        soft = soft[rank]
        # Told together, they go together: half a chain must not lose its beginning.
        last = soft[min(count, len(soft)) - 1]
        alike = (self._priority.take(soft) == self._priority[last]) & (
            self._told.take(soft) == self._told[last]
        )
        return soft[: int(np.flatnonzero(alike)[-1]) + 1]

    def give_way(self, count: int) -> SlotArray:
        """Let go of about ``count`` that are held softly, the least of them first."""
        weakest = self._weakest(count, NO_SLOTS, None)
        self.drop(weakest)
        return weakest

    def drop(self, slots: SlotArray) -> None:
        """These are held no longer; those that were not are ignored."""
        self.count -= int(np.count_nonzero(self.held(slots)))
        self._firm[slots] = 0.0
        self._soft[slots] = 0.0
        self._priority[slots] = 0

    def drop_all(self) -> SlotArray:
        """Nothing is held any more; what was."""
        every = self.all_held() if self.count else NO_SLOTS
        self.drop(every)
        return every

    def expire(self, now: float) -> SlotArray:
        """Let go of what was held until now."""
        if now < self._next_end:
            return NO_SLOTS
        ends = np.maximum(self._firm, self._soft)
        self._firm[self._firm <= now] = 0.0
        self._soft[self._soft <= now] = 0.0
        self._priority[self._soft == 0] = 0
        ended = np.flatnonzero((ends > 0) & (ends <= now))
        self.count -= len(ended)
        rest = ends[ends > now]
        self._next_end = max(float(rest.min()), now + _LOOK_SECONDS) if len(rest) else FOREVER
        return ended
