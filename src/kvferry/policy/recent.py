"""Which blocks were asked for lately, here or not: who returns is told from who is new.

A table with a bound: a block that falls on another's place takes it. Of a long request not every
block is listed: all of the first 64, then 32 of each doubling. A key covers all blocks before it,
so the deepest listed one that is known tells how much of a request is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys

_ALL_UP_TO = 64
_DOUBLINGS = 24
_MIX = np.uint64(0x9E3779B97F4A7C15)

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


def _listed() -> npt.NDArray[np.int64]:
    parts = [np.arange(_ALL_UP_TO)]
    for doubling in range(_DOUBLINGS):
        start = _ALL_UP_TO << doubling
        parts.append(np.arange(start, 2 * start, 2 << doubling))
    return np.concatenate(parts)


LISTED = _listed()
"""The positions in a request whose blocks are listed."""


class Known(NamedTuple):
    """What was known of a request's listed blocks when it came.

    ``depth`` of them are known, the deepest of which was last asked for by ``record`` (-1 where
    none is). Behind the first ``shared`` of them conversations went different ways, as many as
    ``ways`` says beside the first; ``sharer`` is the record of this common part.
    """

    depth: int = 0
    record: int = -1
    shared: int = 0
    sharer: int = -1
    ways: int = 0


_NOTHING = Known()


class RecentBlocks:
    """Owns the table: for each listed block the record of its last request, and what followed."""

    def __init__(self, size: int) -> None:
        """``size``: about so many blocks are remembered."""
        bits = max(4, (size - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._word = np.zeros(1 << bits, dtype=np.uint64)
        self._record = np.full(1 << bits, -1, dtype=np.int64)
        self._next = np.zeros(1 << bits, dtype=np.uint64)
        self._shared = np.zeros(1 << bits, dtype=bool)
        self._sharer = np.full(1 << bits, -1, dtype=np.int64)
        self._depth = np.zeros(1 << bits, dtype=np.int32)
        self._ways = np.zeros(1 << bits, dtype=np.int32)

    @staticmethod
    def listed(keys: Keys) -> Words:
        """The first words of those of a request's keys that are listed."""
        count = len(keys.array)
        if count <= _ALL_UP_TO:
            return keys.array[:, 0].copy()
        return keys.array[:, 0].take(LISTED[: LISTED.searchsorted(count)])

    def look(self, words: Words, places: Places | None = None) -> Known:
        """What is known of a request, by its listed words; ``places`` where they are known."""
        places = self.places(words) if places is None else places
        known = (self._word.take(places) == words).nonzero()[0]
        if not len(known):
            return _NOTHING
        deepest = known.item(-1)
        record = self._record.item(places.item(deepest))
        shared = self._shared.take(places[: deepest + 1]).nonzero()[0]
        if not len(shared):
            return Known(deepest + 1, record)
        return Known(deepest + 1, record, *self._sharing(places, shared.item(-1)))

    def shared_up_to(self, places: Places, known: Known) -> Known:
        """The same, where a request goes another way behind all that is known of it."""
        if known.depth == known.shared:
            return known
        return Known(known.depth, known.record, *self._sharing(places, known.depth - 1))

    def _sharing(self, places: Places, at: int) -> tuple[int, int, int]:
        place = places.item(at)
        return at + 1, self._sharer.item(place), self._ways.item(place)

    def note(self, words: Words, places: Places, record: int, parts_at: int = 0) -> None:
        """A request with these listed words is what ``record`` says.

        It goes a way of its own behind the first ``parts_at`` of them, if any.
        """
        new = (self._word.take(places) != words).nonzero()[0]
        if len(new):
            taken = places.take(new)
            self._word[taken] = words.take(new)
            self._shared[taken] = False
            self._ways[taken] = self._next[taken] = 0
            self._sharer[taken] = -1
            self._depth[taken] = new
        self._record[places] = record
        before, after = places[:-1], words[1:]
        followed = self._next.take(before)
        parted = (followed != after) & (followed != 0)
        if np.count_nonzero(parted):
            self._shared[before[parted]] = True
        self._next[before] = after
        if parts_at:
            self._ways[places.item(parts_at - 1)] += 1

    def share(self, places: Places, shared: int, record: int) -> None:
        """What is common up to this listed block was asked for, as a record of its own says."""
        self._sharer[places.item(shared - 1)] = record

    def renew(self, words: Words, record: int) -> None:
        """The last request with these listed words, or the first of them, is another record now."""
        places = self.places(words)
        if np.count_nonzero(self._word.take(places) != words):
            self.note(words, places, record)
        self._record[places] = record

    def records_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """For each key, whatever its position, the record of its last request; -1 if not listed."""
        words = keys.array[:, 0].copy()
        places = self.places(words)
        return np.where(self._word.take(places) == words, self._record.take(places), -1)

    def depths_of(self, keys: Keys) -> npt.NDArray[np.int32]:
        """How many listed blocks come before each of these, of those that are listed."""
        return self._depth.take(self.places(keys.array[:, 0].copy()))

    def places(self, words: Words) -> Places:
        """Where in the table these words belong."""
        return ((words * _MIX) >> self._shift).astype(np.int64)
