"""Which slots of a pool are pinned, until when, and how firmly.

::

    firm    pins and TTLs: stay until their TTL ends, whatever needs room
    soft    high priorities, and conversations that continue: stay until their TTL ends, or until
            nothing else can make room; the lowest priority, then the oldest call, gives way first

Both together are at most a share of the slots, so there is always room for other blocks. The
pinned blocks of a chain are its first: a block is pinned no longer than those before it.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

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


class Pins:
    """Owns until when each slot is pinned, and the bound on how many are. Eviction claims them.

    Any request may pin blocks, so no call looks at all slots: what ends next and what gives way
    next are queues, in which an entry counts until a later call names its slots.
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
        self._call = np.zeros(num_slots, dtype=np.int64)  # the call that last named a slot
        self._num_calls = 0
        self._ends: list[tuple[float, int, SlotArray]] = []  # a heap, the first to end first
        self._num_ending = 0
        self._queues: dict[
            int, deque[tuple[int, SlotArray]]
        ] = {}  # soft, by priority, oldest first
        self._num_queued = 0
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
        self._num_calls += 1
        self._call[named] = self._num_calls  # so none of them is in a queue: none gives way
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
        self._queue(named)
        self._note_end(slots, until)
        return came, gave_way

    # -- what gives way ---------------------------------------------------------------------------

    def _queue(self, slots: SlotArray) -> None:
        """Those of them that are pinned softly stand behind all others of their priority."""
        soft = slots[(self._soft.take(slots) > 0) & (self._firm.take(slots) == 0)]
        if not len(soft):
            return
        call, priorities = self._num_calls, self._priority.take(soft)
        self._call[soft] = call
        for priority in np.unique(priorities).tolist():
            part = soft[priorities == priority]
            self._queues.setdefault(priority, deque()).append((call, part))
        self._num_queued += len(soft)
        if self._num_queued > _MOST_TIMES * self.most + _LEAST:
            for priority in list(self._queues):
                fresh = [(n, self._standing(n, part)) for n, part in self._queues[priority]]
                self._queues[priority] = deque(each for each in fresh if len(each[1]))
            queues = self._queues.values()
            self._num_queued = sum(len(part) for queue in queues for _, part in queue)

    def _standing(self, call: int, slots: SlotArray) -> SlotArray:
        """Those of a queue's entry that it still counts for."""
        is_soft = (self._soft.take(slots) > 0) & (self._firm.take(slots) == 0)
        return slots[is_soft & (self._call.take(slots) == call)]

    def _weakest(self, count: int, below: int | None) -> SlotArray:
        """About ``count`` slots that are pinned softly and give way first; firm pins never do.

        Only those up to the priority ``below``, where one is given. Slots pinned by one call go
        together: half a chain must not lose its beginning.
        """
        found: list[SlotArray] = []
        for priority in sorted(self._queues):
            if below is not None and priority > below:
                break
            queue = self._queues[priority]
            while queue and count > 0:
                call, slots = queue.popleft()
                self._num_queued -= len(slots)
                slots = self._standing(call, slots)
                found.append(slots)
                count -= len(slots)
            if not queue:
                del self._queues[priority]
            if count <= 0:
                break
        return np.concatenate((NO_SLOTS, *found))

    def give_way(self, count: int) -> SlotArray:
        """Unpin about ``count`` that are pinned softly, those of the lowest priority first."""
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

    def drop_all(self) -> SlotArray:
        """Unpin all slots; returns them."""
        every = self.all_pinned() if self.count else NO_SLOTS
        self.drop(every)
        self._ends.clear()
        self._queues.clear()
        self._num_ending = self._num_queued = 0
        return every

    def _note_end(self, slots: SlotArray, until: float) -> None:
        if len(slots) and until < FOREVER:
            heappush(self._ends, (until, self._num_calls, slots))
            self._num_ending += len(slots)
            if self._num_ending > _MOST_TIMES * self.most + _LEAST:
                self._note_ends_anew()

    def _note_ends_anew(self) -> None:
        """One entry for each time at which something ends."""
        self._ends = []
        for ends in (self._firm, self._soft):
            slots = np.flatnonzero((ends > 0) & (ends < FOREVER))
            slots = slots[np.argsort(ends.take(slots), kind="stable")]
            times, firsts = np.unique(ends.take(slots), return_index=True)
            parts = np.split(slots, firsts[1:]) if len(slots) else []
            start = self._num_calls
            self._ends += [
                (time, start + n, part)
                for n, (time, part) in enumerate(zip(times.tolist(), parts, strict=True))
            ]
            self._num_calls += len(parts)
        heapify(self._ends)
        self._num_ending = sum(len(part) for _, _, part in self._ends)

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
        self._priority[slots[self._soft.take(slots) == 0]] = 0
        ended = slots[~self.pinned(slots)]
        self.count -= len(ended)
        # Slots that were pinned firmly too, and still are softly, may give way again.
        self._num_calls += 1
        self._queue(slots[was_firm])
        return ended
