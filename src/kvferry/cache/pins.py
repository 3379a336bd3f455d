"""Which slots of a pool are pinned, until when, and how firmly.

::

    firm    pins and TTLs: last until their TTL ends, whatever needs room
    soft    high priorities, and conversations that continue: last until their TTL ends or nothing
            else can be evicted; those of the lowest priority, then of the oldest call, end first

Both together are at most a share of the slots, so there is always room for other blocks. The
pinned blocks of a chain are its first: a block is pinned no longer than those before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.types import NO_SLOTS, SlotArray

FOREVER = float("inf")
_STEP_SHARE = 16
"""1/16 of the bound is the fewest soft pins ended at once to make room: not a few in every call."""

_CHECK_SECONDS = 1.0
"""Least seconds between two scans of all slots for ended TTLs; pins may end that much late."""

_ANY_PRIORITY = 127


class Pins:
    """Owns each slot's pin end and the bound on pins; leaves claims to ``Eviction``."""

    def __init__(self, num_slots: int, most: int) -> None:
        self.most = most
        self.count = 0
        """Slots pinned now."""
        self.num_refused = 0
        """Blocks so far that were not pinned because the bound left no room."""
        # Pages of zeros that nothing touches before the first pin take no memory.
        self._firm = np.zeros(num_slots)
        self._soft = np.zeros(num_slots)
        self._priority = np.zeros(num_slots, dtype=np.int8)
        self._call = np.zeros(num_slots, dtype=np.int64)  # order of pinning; lower is older
        self._num_calls = 0
        # A lower bound on the priorities of soft pins. Any request may ask for pins: where no pin
        # can give way, the answer must not scan all slots.
        self._least = _ANY_PRIORITY
        self._next_end = FOREVER
        self._looked = -FOREVER

    def bound(self, share: float) -> None:
        """Set the bound on pins to this share of the slots; existing pins stay."""
        self.most = int(len(self._firm) * share)

    def pinned(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Return, for each slot, whether it is pinned."""
        return self.until(slots) > 0

    def all_pinned(self) -> SlotArray:
        return ((self._firm > 0) | (self._soft > 0)).nonzero()[0]

    def until(self, slots: SlotArray) -> npt.NDArray[np.float64]:
        """Return the time at which each slot's pin ends; zero for slots that are not pinned."""
        return np.maximum(self._firm.take(slots), self._soft.take(slots))

    def firmly(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Return, for each slot, whether it has a firm pin."""
        return self._firm.take(slots) > 0

    def add(
        self, slots: SlotArray, until: float, priority: int | None = None
    ) -> tuple[SlotArray, SlotArray]:
        """Pin a chain from its beginning on as far as the bound allows; softly with a ``priority``.

        Returns the newly pinned slots, and the slots whose soft pins ended to make room for them.
        """
        # The end of a chain gives way first. None of these slots gives way for the others.
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
        """Return up to ``count`` softly pinned slots, the first to give way first.

        With ``below``, only slots of at most this priority. Firmly pinned slots never give way.
        """
        below = _ANY_PRIORITY - 1 if below is None else below
        if self._least > below:
            return NO_SLOTS
        weak = np.flatnonzero((self._soft > 0) & (self._firm == 0))
        priorities = self._priority.take(weak)
        self._least = int(priorities.min(initial=_ANY_PRIORITY))
        weak = weak[(priorities <= below) & ~np.isin(weak, spared)]
        rank = (self._priority.take(weak).astype(np.int64) << 48) + self._call.take(weak)
        if count < len(weak):  # sorting all soft pins would take as long as an engine step
            first = np.argpartition(rank, count)[:count]
            weak, rank = weak[first], rank[first]
        return weak[np.argsort(rank)]

    def give_way(self, count: int) -> SlotArray:
        """End up to ``count`` soft pins, the lowest priority first; return their slots."""
        weakest = self._weakest(count, None)
        self.drop(weakest)
        return weakest

    def drop(self, slots: SlotArray) -> None:
        """Unpin these slots; ignores slots that are not pinned."""
        self.count -= int(np.count_nonzero(self.pinned(slots)))
        self._firm[slots] = 0.0
        self._soft[slots] = 0.0
        self._priority[slots] = 0

    def expire(self, now: float) -> SlotArray:
        """Unpin the slots whose TTL has ended, and return them."""
        if not self.count or now < self._next_end or now < self._looked + _CHECK_SECONDS:
            return NO_SLOTS
        self._looked = now
        slots = self.all_pinned()
        ends = np.stack((self._firm.take(slots), self._soft.take(slots)))
        ends[ends <= now] = 0.0
        self._firm[slots], self._soft[slots] = ends
        self._priority[slots[ends[1] == 0]] = 0
        self._next_end = float(ends[ends > 0].min(initial=FOREVER))
        self._least = 0  # where a firm pin ended, a soft pin below it may give way again
        ended = slots[~ends.any(axis=0)]
        self.count -= len(ended)
        return ended
