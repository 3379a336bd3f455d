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


def _listed() -> npt.NDArray[np.int64]:
    parts = [np.arange(_ALL_UP_TO)]
    for doubling in range(_DOUBLINGS):
        start = _ALL_UP_TO << doubling
        parts.append(np.arange(start, 2 * start, 2 << doubling))
    return np.concatenate(parts)


LISTED = _listed()
"""The positions in a request whose blocks are listed."""


class Known(NamedTuple):
    """What was known of a request's blocks when it came.

    ``depth`` of its listed blocks are known, the deepest of which was last asked for by ``record``
    (-1 where none is). Behind a block that ``is_shared`` several conversations went their own ways.
    """

    depth: int
    record: int
    is_shared: bool


_NOTHING = Known(0, -1, False)


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

    @staticmethod
    def listed(keys: Keys) -> Words:
        """The first words of those of a request's keys that are listed."""
        count = len(keys.array)
        if count <= _ALL_UP_TO:
            return keys.array[:, 0].copy()
        return keys.array[:, 0].take(LISTED[: LISTED.searchsorted(count)])

    def look(self, words: Words) -> Known:
        """What is known of a request, by its listed words."""
        places = self._places(words)
        known = (self._word.take(places) == words).nonzero()[0]
        if not len(known):
            return _NOTHING
        deepest = known.item(-1)
        place = places.item(deepest)
        return Known(deepest + 1, self._record.item(place), self._shared.item(place))

    def note(self, words: Words, record: int) -> None:
        """A request with these listed words is what ``record`` says."""
        if not len(words):
            return
        places = self._places(words)
        before, after = places[:-1], words[1:]
        known = self._word.take(before) == words[:-1]
        followed = self._next.take(before)
        self._shared[before] = known & (
            self._shared.take(before) | ((followed != after) & (followed != 0))
        )
        self._next[before] = after
        last = places.item(-1)
        if self._word.item(last) != words.item(-1):
            self._shared[last] = False
            self._next[last] = 0
        self._word[places] = words
        self._record[places] = record

    def records_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """For each key, whatever its position, the record of its last request; -1 if not listed."""
        words = keys.array[:, 0].copy()
        places = self._places(words)
        return np.where(self._word.take(places) == words, self._record.take(places), -1)

    def _places(self, words: Words) -> npt.NDArray[np.int64]:
        return ((words * _MIX) >> self._shift).astype(np.int64)
