"""The last requests of conversations, and whether each was gone on with: what is learned from.

Every record passes each bucket of age once, in the order in which they were made. So a pointer for
each bucket is enough to find, now and then, all that have passed it since: whoever returned in it
counts for it, whoever returned before does not count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.policy.hazards import ENDS, NUM_BUCKETS, Hazards
from kvferry.policy.traits import NUM_TRAITS, Traits

OPEN = -1
_LOST = -2  # it cannot be seen any more whether it returns
_AT_ONCE = 256  # of each bucket: after a long silence the rest is learned with the next requests


class Records:
    """A bounded memory of records, by numbers that only grow. Owns what is said of each."""

    def __init__(self, capacity: int) -> None:
        """At least the last ``capacity`` are remembered."""
        self._capacity = capacity
        self.first = 0  # number of the record at place 0
        self._count = 0
        size = 2 * capacity
        self.time = np.zeros(size)
        self._traits = np.zeros((size, NUM_TRAITS), dtype=np.int64)
        self._returned = np.zeros(size, dtype=np.int8)
        self._length = np.zeros(size, dtype=np.int64)
        self._turn = np.zeros(size, dtype=np.int64)
        self._tokens = np.zeros(size, dtype=np.int64)
        self.row = np.zeros(size, dtype=np.int64)
        self.shared = np.zeros(size, dtype=np.int64)
        self.shared_row = np.zeros(size, dtype=np.int64)
        self.shared_ways = np.zeros(size, dtype=np.int64)
        self._passed = np.zeros(NUM_BUCKETS, dtype=np.int64)

    def add(
        self, now: float, traits: Traits, *, length: int = 0, turn: int = 0, tokens: int = 0
    ) -> int:
        """A record of a request with so many listed blocks; returns its number."""
        if self._count == len(self.time):
            self._forget()
        at = self._count
        self._count = at + 1
        self.time[at] = now
        self._traits[at] = traits
        self._returned[at] = OPEN
        self._length[at] = length
        self._turn[at] = turn
        self._tokens[at] = tokens
        self.shared[at] = self.shared_row[at] = 0
        return self.first + at

    def place(self, record: int) -> int | None:
        """Where a record's facts are in the arrays, until the next is added; None if forgotten."""
        at = record - self.first
        return at if at >= 0 else None

    def facts(self, at: int) -> tuple[float, int, int, int]:
        """When it was made, how many blocks it lists, its turn, its prompt's tokens."""
        return (
            self.time.item(at),
            self._length.item(at),
            self._turn.item(at),
            self._tokens.item(at),
        )

    def traits(self, at: int) -> Traits:
        return tuple(self._traits[at].tolist())

    def amend(self, at: int, traits: Traits, length: int) -> None:
        """More is known of it now."""
        self._traits[at] = traits
        self._length[at] = length

    def renew(self, record: int, now: float, traits: Traits, length: int) -> int:
        """Instead of a record, one that begins now; returns its number."""
        self.lose(record)
        at = record - self.first
        turn, tokens = self._turn.item(at), self._tokens.item(at)
        part = self.shared.item(at), self.shared_row.item(at), self.shared_ways.item(at)
        number = self.add(now, traits, length=length, turn=turn, tokens=tokens)
        at = number - self.first
        self.shared[at], self.shared_row[at], self.shared_ways[at] = part
        return number

    def returns(self, record: int, now: float) -> None:
        """Somebody went on with it now; the first time counts."""
        at = record - self.first
        if at >= 0 and self._returned.item(at) == OPEN:
            age = now - self.time.item(at)
            self._returned[at] = min(NUM_BUCKETS - 1, int(ENDS.searchsorted(age, "right")))

    def lose(self, record: int) -> None:
        """Whether it returns will not be seen; what was seen so far counts."""
        at = record - self.first
        if at >= 0 and self._returned.item(at) == OPEN:
            self._returned[at] = _LOST

    def teach(self, hazards: Hazards, now: float) -> bool:
        """Let the model learn of every bucket that a record has passed since; False if none has."""
        ends = self.time[: self._count].searchsorted(now - ENDS, "right")
        counts = np.clip(ends - self._passed, 0, _AT_ONCE)
        total = int(counts.sum())
        if not total:
            return False
        buckets = np.repeat(np.arange(NUM_BUCKETS), counts)
        starts = np.cumsum(counts) - counts
        at = np.arange(total) - np.repeat(starts - self._passed, counts)
        self._passed += counts
        returned = self._returned.take(at)
        counts_for = (returned == OPEN) | (returned >= buckets)
        at, buckets, returned = at[counts_for], buckets[counts_for], returned[counts_for]
        if not len(at):
            return False
        hazards.learn(self._traits.take(at, axis=0), buckets, returned == buckets)
        return True

    def _forget(self) -> None:
        """Let go of the older half."""
        kept = slice(self._count - self._capacity, self._count)
        arrays: tuple[npt.NDArray[np.generic], ...] = (
            self.time,
            self._traits,
            self._returned,
            self._length,
            self._turn,
            self._tokens,
            self.row,
            self.shared,
            self.shared_row,
            self.shared_ways,
        )
        for array in arrays:
            array[: self._capacity] = array[kept].copy()
        self.first += kept.start
        self._count = self._capacity
        self._passed = np.maximum(self._passed - kept.start, 0)
