"""Which slots of a pool are pinned, until when, and how firmly.

::

    firm    pins and TTLs: stay until their TTL ends, whatever needs room
    soft    high priorities, and conversations that continue: stay until their TTL ends, or until
            nothing else can make room; the lowest priority, then the oldest call, gives way first

Both together are at most a share of the slots, so there is always room for other blocks. The
pinned blocks of a chain are its first: a block is pinned no longer than those before it.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.types import NO_SLOTS, SlotArray

FOREVER = float("inf")
_STEP_SHARE = 16
"""Where some must give way, so large a part of the bound does: not a few with every call."""

_CHECK_SECONDS = 0.25
"""A pin may end so much later than its TTL: those that end together are let go together."""

_MOST_TIMES, _LEAST = 4, 1024
"""So often as many entries as may be pinned are kept, and so many more: most are stale by then."""


class RankedSlots:
    """Slots by priority, those of one priority in the order in which they came. Owns this order.

    An interrupt between two steps may leave a slot's priority without its place, never the reverse.
    """

    def __init__(self) -> None:
        self.queues: dict[int, dict[int, None]] = {}
        """By priority; a priority without slots is not here."""
        self._priority: dict[int, int] = {}

    def add(self, slots: SlotArray, priority: int) -> None:
        """These stand behind all others of this priority, and nowhere else."""
        self.discard(slots)
        if len(slots):
            numbers = slots.tolist()
            self._priority.update(dict.fromkeys(numbers, priority))
            self.queues.setdefault(priority, {}).update(dict.fromkeys(numbers))

    def discard(self, slots: SlotArray) -> None:
        if not self.queues:
            return
        for slot in slots.tolist():
            priority = self._priority.get(slot)
            if priority is not None:
                queue = self.queues.get(priority, {})
                queue.pop(slot, None)
                if not queue:
                    self.queues.pop(priority, None)
                del self._priority[slot]

    def first(self, priority: int, count: int) -> SlotArray:
        """Up to ``count`` slots of one priority, in their order."""
        return np.array([*islice(self.queues.get(priority, ()), max(0, count))], dtype=np.int64)

    def clear(self) -> None:
        self.queues.clear()
        self._priority.clear()


class Pins:
    """Owns until when each slot is pinned, and the bound on how many are. Eviction claims them.

    Any request may pin blocks, so no call looks at all slots: what ends next is a heap, in which an
    entry is stale once a later call named its slots.
    """

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
        self._weak = RankedSlots()  # softly pinned alone; of a chain the end first
        self._ends: list[tuple[float, int, SlotArray]] = []  # a heap, the first to end first
        self._num_entries = self._num_ending = 0
        self._look_at = 0.0

    def bound(self, share: float) -> None:
        """At most this part of the slots is pinned from now on; what is pinned already stays."""
        self.most = int(len(self._firm) * share)

    def pinned(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether it is pinned."""
        return np.maximum(self._firm.take(slots), self._soft.take(slots)) > 0

    def all_pinned(self) -> SlotArray:
        return ((self._firm > 0) | (self._soft > 0)).nonzero()[0]

    def until(self, slots: SlotArray) -> npt.NDArray[np.float64]:
        """Until when each is pinned, zero for those that are not."""
        return np.maximum(self._firm.take(slots), self._soft.take(slots))

    def firmly(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether it is pinned firmly."""
        return self._firm.take(slots) > 0

    def add(
        self, slots: SlotArray, until: float, now: float, priority: int | None = None
    ) -> tuple[SlotArray, SlotArray]:
        """Pin a chain from its beginning on, as far as the bound allows; softly by ``priority``.

        Returns the slots that are pinned from now on, and those that gave way for them.
        """
        named = slots
        self._weak.discard(named)  # none of them gives way for the others
        fresh = np.flatnonzero(~self.pinned(slots))
        gave_way = NO_SLOTS
        lacking = len(fresh) - (self.most - self.count)
        if lacking > 0:
            gave_way = self._weakest(max(lacking, self.most // _STEP_SHARE), priority)
            self.drop(gave_way)
            room = max(0, self.most - self.count)
            if len(fresh) > room:
                self.num_refused += len(fresh) - room
                slots, fresh = slots[: int(fresh[room])], fresh[:room]
        came = slots[fresh]
        self.count += len(came)
        if priority is None:
            self._firm[slots] = np.maximum(self._firm.take(slots), until)
        else:
            self._soft[slots] = np.maximum(self._soft.take(slots), until)
            self._priority[slots] = np.maximum(self._priority.take(slots), priority)
        self._rank(named)
        self._note_ends(slots)
        return came, gave_way

    # -- what gives way ---------------------------------------------------------------------------

    def _rank(self, slots: SlotArray) -> None:
        """Those of them that are pinned softly stand behind all others of their priority."""
        soft = slots[(self._soft.take(slots) > 0) & (self._firm.take(slots) == 0)][::-1]
        priorities = self._priority.take(soft)
        for priority in np.unique(priorities).tolist():
            self._weak.add(soft[priorities == priority], priority)

    def _weakest(self, count: int, below: int | None) -> SlotArray:
        """Up to ``count`` slots that are pinned softly and give way first; firm pins never do.

        Only those up to the priority ``below``, where one is given.
        """
        found = [NO_SLOTS]
        for priority in sorted(self._weak.queues):
            if below is not None and priority > below:
                break
            found.append(self._weak.first(priority, count))
            count -= len(found[-1])
        return np.concatenate(found)

    def give_way(self, count: int) -> SlotArray:
        """Unpin up to ``count`` that are pinned softly, those of the lowest priority first."""
        weakest = self._weakest(count, None)
        self.drop(weakest)
        return weakest

    # -- what ends --------------------------------------------------------------------------------

    def drop(self, slots: SlotArray) -> None:
        """These are pinned no longer; those that were not are ignored."""
        self.count -= int(np.count_nonzero(self.pinned(slots)))
        self._firm[slots] = 0.0
        self._soft[slots] = 0.0
        self._priority[slots] = 0
        self._weak.discard(slots)

    def drop_all(self) -> SlotArray:
        """Unpin all slots; returns them."""
        every = self.all_pinned() if self.count else NO_SLOTS
        self.drop(every)
        self._ends.clear()
        self._num_ending = 0
        return every

    def _note_ends(self, slots: SlotArray) -> None:
        """One entry for each time at which a pin of theirs ends next."""
        if self._num_ending + len(slots) > _MOST_TIMES * self.most + _LEAST:
            self._ends, self._num_ending, slots = [], 0, self.all_pinned()
        firm, soft = self._firm.take(slots), self._soft.take(slots)
        ends = np.where((firm > 0) & (soft > 0), np.minimum(firm, soft), np.maximum(firm, soft))
        order = np.argsort(ends, kind="stable")[: np.count_nonzero(ends < FOREVER)]
        self._num_ending += len(order)
        for part in np.split(order, np.flatnonzero(np.diff(ends.take(order))) + 1):
            if len(part):
                self._num_entries += 1
                heappush(self._ends, (ends.item(part[0]), self._num_entries, slots.take(part)))

    def expire(self, now: float) -> SlotArray:
        """Unpin the slots whose TTL has ended; returns them."""
        if not self._ends or now < self._ends[0][0] or now < self._look_at:
            return NO_SLOTS
        self._look_at = now + _CHECK_SECONDS
        found = []
        while self._ends and self._ends[0][0] <= now:
            found.append(heappop(self._ends)[2])
            self._num_ending -= len(found[-1])
        slots = np.unique(np.concatenate(found))
        slots = slots[self.pinned(slots)]
        was_firm = self._firm.take(slots) > 0
        for ends in (self._firm, self._soft):
            ends[slots[ends.take(slots) <= now]] = 0.0
        is_pinned = self.pinned(slots)
        ended = slots[~is_pinned]
        self.count -= len(ended)
        self._priority[slots[self._soft.take(slots) == 0]] = 0
        self._weak.discard(ended)
        # Slots that were pinned firmly too, and still are softly, may give way again.
        self._rank(slots[was_firm])
        self._note_ends(slots[is_pinned])
        return ended
