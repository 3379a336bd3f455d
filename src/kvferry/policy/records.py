"""The last requests of conversations, and whether each was gone on with: what is learned from.

Every record passes each bucket of age once, in the order in which they were made. So a pointer for
each bucket is enough to find, now and then, all that have passed it since: whoever returned in it
counts for it, whoever returned before does not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.policy.hazards import ENDS, NUM_BUCKETS

OPEN = -1
_LOST = -2  # it cannot be seen any more whether it returns
_AT_ONCE = 256  # of each bucket: after a long silence the rest is learned with the next requests
_ENDS: list[float] = ENDS.tolist()
_FIRST = 256  # records that there is room for at first
_BUCKETS = np.arange(NUM_BUCKETS)

Ints = npt.NDArray[np.int64]
Learn = Callable[[Ints, Ints, npt.NDArray[np.bool_]], None]
"""Takes rows of traits, the bucket that each came to, and whether it returned in that."""


class Facts(NamedTuple):
    """What is said of a request.

    ``length`` listed blocks, a prompt of so many ``tokens``, in this ``turn`` of its conversation;
    ``row`` is that of its traits. Its first ``shared`` blocks are also others', which went
    ``ways`` from there; these have a ``shared_row`` of their own.
    """

    returned: int
    row: int
    length: int
    turn: int
    tokens: int
    shared: int
    shared_row: int
    ways: int


_RETURNED, _ROW, _SHARED = (Facts._fields.index(name) for name in ("returned", "row", "shared"))
_FACTS = Struct(f"={len(Facts._fields)}q")
_SOME = Struct("=3q")


class Records:
    """A bounded memory of records, by numbers that only grow. Owns what is said of each."""

    def __init__(self, capacity: int) -> None:
        """At least the last ``capacity`` are remembered."""
        self._capacity = capacity
        self.first = 0  # number of the record at place 0
        self._count = 0
        self._passed = np.zeros(NUM_BUCKETS, dtype=np.int64)
        self.time = np.empty(0)
        self._facts = np.empty((0, len(Facts._fields)), dtype=np.int64)
        self._bytes = self._facts.data  # a few numbers of one record are read and written so
        self._resize(min(_FIRST, 2 * capacity))

    def add(self, now: float, row: int, *, length: int = 0, turn: int = 0, tokens: int = 0) -> int:
        """A record of a request with traits in this row; returns its number."""
        at = self._begin(now)
        _FACTS.pack_into(self._bytes, at * _FACTS.size, OPEN, row, length, turn, tokens, 0, 0, 0)
        return self.first + at

    def _begin(self, now: float) -> int:
        """The place of another record."""
        if self._count == len(self.time):
            if self._count < 2 * self._capacity:
                self._resize(2 * self._count)
            else:
                self._forget()
        at = self._count
        self._count = at + 1
        self.time[at] = now
        return at

    def place(self, record: int) -> int | None:
        """Where a record's facts are, until the next is added; None if forgotten."""
        at = record - self.first
        return at if at >= 0 else None

    def facts(self, at: int) -> Facts:
        return Facts._make(_FACTS.unpack_from(self._bytes, at * _FACTS.size))

    def row(self, at: int) -> int:
        return self._facts.item(at, _ROW)

    def shared(self, at: int) -> tuple[int, int, int]:
        """How many leading blocks of it others have too, their row, and the ways from there."""
        return _SOME.unpack_from(self._bytes, at * _FACTS.size + 8 * _SHARED)

    def amend(self, at: int, row: int, length: int) -> None:
        """More is known of it now."""
        returned = self._facts.item(at, _RETURNED)
        _SOME.pack_into(self._bytes, at * _FACTS.size, returned, row, length)

    def share(self, at: int, shared: int, row: int, ways: int) -> None:
        """Its first blocks are others', too."""
        _SOME.pack_into(self._bytes, at * _FACTS.size + 8 * _SHARED, shared, row, ways)

    def renew(self, record: int, now: float, row: int, length: int) -> int:
        """Instead of a record, one that begins now; returns its number."""
        self.lose(record)
        _, _, _, *others = self.facts(record - self.first)
        at = self._begin(now)
        _FACTS.pack_into(self._bytes, at * _FACTS.size, OPEN, row, length, *others)
        return self.first + at

    def returns(self, record: int, now: float) -> None:
        """Somebody went on with it now; the first time counts."""
        at = record - self.first
        if at >= 0 and self._facts.item(at, _RETURNED) == OPEN:
            age = now - self.time.item(at)
            self._facts[at, _RETURNED] = min(NUM_BUCKETS - 1, bisect_right(_ENDS, age))

    def lose(self, record: int) -> None:
        """Whether it returns will not be seen; what was seen so far counts."""
        at = record - self.first
        if at >= 0 and self._facts.item(at, _RETURNED) == OPEN:
            self._facts[at, _RETURNED] = _LOST

    def teach(self, learn: Learn, now: float) -> bool:
        """Let the model learn of every bucket that a record has passed since; False if none has."""
        ends = self.time[: self._count].searchsorted(now - ENDS, "right")
        counts = np.minimum(np.maximum(ends - self._passed, 0), _AT_ONCE)
        stops = counts.cumsum()
        total = stops.item(-1)
        if not total:
            return False
        buckets = _BUCKETS.repeat(counts)
        at = np.arange(total) - (stops - counts - self._passed).repeat(counts)
        self._passed += counts
        facts = self._facts.take(at, axis=0)
        returned = facts[:, _RETURNED]
        counts_for = ((returned == OPEN) | (returned >= buckets)).nonzero()[0]
        if not len(counts_for):
            return False
        buckets = buckets.take(counts_for)
        returned = returned.take(counts_for)
        learn(facts[:, _ROW].take(counts_for), buckets, returned == buckets)
        return True

    def _forget(self) -> None:
        """Let go of the older half."""
        start = self._count - self._capacity
        for array in (self.time, self._facts):
            array[: self._capacity] = array[start : self._count].copy()
        self.first += start
        self._count = self._capacity
        self._passed = np.maximum(self._passed - start, 0)

    def _resize(self, size: int) -> None:
        """Room for so many, no more than are ever needed."""
        size = min(size, 2 * self._capacity)
        count = self._count
        time, facts = np.zeros(size), np.zeros((size, len(Facts._fields)), dtype=np.int64)
        time[:count], facts[:count] = self.time[:count], self._facts[:count]
        self.time, self._facts, self._bytes = time, facts, facts.data
