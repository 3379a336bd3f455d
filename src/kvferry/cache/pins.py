"""Which slots of a pool are pinned, until when, and how firmly.

::

    firm    pins and TTLs: stay until their TTL ends, whatever needs room
    soft    high priorities, and conversations that continue: stay until their TTL ends, or until
            nothing else can make room; the lowest priority, then the oldest call, gives way first

Both together are at most a share of the slots, so there is always room for other blocks. The
pinned blocks of a chain are its first: a block is pinned no longer than those before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.types import NO_SLOTS, SlotArray

FOREVER = float("inf")
_STEP_SHARE = 16
"""Where some must give way, so large a part of the bound does: not a few with every call."""

_CHECK_SECONDS = 1.0
"""A pin may end so much later than its TTL: a look at all slots ends many pins."""

_ANY_PRIORITY = 127


class Pins:
    """Owns until when each slot is pinned, and the bound on how many are. Eviction claims them."""

    def __init__(self, num_slots: int, most: int) -> None:
        self.most = most
        self.count = 0
        """Slots that are pinned."""
        self.num_refused = 0
        """Blocks that were to be pinned so far, and for which the bound left no room."""
        # Not touched before the first pin, so they take no memory until then.
        self._firm = np.zeros(num_slots)
        self._soft = np.zeros(num_slots)
        self._priority = np.zeros(num_slots, dtype=np.int8)
        self._call = np.zeros(num_slots, dtype=np.int64)  # of those pinned, the lowest is oldest
        self._num_calls = 0
        # Soft pins have at least this priority. Any request may ask for pins: where none can give
        # way, the answer must not take a look at all slots.
        self._least = _ANY_PRIORITY
        self._next_end = FOREVER
        self._looked = -FOREVER

    def bound(self, share: float) -> None:
        """At most this part of the slots is pinned from now on; what is pinned already stays."""
        self.most = int(len(self._firm) * share)

    def pinned(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether it is pinned."""
        return self.until(slots) > 0

    def all_pinned(self) -> SlotArray:
        return ((self._firm > 0) | (self._soft > 0)).nonzero()[0]

    def until(self, slots: SlotArray) -> npt.NDArray[np.float64]:
        """Until when each is pinned, zero for those that are not."""
        return np.maximum(self._firm.take(slots), self._soft.take(slots))

    def firmly(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether it is pinned firmly."""
        return self._firm.take(slots) > 0

    def add(
        self, slots: SlotArray, until: float, priority: int | None = None
    ) -> tuple[SlotArray, SlotArray]:
        """Pin a chain from its beginning on, as far as the bound allows; softly by ``priority``.

        Returns the slots that are pinned from now on, and those that gave way for them.
        """
        # Of a chain the end gives way first. None of these gives way for the others.
        self._call[slots] = np.arange(self._num_calls + len(slots), self._num_calls, -1)
        self._num_calls += len(slots)
        fresh = np.flatnonzero(~self.pinned(slots))
        gave_way = NO_SLOTS
        lacking = len(fresh) - (self.most - self.count)
        if lacking > 0:
            gave_way = self._weakest(max(lacking, self.most // _STEP_SHARE), priority, slots)
            self.drop(gave_way)
            room = max(0, self.most - self.count)
            if len(fresh) > room:
                self.num_refused += len(fresh) - room
                slots, fresh = slots[: int(fresh[room])], fresh[:room]
        self.count += len(fresh)
        if priority is None:
            self._firm[slots] = np.maximum(self._firm.take(slots), until)
        elif len(slots):
            self._soft[slots] = np.maximum(self._soft.take(slots), until)
            self._priority[slots] = np.maximum(self._priority.take(slots), priority)
            self._least = min(self._least, priority)
        self._next_end = min(self._next_end, until)
        return slots[fresh], gave_way

    def _weakest(self, count: int, below: int | None, spared: SlotArray = NO_SLOTS) -> SlotArray:
        """Up to ``count`` slots that are pinned softly and give way first; firm pins never do.

        Only those up to the priority ``below``, where one is given.
        """
        below = _ANY_PRIORITY - 1 if below is None else below
        if self._least > below:
            return NO_SLOTS
        weak = np.flatnonzero((self._soft > 0) & (self._firm == 0))
        priorities = self._priority.take(weak)
        self._least = int(priorities.min(initial=_ANY_PRIORITY))
        weak = weak[(priorities <= below) & ~np.isin(weak, spared)]
        rank = (self._priority.take(weak).astype(np.int64) << 48) + self._call.take(weak)
        if count < len(weak):  # to sort all of them would take a step's time
            first = np.argpartition(rank, count)[:count]
            weak, rank = weak[first], rank[first]
        return weak[np.argsort(rank)]

    def give_way(self, count: int) -> SlotArray:
        """Unpin up to ``count`` that are pinned softly, those of the lowest priority first."""
        weakest = self._weakest(count, None)
        self.drop(weakest)
        return weakest

    def drop(self, slots: SlotArray) -> None:
        """These are pinned no longer; those that were not are ignored."""
        self.count -= int(np.count_nonzero(self.pinned(slots)))
        self._firm[slots] = 0.0
        self._soft[slots] = 0.0
        self._priority[slots] = 0

    def expire(self, now: float) -> SlotArray:
        """Unpin the slots whose TTL has ended; returns them."""
        if not self.count or now < self._next_end or now < self._looked + _CHECK_SECONDS:
            return NO_SLOTS
        self._looked = now
        slots = self.all_pinned()
        ends = np.stack((self._firm.take(slots), self._soft.take(slots)))
        ends[ends <= now] = 0.0
        self._firm[slots], self._soft[slots] = ends
        self._priority[slots[ends[1] == 0]] = 0
        self._next_end = float(ends[ends > 0].min(initial=FOREVER))
        self._least = 0  # what was pinned firmly too, and still is softly, may give way again
        ended = slots[~ends.any(axis=0)]
        self.count -= len(ended)
        return ended
