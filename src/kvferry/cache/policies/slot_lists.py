"""Several queues over the same slots, a slot in one of them at most; and who was here before.

What policies of more than one queue are made of.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.cache.policies.lru import Lru
from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

FRONT = 0
"""The list of what was put back: it goes before everything else."""

_NONE = -1
_NOBODY = Arriving(Keys.empty(), NO_SLOTS, NO_SLOT, chained=False)


class SlotLists:
    """Queues of slots by number, the first of them ``FRONT``. Owns their order and their lengths.

    A slot that is in none has a home all the same: the list it was in last.
    """

    def __init__(self, residents: Residents, num_lists: int) -> None:
        self._queues = [Lru(residents) for _ in range(num_lists)]
        self._list = np.full(residents.num_slots, _NONE, dtype=np.int8)
        self._home = np.full(residents.num_slots, 1, dtype=np.int8)
        self.lengths = [0] * num_lists

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._list.take(slots) != _NONE

    def homes(self, slots: SlotArray) -> npt.NDArray[np.int8]:
        """The list that each belongs to: the one it is in, or was before it was put back."""
        return self._home.take(slots)

    def push(self, slots: SlotArray, to: int) -> None:
        """To the end of a list, from wherever they are; the last of them goes first."""
        self._enter(slots, to)
        self._queues[to].use(slots)

    def push_in_order(self, slots: SlotArray, to: int) -> None:
        """The same, and the first of them goes first."""
        self._enter(slots, to)
        self._queues[to].keep(slots)

    def push_home(self, slots: SlotArray) -> None:
        """Each to the end of the list it belongs to; the first of them goes first."""
        homes = self.homes(slots)
        for to in np.unique(homes).tolist():
            self.push_in_order(slots[homes == to], to)

    def put_back(self, slots: SlotArray) -> None:
        """Before everything else, in this order; where they belong does not change."""
        homes = self.homes(slots)
        self._enter(slots, FRONT)
        self._home[slots] = homes
        self._queues[FRONT].put_back(slots)

    def pop(self, at: int, count: int) -> SlotArray:
        """Up to ``count`` from the front of a list, which are in none from now on."""
        slots = self._queues[at].take(min(count, self.lengths[at]), _NOBODY)
        self._list[slots] = _NONE
        self.lengths[at] -= len(slots)
        return slots

    def peek(self, at: int, count: int) -> SlotArray:
        return self._queues[at].peek(min(count, self.lengths[at]))

    def discard(self, slots: SlotArray) -> None:
        lists = self._list.take(slots)
        for at in np.unique(lists[lists != _NONE]).tolist():
            leaving = slots[lists == at]
            self._queues[at].discard(leaving)
            self.lengths[at] -= len(leaving)
        self._list[slots] = _NONE

    def clear(self) -> None:
        for queue in self._queues:
            queue.clear()
        self._list.fill(_NONE)
        self.lengths = [0] * len(self._queues)

    def _enter(self, slots: SlotArray, to: int) -> None:
        lists = self._list.take(slots)
        elsewhere = slots[(lists != to) & (lists != _NONE)]
        if len(elsewhere):
            self.discard(elsewhere)
        self.lengths[to] += len(slots) - int(np.count_nonzero(lists == to))
        self._list[slots] = to
        self._home[slots] = to


class GhostList:
    """Blocks that are gone, the longest gone first, by the first word of their keys.

    Owns no more than it is allowed to, by whoever calls :meth:`trim`.
    """

    def __init__(self) -> None:
        self._words: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._words)

    def __contains__(self, word: int) -> bool:
        return word in self._words

    def add(self, words: list[int]) -> None:
        """These are gone, the first of them first."""
        for word in words:
            self._words.pop(word, None)
            self._words[word] = None

    def remove(self, words: list[int]) -> None:
        """These are back, or never went."""
        for word in words:
            self._words.pop(word, None)

    def trim(self, most: int) -> None:
        """Forget the longest gone until there are so few."""
        while len(self._words) > max(0, most):
            self._words.popitem(last=False)

    def clear(self) -> None:
        self._words.clear()


class Uses:
    """Tells one use of a block from the next: what one request does within a moment is one use.

    A request looks a block up, loads it and stores what follows it: three calls, and no sign that
    anybody else wants it. Owns a time for each slot.
    """

    APART = 1.0
    """Seconds from one use to another that counts."""

    def __init__(self, residents: Residents) -> None:
        self._now = residents.now
        self._last = np.zeros(residents.num_slots, dtype=np.float64)

    def begin(self, slots: SlotArray) -> None:
        """These have come, which is their first use."""
        self._last[slots] = self._now()

    def count(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each of these, which are used, whether that is another use than the last."""
        now = self._now()
        counts = now - self._last.take(slots) >= self.APART
        self._last[slots[counts]] = now
        return counts


def words_of(residents: Residents, slots: SlotArray) -> list[int]:
    """The first words of these slots' keys."""
    words: list[int] = residents.keys_of(slots).array[:, 0].tolist()
    return words


# ------------------------------------------------------------------------------------------------
# Which blocks were asked for lately, here or not: who returns is told from who is new.
#
# A table with a bound: a block that falls on another's place takes it. Of a long request not every
# block is listed: all of the first 64, then 32 of each doubling. A key covers all blocks before it,
# so the deepest listed one that is known tells how much of a request is.

_ALL_UP_TO = 64
_DOUBLINGS = 24
_MIX = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)  # an array: of a number numpy asks its kind

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
_POSITIONS: list[int] = LISTED.tolist()
_FIRST_WORDS = LISTED * KEY_WORDS  # where the first word of each is, in an array of keys


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
_ROW = np.dtype((np.void, _EMPTY.nbytes))
_PACKED = Struct(f"={len(_EMPTY)}q")
_FEW = 12  # new blocks up to which rows are written one by one: as many as a turn brings


class Listed(NamedTuple):
    """A request's listed blocks, where they belong in the table, and which of them it has.

    ``is_known`` is a byte for each, 0 or 1: bytes are searched faster than short arrays. ``rows``
    are copies of what the table has at those places, fetched once for all that is asked of them.
    """

    words: Words
    places: npt.NDArray[np.int64]
    is_known: bytes
    rows: npt.NDArray[np.int64]


class RecentBlocks:
    """Owns the table: for each listed block the record of its last request, and what followed."""

    def __init__(self, first_size: int, size: int) -> None:
        """Remembers about ``size`` blocks, once so many were noted; makes room for fewer first."""
        self._most_bits = max(4, (size - 1).bit_length())
        self._make(min(self._most_bits, max(4, (first_size - 1).bit_length())))
        self._num_noted = 0

    def _make(self, bits: int) -> None:
        self._bits = bits
        self._shift = np.array(64 - bits, dtype=np.uint64)
        self._table = np.empty((1 << bits, len(_EMPTY)), dtype=np.int64)
        self._table[:] = _EMPTY
        self._bytes = self._table.data  # a few rows are written so
        self._rows = self._table.view(_ROW)[:, 0]  # a row at a time is copied the fastest
        self._word = self._table[:, _WORD]
        self._record = self._table[:, _RECORD]
        self._next = self._table[:, _NEXT]

    @staticmethod
    def listed(keys: Keys) -> Words:
        """The first words of those of a request's keys that are listed."""
        array = keys.array
        return array.take(_FIRST_WORDS[: bisect_left(_POSITIONS, len(array))]).view(np.int64)

    def find(self, words: Words) -> Listed:
        """What the table has of these listed words of a request, until the next is looked for."""
        if self._num_noted > 1 << (self._bits - 2) and self._bits < self._most_bits:
            self._grow()
        places = self._places(words)
        rows = self._table.take(places, axis=0)
        return Listed(words, places, (rows[:, _WORD] == words).tobytes(), rows)

    def look(self, listed: Listed) -> Known:
        """What is known of a request."""
        _, _, is_known, rows = listed
        depth = is_known.rfind(1) + 1
        if not depth:
            return _NOTHING
        shared = rows[:depth, _SHARED]
        if is_known.find(0, 0, depth) >= 0:
            shared = shared & np.frombuffer(is_known, dtype=np.uint8, count=depth)
        ways = shared.nonzero()[0]
        if not len(ways):
            return Known(depth, rows.item(depth - 1, _RECORD))
        return self._known(rows, depth, ways.item(-1) + 1)

    @staticmethod
    def deepest(listed: Listed) -> int:
        """The record of the deepest block that is known of a request; -1 where none is."""
        at = listed.is_known.rfind(1)
        return listed.rows.item(at, _RECORD) if at >= 0 else -1

    def shared_up_to(self, listed: Listed, known: Known) -> Known:
        """The same, where a request goes another way behind all that is known of it."""
        if known.depth == known.shared:
            return known
        return self._known(listed.rows, known.depth, known.depth)

    @staticmethod
    def _known(rows: npt.NDArray[np.int64], depth: int, shared: int) -> Known:
        """Known up to one listed block, and shared up to another."""
        record, at = rows.item(depth - 1, _RECORD), shared - 1
        return Known(depth, record, shared, rows.item(at, _SHARER), rows.item(at, _WAYS))

    def note(self, listed: Listed, record: int, parts_at: int = 0) -> None:
        """A request with these listed words is what ``record`` says.

        It goes a way of its own behind the first ``parts_at`` of them, if any.
        """
        words, places, is_known, rows = listed
        self._record[places] = record
        end = min(is_known.rfind(1) + 1, len(words) - 1)
        follows = (rows[:end, _NEXT] == words[1 : end + 1]).tobytes()
        at = follows.find(0)
        while at >= 0:  # mostly one: where it goes on
            if is_known[at]:
                self._follow(places.item(at), words.item(at + 1))
            at = follows.find(0, at + 1)
        num_new = is_known.count(0)
        if num_new > _FEW:
            self._begin(listed, record)
        elif num_new:
            self._begin_few(listed, record)
        self._num_noted += num_new
        if parts_at:
            self._table[listed.places[parts_at - 1], _WAYS] += 1

    def _begin_few(self, listed: Listed, record: int) -> None:
        """The same as :meth:`_begin`, block by block."""
        words, places, is_known, _ = listed
        last, at = len(words) - 1, is_known.find(0)
        while at >= 0:
            after = words.item(at + 1) if at < last else 0
            row = (words.item(at), record, after, 0, -1, at, 0)
            _PACKED.pack_into(self._bytes, places.item(at) * _PACKED.size, *row)
            at = is_known.find(0, at + 1)

    def _begin(self, listed: Listed, record: int) -> None:
        """Some blocks of a request are new: others are in their places."""
        words, places, is_known, _ = listed
        first = is_known.find(0)
        new = _FRESH[first : len(words)].copy()
        new[:, _WORD] = words[first:]
        new[:, _RECORD] = record
        new[:-1, _NEXT] = words[first + 1 :]
        rows, places = new.view(_ROW)[:, 0], places[first:]
        if is_known.find(1, first) >= 0:
            which = (np.frombuffer(is_known, dtype=np.uint8, offset=first) == 0).nonzero()[0]
            rows, places = rows[which], places.take(which)
        self._rows[places] = rows

    def _follow(self, place: int, word: int) -> None:
        """This word follows a block that is known, for the first time or again.

        Where it is not the first to do so, the block is shared. The first is remembered.
        """
        first = self._next.item(place)
        if not first:
            self._next[place] = word
        elif first != word:
            self._table[place, _SHARED] = 1

    def _grow(self) -> None:
        """Twice as large; paid for by the blocks that were noted since the last time."""
        rows = self._table[self._word != 0]
        self._make(self._bits + 1)
        self._table[self._places(rows[:, _WORD])] = rows

    def share(self, listed: Listed, shared: int, record: int) -> None:
        """What is common up to this listed block was asked for, as a record of its own says."""
        self._table[listed.places.item(shared - 1), _SHARER] = record

    def records_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """For each key, whatever its position, the record of its last request; -1 if not listed."""
        words, _, _, rows = self.find(keys.array[:, 0].view(np.int64))
        return np.where(rows[:, _WORD] == words, rows[:, _RECORD], -1)

    def depths_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """How many listed blocks come before each of these, of those that are listed."""
        return self._table[self._places(keys.array[:, 0].view(np.int64)), _DEPTH]

    def _places(self, words: Words) -> npt.NDArray[np.int64]:
        """Where in the table these words belong."""
        return ((words.view(np.uint64) * _MIX) >> self._shift).view(np.int64)
