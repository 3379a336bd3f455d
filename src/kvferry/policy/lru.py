"""Least recently used, for whole batches at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.types import SlotArray

_ABSENT = -1
_START = 1 << 40  # positions grow from here, and shrink when slots are put back
_LOOK = 256  # queue entries looked at together when most of them may be stale


class LruOrder:
    """A queue of touches in which only the newest touch of a slot counts.

    ::

        queue   3 7 3 1 7        positions 10 11 12 13 14, head = 10, tail = 15
        where   1 -> 13, 3 -> 12, 7 -> 14      the touches at 10 and 11 are stale

    A touch appends and leaves the older entry behind; the entry is skipped when the head reaches
    it. No links to mend, so a batch of any size is a few array operations.
    """

    def __init__(self, num_slots: int) -> None:
        # Filled here: a page that is first touched later costs a step of the scheduler.
        self._queue = np.full(1 << (4 * num_slots + _LOOK).bit_length(), 0, dtype=np.int64)
        self._mask = len(self._queue) - 1
        self._where = np.full(num_slots, _ABSENT, dtype=np.int64)
        self._head = _START
        self._tail = _START
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._where.take(slots) != _ABSENT

    def touch(self, slots: SlotArray) -> None:
        if self._tail + len(slots) - self._head > len(self._queue):
            self._compact()
        slots = np.ascontiguousarray(slots)  # a reversed view is slow to write to
        positions = np.arange(self._tail, self._tail + len(slots))
        self._size += int(np.count_nonzero(self._where.take(slots) == _ABSENT))
        self._write(self._tail, slots)
        self._where[slots] = positions
        self._tail += len(slots)

    def discard(self, slots: SlotArray) -> None:
        self._size -= int((self._where.take(slots) != _ABSENT).sum())
        self._where[slots] = _ABSENT

    def take_oldest(self, count: int) -> SlotArray:
        taken: list[SlotArray] = []
        while count > 0 and self._head < self._tail:
            end = min(self._tail, self._head + max(count, _LOOK))
            positions = np.arange(self._head, end)
            slots = self._read(self._head, end)
            live = np.flatnonzero(self._where.take(slots) == positions)[:count]
            self._head = self._head + int(live[-1]) + 1 if len(live) == count else end
            count -= len(live)
            taken.append(slots.take(live))
            self._where[taken[-1]] = _ABSENT
        self._size -= sum(map(len, taken))
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def peek_oldest(self, count: int) -> SlotArray:
        found: list[SlotArray] = []
        start = self._head
        while count > 0 and start < self._tail:
            end = min(self._tail, start + max(count, _LOOK))
            positions = np.arange(start, end)
            slots = self._read(start, end)
            live = np.flatnonzero(self._where.take(slots) == positions)[:count]
            found.append(slots.take(live))
            count -= len(live)
            start = end
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def put_back(self, slots: SlotArray) -> None:
        if self._tail + len(slots) - self._head > len(self._queue):
            self._compact()
        self._head -= len(slots)
        positions = np.arange(self._head, self._head + len(slots))
        self._write(self._head, slots)
        self._where[slots] = positions
        self._size += len(slots)

    def clear(self) -> None:
        self._where.fill(_ABSENT)
        self._head = self._tail = _START
        self._size = 0

    def _compact(self) -> None:
        # The queue is four times the slots, so at least three quarters of it are stale by now:
        # the walk is paid for by the touches that filled it.
        positions = np.arange(self._head, self._tail)
        slots = self._read(self._head, self._tail)
        slots = slots[self._where.take(slots) == positions]
        self._head, self._tail = _START, _START + len(slots)
        self._write(self._head, slots)
        self._where[slots] = np.arange(self._head, self._tail)

    def _read(self, start: int, end: int) -> SlotArray:
        """What is queued at these positions; around the end of the array where it has to be."""
        first = start & self._mask
        stop = first + end - start
        if stop <= len(self._queue):
            return self._queue[first:stop]
        return np.concatenate((self._queue[first:], self._queue[: stop & self._mask]))

    def _write(self, start: int, slots: SlotArray) -> None:
        first = start & self._mask
        fits = len(self._queue) - first
        self._queue[first : first + len(slots)] = slots[:fits]
        self._queue[: len(slots) - fits if len(slots) > fits else 0] = slots[fits:]
