"""The least-recently-used eviction policy; every call handles a whole batch of slots."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.types import NO_SLOTS, SlotArray

_ABSENT = 0
_START = 1 << 40  # positions grow from here, and shrink when slots are put back
_PIECE = 1 << 16
_LOOK = 256  # the fewest queue entries examined at once, as most of them may be stale


class Lru:
    """A queue of touches in which only the newest touch of a slot counts.

    ::

        queue   3 7 3 1 7        positions 10 11 12 13 14, head = 10, tail = 15
        where   1 -> 13, 3 -> 12, 7 -> 14      the touches at 10 and 11 are stale

    A touch appends an entry and leaves the slot's older entry stale; the head skips stale entries.
    There are no links to mend, so a batch of any size is a few array operations. ``insert``,
    ``use`` and ``keep`` all count as a touch.
    """

    def __init__(self, residents: Residents) -> None:
        size = 1 << (2 * residents.num_slots + _LOOK).bit_length()
        self._queue = np.zeros(size, dtype=np.int32)
        self._size = size
        self._mask = size - 1
        self._where = np.zeros(residents.num_slots, dtype=np.int64)
        self._head = _START
        self._tail = _START

    def use(self, slots: SlotArray) -> None:
        # Appended in reverse: the end of a conversation is evicted before its beginning.
        count = len(slots)
        if self._tail + count - self._head > self._size:
            self._compact()
        self._write(self._tail, slots[::-1])
        self._where[slots] = np.arange(self._tail + count - 1, self._tail - 1, -1)
        self._tail += count

    insert = use

    def keep(self, slots: SlotArray) -> None:
        self.use(np.ascontiguousarray(slots[::-1]))  # indexing with a reversed view is slow

    def put_back(self, slots: SlotArray) -> None:
        if self._tail + len(slots) - self._head > self._size:
            self._compact()
        self._head -= len(slots)
        self._write(self._head, slots)
        self._where[slots] = np.arange(self._head, self._head + len(slots))

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        taken, self._head = self._oldest(count)
        self._where[taken] = _ABSENT
        return taken

    def peek(self, count: int) -> SlotArray:
        return self._oldest(count)[0]

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._where.take(slots) != _ABSENT

    def discard(self, slots: SlotArray) -> None:
        self._where[slots] = _ABSENT

    def clear(self) -> None:
        self._where.fill(_ABSENT)
        self._head = self._tail = _START

    def _oldest(self, count: int) -> tuple[SlotArray, int]:
        """Return the first ``count`` live slots, and the position after the last of them."""
        found: list[SlotArray] = []
        start = self._head
        while count > 0 and start < self._tail:
            end = min(self._tail, start + max(count, _LOOK))
            slots = self._read(start, end)
            live = (self._where.take(slots) == np.arange(start, end)).nonzero()[0][:count]
            start = start + live.item(-1) + 1 if len(live) == count else end
            count -= len(live)
            found.append(slots.take(live))
        return np.concatenate((NO_SLOTS, *found)), start

    def _compact(self) -> None:
        # The queue has room for more than twice the slots, so half of a full queue is stale. The
        # touches that filled it pay for this walk. Live entries move to the front piece by piece,
        # because a tier may have many millions of slots.
        end = self._head
        for start in range(self._head, self._tail, _PIECE):
            stop = min(start + _PIECE, self._tail)
            slots = self._read(start, stop)
            slots = slots[self._where.take(slots) == np.arange(start, stop)]
            self._write(end, slots)
            self._where[slots] = np.arange(end, end + len(slots))
            end += len(slots)
        self._tail = end

    def _read(self, start: int, end: int) -> SlotArray:
        """Return the slots queued at these positions, which may wrap around the array's end."""
        first = start & self._mask
        stop = first + end - start
        if stop <= self._size:
            return self._queue[first:stop].astype(np.int64)
        around = np.concatenate((self._queue[first:], self._queue[: stop & self._mask]))
        return around.astype(np.int64)

    def _write(self, start: int, slots: SlotArray) -> None:
        first = start & self._mask
        fits = self._size - first
        self._queue[first : first + len(slots)] = slots[:fits]
        if len(slots) > fits:
            self._queue[: len(slots) - fits] = slots[fits:]
