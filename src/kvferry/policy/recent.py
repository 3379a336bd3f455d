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

Words = npt.NDArray[np.int64]
"""The first words of keys."""


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

# A row of the table. All of a block lies together: to fetch it is one trip to memory.
_WORD, _RECORD, _NEXT, _SHARED, _SHARER, _DEPTH, _WAYS = range(7)
_EMPTY = np.array([0, -1, 0, 0, -1, 0, 0])
_FRESH = np.tile(_EMPTY, (len(LISTED), 1))
_FRESH[:, _DEPTH] = np.arange(len(LISTED))


class Listed(NamedTuple):
    """A request's listed blocks, and what the table has where they belong, until it is noted."""

    words: Words
    places: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    is_known: npt.NDArray[np.bool_]


class RecentBlocks:
    """Owns the table: for each listed block the record of its last request, and what followed."""

    def __init__(self, first_size: int, size: int) -> None:
        """Remembers about ``size`` blocks, once so many were noted; makes room for fewer first."""
        self._most_bits = max(4, (size - 1).bit_length())
        self._make(min(self._most_bits, max(4, (first_size - 1).bit_length())))
        self._num_noted = 0

    def _make(self, bits: int) -> None:
        self._bits = bits
        self._shift = np.uint64(64 - bits)
        self._table = np.empty((1 << bits, len(_EMPTY)), dtype=np.int64)
        self._table[:] = _EMPTY

    @staticmethod
    def listed(keys: Keys) -> Words:
        """The first words of those of a request's keys that are listed."""
        count = len(keys.array)
        words = keys.array[:, 0]
        if count > _ALL_UP_TO:
            return words.take(LISTED[: LISTED.searchsorted(count)]).view(np.int64)
        return words.copy().view(np.int64)

    def find(self, words: Words) -> Listed:
        """What the table has of these listed words of a request, until the next is looked for."""
        if self._num_noted > 1 << (self._bits - 2) and self._bits < self._most_bits:
            self._grow()
        places = self._places(words)
        rows = self._table.take(places, axis=0)
        return Listed(words, places, rows, rows[:, _WORD] == words)

    @staticmethod
    def look(listed: Listed) -> Known:
        """What is known of a request."""
        known = listed.is_known.nonzero()[0]
        if not len(known):
            return _NOTHING
        deepest = known.item(-1)
        rows = listed.rows
        shared = (rows[: deepest + 1, _SHARED] & listed.is_known[: deepest + 1]).nonzero()[0]
        if not len(shared):
            return Known(deepest + 1, rows.item(deepest, _RECORD))
        return _known(rows, deepest, shared.item(-1))

    @staticmethod
    def shared_up_to(listed: Listed, known: Known) -> Known:
        """The same, where a request goes another way behind all that is known of it."""
        if known.depth == known.shared:
            return known
        return _known(listed.rows, known.depth - 1, known.depth - 1)

    def note(self, listed: Listed, record: int, parts_at: int = 0) -> None:
        """A request with these listed words is what ``record`` says.

        It goes a way of its own behind the first ``parts_at`` of them, if any.
        """
        words, places, rows, is_known = listed
        first = int(is_known.argmin())
        if not is_known.item(first):  # mostly all behind the first that is new are, too
            new = first + (~is_known[first:]).nonzero()[0]
            if len(new) == len(words) - first:
                rows[first:] = _FRESH[first : len(words)]
                rows[first:, _WORD] = words[first:]
            else:
                rows[new] = _FRESH.take(new, axis=0)
                rows[new, _WORD] = words.take(new)
            self._num_noted += len(new)
        rows[:, _RECORD] = record
        followed, after = rows[:-1, _NEXT], words[1:]
        rows[:-1, _SHARED] |= (followed != after) & (followed != 0)
        rows[:-1, _NEXT] = after
        if parts_at:
            rows[parts_at - 1, _WAYS] += 1
        self._table[places] = rows

    def _grow(self) -> None:
        """Twice as large; paid for by the blocks that were noted since the last time."""
        rows = self._table[self._table[:, _WORD] != 0]
        self._make(self._bits + 1)
        self._table[self._places(rows[:, _WORD].copy())] = rows

    def share(self, listed: Listed, shared: int, record: int) -> None:
        """What is common up to this listed block was asked for, as a record of its own says."""
        self._table[listed.places.item(shared - 1), _SHARER] = record

    def renew(self, words: Words, record: int) -> None:
        """The last request with these listed words, or the first of them, is another record now."""
        listed = self.find(words)
        if listed.is_known.all():
            self._table[listed.places, _RECORD] = record
        else:
            self.note(listed, record)

    def records_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """For each key, whatever its position, the record of its last request; -1 if not listed."""
        found = self.find(keys.array[:, 0].copy().view(np.int64))
        return np.where(found.is_known, found.rows[:, _RECORD], -1)

    def depths_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """How many listed blocks come before each of these, of those that are listed."""
        return self._table[self._places(keys.array[:, 0].copy().view(np.int64)), _DEPTH]

    def _places(self, words: Words) -> npt.NDArray[np.int64]:
        """Where in the table these words belong."""
        return ((words.view(np.uint64) * _MIX) >> self._shift).view(np.int64)


def _known(rows: npt.NDArray[np.int64], deepest: int, shared: int) -> Known:
    """Known up to one row, and shared up to another."""
    return Known(
        deepest + 1,
        rows.item(deepest, _RECORD),
        shared + 1,
        rows.item(shared, _SHARER),
        rows.item(shared, _WAYS),
    )
