"""Least recently used, for whole batches at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.types import NO_SLOTS, SlotArray

_ABSENT = 0
_START = 1 << 40  # positions grow from here, and shrink when slots are put back
_PIECE = 1 << 16
_LOOK = 256  # queue entries looked at together when most of them may be stale


class Lru:
    """A queue of touches in which only the newest touch of a slot counts.

    ::

        queue   3 7 3 1 7        positions 10 11 12 13 14, head = 10, tail = 15
        where   1 -> 13, 3 -> 12, 7 -> 14      the touches at 10 and 11 are stale

    A touch appends and leaves the older entry behind; the entry is skipped when the head reaches
    it. No links to mend, so a batch of any size is a few array operations. That a block came, was
    used or is kept for the sake of others is all the same to it.
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
        # Appended in reverse: the end of a conversation goes before its beginning.
        count = len(slots)
        if self._tail + count - self._head > self._size:
            self._compact()
        self._write(self._tail, slots[::-1])
        self._where[slots] = np.arange(self._tail + count - 1, self._tail - 1, -1)
        self._tail += count

    insert = use

    def keep(self, slots: SlotArray) -> None:
        self.use(np.ascontiguousarray(slots[::-1]))  # a reversed view is slow to write by

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
        """The first ``count`` live slots, and the position after the last of them."""
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
        # The queue is at least twice the slots, so half of it or more is stale by now:
        # the walk is paid for by the touches that filled it. In pieces, each moved to behind the
        # live ones before it: of a tier's slots there may be many millions.
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
        """What is queued at these positions; around the end of the array where it has to be."""
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
