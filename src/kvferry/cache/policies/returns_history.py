"""The history of requests: what each continues, and the value that gives its blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.returns_model import (
    ENDS,
    NO_ROW,
    NUM_BUCKETS,
    HintKind,
    TurnKind,
    ValueTable,
    conversation,
    shared,
    with_answer,
    with_hint,
)
from kvferry.core.keys import KEY_WORDS, Keys

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
    """Recently requested blocks, cached or not; tells returning conversations from new ones.

    A bounded table: a block that falls on another's place takes it. Of a long request not every
    block is listed: all of the first 64, then 32 of each doubling. A key covers all blocks before
    it, so the deepest listed one that is known tells how much of a request is. Owns for each listed
    block the record of its last request, and which block followed.
    """

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

    def lookup(self, keys: Keys, *, every: bool = False) -> Listed:
        """What the table has of a request's listed keys, or of ``every`` key."""
        array = keys.array
        if every:
            words = array[:, 0].view(np.int64)
        else:
            positions = _FIRST_WORDS[: bisect_left(_POSITIONS, len(array))]
            words = array.take(positions).view(np.int64)
        if self._num_noted > 1 << (self._bits - 2) and self._bits < self._most_bits:
            self._grow()
        places = ((words.view(np.uint64) * _MIX) >> self._shift).view(np.int64)
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
        words, _, _, rows = self.lookup(keys, every=True)
        return np.where(rows[:, _WORD] == words, rows[:, _RECORD], -1)

    def depths_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """How many listed blocks come before each of these, of those that are listed."""
        return self._table[self._places(keys.array[:, 0].view(np.int64)), _DEPTH]

    def _places(self, words: Words) -> npt.NDArray[np.int64]:
        """Where in the table these words belong."""
        return ((words.view(np.uint64) * _MIX) >> self._shift).view(np.int64)


OPEN = -1
_LOST = -2  # it cannot be seen any more whether it returns
_AT_ONCE = 256  # of each bucket: after a long silence the rest is learned with the next requests
_ENDS: list[float] = ENDS.tolist()
_RECORDS_FIRST = 256  # records that there is room for at first
_BUCKETS = np.arange(NUM_BUCKETS)

Ints = npt.NDArray[np.int64]
Learn = Callable[[Ints, Ints, npt.NDArray[np.bool_]], None]
"""Takes rows of features, the bucket that each came to, and whether it returned in that."""


class Facts(NamedTuple):
    """The facts of one request.

    ``length`` listed blocks, a prompt of so many ``tokens``, in this ``turn`` of its conversation;
    ``row`` is that of its features. Its first ``shared`` blocks are also others', which went
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


_AT_RETURNED, _AT_ROW, _AT_SHARED = (
    Facts._fields.index(name) for name in ("returned", "row", "shared")
)
_FACTS = Struct(f"={len(Facts._fields)}q")
_SOME = Struct("=3q")


class Records:
    """A bounded memory of records, by numbers that only grow. Owns the facts of each."""

    def __init__(self, capacity: int) -> None:
        """At least the last ``capacity`` are remembered."""
        self._capacity = capacity
        self.first = 0  # number of the record at place 0
        self._count = 0
        self._passed = np.zeros(NUM_BUCKETS, dtype=np.int64)
        self.time = np.empty(0)
        self.all_facts = np.empty((0, len(Facts._fields)), dtype=np.int64)
        self.bytes = self.all_facts.data  # a few numbers of one record are read and written so
        self._resize(min(_RECORDS_FIRST, 2 * capacity))

    def add(self, now: float, row: int, *, length: int = 0, turn: int = 0, tokens: int = 0) -> int:
        """A record of a request with features in this row; returns its number."""
        at = self._begin(now)
        _FACTS.pack_into(self.bytes, at * _FACTS.size, OPEN, row, length, turn, tokens, 0, 0, 0)
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

    def facts(self, at: int) -> Facts:
        return Facts._make(_FACTS.unpack_from(self.bytes, at * _FACTS.size))

    def amend(self, at: int, row: int, length: int) -> None:
        """More is known of it now."""
        returned = self.all_facts.item(at, _AT_RETURNED)
        _SOME.pack_into(self.bytes, at * _FACTS.size, returned, row, length)

    def share(self, at: int, shared: int, row: int, ways: int) -> None:
        """Its first blocks are others', too."""
        _SOME.pack_into(self.bytes, at * _FACTS.size + 8 * _AT_SHARED, shared, row, ways)

    def renew(self, record: int, now: float, row: int, length: int) -> int:
        """Instead of a record, one that begins now; returns its number."""
        before = record - self.first
        returned, _, _, *others = _FACTS.unpack_from(self.bytes, before * _FACTS.size)
        if returned == OPEN:  # whether it returns will not be seen; what was seen so far counts
            self.all_facts[before, _AT_RETURNED] = _LOST
        at = self._begin(now)
        _FACTS.pack_into(self.bytes, at * _FACTS.size, OPEN, row, length, *others)
        return self.first + at

    def returns(self, record: int, now: float) -> None:
        """A request continues it now; the first time counts."""
        at = record - self.first
        if at >= 0 and self.all_facts.item(at, _AT_RETURNED) == OPEN:
            age = now - self.time.item(at)
            self.all_facts[at, _AT_RETURNED] = min(NUM_BUCKETS - 1, bisect_right(_ENDS, age))

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
        facts = self.all_facts.take(at, axis=0)
        returned = facts[:, _AT_RETURNED]
        counts_for = ((returned == OPEN) | (returned >= buckets)).nonzero()[0]
        if not len(counts_for):
            return False
        buckets = buckets.take(counts_for)
        returned = returned.take(counts_for)
        learn(facts[:, _AT_ROW].take(counts_for), buckets, returned == buckets)
        return True

    def _forget(self) -> None:
        """Let go of the older half."""
        start = self._count - self._capacity
        for array in (self.time, self.all_facts):
            array[: self._capacity] = array[start : self._count].copy()
        self.first += start
        self._count = self._capacity
        self._passed = np.maximum(self._passed - start, 0)

    def _resize(self, size: int) -> None:
        """Room for so many, no more than are ever needed."""
        size = min(size, 2 * self._capacity)
        count = self._count
        time, facts = np.zeros(size), np.zeros((size, len(Facts._fields)), dtype=np.int64)
        time[:count], facts[:count] = self.time[:count], self.all_facts[:count]
        self.time, self.all_facts, self.bytes = time, facts, facts.data


NO_RECORD = -1
_LEARN_EVERY = 16  # requests, at first
_LEARN_LATER = 64  # and once most is learned
_FIRST = 1024
_MOSTLY = 2  # a request continues one if it has at least one in so many of its blocks
_RECORDS = 1 << 15
_FIRST_BLOCKS, _LEAST_BLOCKS, _MOST_BLOCKS = 1 << 9, 1 << 14, 1 << 20


class RequestHistory:
    """Requests and their answers, in records. Owns the recent blocks, the records and the model.

    Knows no slots. ``now`` never goes back.
    """

    def __init__(self, num_slots: int) -> None:
        self._recent = RecentBlocks(
            min(max(4 * num_slots, _FIRST_BLOCKS), _MOST_BLOCKS),
            min(max(4 * num_slots, _LEAST_BLOCKS), _MOST_BLOCKS),
        )
        self.num_asked = 0
        self._latest: tuple[int, int] = (NO_RECORD, 0)  # a record, and its last block's word
        self.before = NO_RECORD
        """The record that the latest request goes on with."""
        self.records = Records(_RECORDS)
        self.table = ValueTable()
        self.unknown = self.table.row(conversation(turn=1, gap=None, grown=0, kind=TurnKind.NEW))
        """The row for what nothing is known of."""

    def asked(self, keys: Keys, num_tokens: int, now: float) -> int:
        """A request came; returns its record."""
        self.num_asked += 1
        every = _LEARN_EVERY if self.num_asked < _FIRST else _LEARN_LATER
        if self.num_asked % every == 0:
            self.records.teach(self.table.learn, now)
        record = self._recorded(self._recent.lookup(keys), num_tokens, now)
        self._latest = (record, keys.array.item(-1, 0))
        return record

    def _recorded(self, listed: Listed, num_tokens: int, now: float) -> int:
        """A new record of a request: what it goes on with, if anything, and what it shares."""
        known = self._recent.look(listed)
        at = known.record - self.records.first if known.depth > known.shared else -1
        turn, kind, row = 1, TurnKind.NEW, self.unknown
        self.table.of_use.add(row)
        self.before = NO_RECORD
        if at >= 0:
            facts = self.records.facts(at)
            if known.depth * _MOSTLY >= facts.length:
                self.records.returns(known.record, now)
                self.before = known.record
                turn, gap = facts.turn + 1, now - self.records.time.item(at)
                grown = num_tokens - facts.tokens
                kind = TurnKind.CONTINUES if known.depth >= facts.length else TurnKind.BRANCHES
                row = self.table.row(conversation(turn=turn, gap=gap, grown=grown, kind=kind))
        if kind is not TurnKind.CONTINUES and known.depth != known.shared:
            known = self._recent.shared_up_to(listed, known)
        record = self.records.add(now, row, length=len(listed.words), turn=turn, tokens=num_tokens)
        self._recent.note(listed, record, 0 if kind is TurnKind.CONTINUES else known.depth)
        if known.ways:  # the first to go another way tells little: an edited question does so
            self._share(listed, record, known, now)
        return record

    def _share(self, listed: Listed, record: int, known: Known, now: float) -> None:
        """Record that the part of a request which others have, too, was asked for again."""
        by = known.sharer - self.records.first
        gap = 0.0
        if by >= 0:
            gap = now - self.records.time.item(by)
            self.records.returns(known.sharer, now)
        ways = known.ways + 1
        row = self.table.row(shared(ways=ways, gap=gap))
        self._recent.share(listed, known.shared, self.records.add(now, row))
        at = record - self.records.first
        if at >= 0:
            self.records.share(at, LISTED.item(known.shared - 1) + 1, row, ways)

    def answered(self, keys: Keys, num_tokens: int, now: float) -> tuple[int, int]:
        """A request was answered; returns its record as it was, and as it is from now on."""
        record, last = self._latest
        listed = None
        if last != keys.array.item(-1, 0):
            listed = self._recent.lookup(keys)
            record = self._recent.deepest(listed)
        at = record - self.records.first
        if at < 0:
            return NO_RECORD, NO_RECORD
        before, facts = record, self.records.facts(at)
        row = self.table.row(with_answer(self.table.features(facts.row), num_tokens))
        length = len(listed.words) if listed is not None else facts.length
        if self.records.time.item(at) == now:
            self.records.amend(at, row, length)
        else:  # its age counts from now on
            record = self.records.renew(record, now, row, length)
            self._latest = (record, keys.array.item(-1, 0))
            if listed is None:
                listed = self._recent.lookup(keys)
        if listed is not None:
            self._recent.note(listed, record)
        return before, record

    def hinted(self, record: int, hinted: HintKind, until: float | None = None) -> None:
        """A hint was given for a request's conversation: it may continue ``until`` then."""
        at = record - self.records.first
        if at >= 0:
            facts = self.records.facts(at)
            within = until - self.records.time.item(at) if until is not None else None
            row = self.table.row(with_hint(self.table.features(facts.row), hinted, within))
            self.records.amend(at, row, facts.length)

    # -- what it makes of blocks ----------------------------------------------------------------

    def record_of(self, keys: Keys) -> int:
        """The last request that had the last of these blocks, as far as is known."""
        record, last = self._latest
        if last == keys.array.item(-1, 0):
            return record
        listed = self._recent.lookup(keys, every=True)
        at = listed.is_known.rfind(1)
        return listed.rows.item(at, _RECORD) if at >= 0 else NO_RECORD

    def records_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """For each block its last request, as far as is known; else that of the one before it."""
        records = self._recent.records_of(keys)
        known = np.where(records >= 0, np.arange(len(keys)), 0)
        return records.take(np.maximum.accumulate(known))

    def is_deeper(self, key: Keys, than: Keys) -> bool:
        """Whether one block of a conversation comes behind another."""
        return bool(self._recent.depths_of(key)[0] > self._recent.depths_of(than)[0])

    def row(self, record: int) -> int:
        """The row of the value table for a request's own blocks."""
        at = record - self.records.first
        if at < 0:
            return self.unknown
        row = self.records.all_facts.item(at, _AT_ROW)
        self.table.of_use.add(row)
        return row

    def row_and_time(self, record: int, now: float) -> tuple[int, float]:
        """The same row, and the time of the request or its answer; now, where it is not known."""
        at = record - self.records.first
        if at < 0:
            return self.unknown, now
        row = self.records.all_facts.item(at, _AT_ROW)
        self.table.of_use.add(row)
        return row, self.records.time.item(at)

    def shared(self, record: int) -> tuple[int, int, int]:
        """How many leading blocks of it others have too, their row, and the ways from there."""
        at = record - self.records.first
        if at < 0:
            return (0, NO_ROW, 0)
        return _SOME.unpack_from(self.records.bytes, at * _FACTS.size + 8 * _AT_SHARED)

    def common_row(self, ways: int, gap: float) -> int:
        """The row of what several share, passed so long ago before."""
        return self.table.row(shared(ways=ways, gap=gap))

    def values(
        self,
        rows: npt.NDArray[np.int64],
        commons: npt.NDArray[np.int64],
        ages: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """The values of blocks at these ages: by their conversation, and by others that share."""
        self.table.follow(rows)
        self.table.work_out(commons)
        buckets = ENDS.searchsorted(ages, "right")
        np.minimum(buckets, NUM_BUCKETS - 1, out=buckets)
        table = self.table.value.reshape(-1)
        values = table.take(rows * NUM_BUCKETS + buckets)
        values += table.take(commons * NUM_BUCKETS + buckets)
        return values

    def bids(self, record: int) -> tuple[float, float, int]:
        """The value of a newcomer's own blocks, of those that it shares, and how many those are."""
        row, (num_shared, common, _) = self.row(record), self.shared(record)
        own = self.table.first(row)
        return own, own + self.table.first(common) if common != NO_ROW else own, num_shared
