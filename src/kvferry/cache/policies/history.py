"""What was heard of requests: what each goes on with, and what that makes its blocks worth."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.hazards import (
    ENDS,
    NO_ROW,
    NUM_BUCKETS,
    Said,
    TurnKind,
    WorthTable,
    conversation,
    shared,
    with_answer,
    with_said,
)
from kvferry.cache.policies.slot_lists import LISTED, Known, Listed, RecentBlocks, Words
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

OPEN = -1
_LOST = -2  # it cannot be seen any more whether it returns
_AT_ONCE = 256  # of each bucket: after a long silence the rest is learned with the next requests
_ENDS: list[float] = ENDS.tolist()
_RECORDS_FIRST = 256  # records that there is room for at first
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
        self._resize(min(_RECORDS_FIRST, 2 * capacity))

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


# ------------------------------------------------------------------------------------------------
# What was heard of requests: what each goes on with, and what that makes its blocks worth.

NO_RECORD = -1
_LEARN_EVERY = 16  # requests, at first
_LEARN_LATER = 64  # and once most is learned
_FIRST = 1024
_MOSTLY = 2  # a request goes on with one of whose blocks it has at least one in so many
_RECORDS = 1 << 15
_FIRST_BLOCKS, _LEAST_BLOCKS, _MOST_BLOCKS = 1 << 9, 1 << 14, 1 << 20


class Heard:
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
        self.table = WorthTable()
        self.unknown = self.table.row(conversation(turn=1, gap=None, grown=0, kind=TurnKind.NEW))
        """The row for what nothing is known of."""

    def asked(self, keys: Keys, num_tokens: int, now: float) -> int:
        """A request came; returns its record."""
        self.num_asked += 1
        every = _LEARN_EVERY if self.num_asked < _FIRST else _LEARN_LATER
        if self.num_asked % every == 0:
            self.records.teach(self.table.learn, now)
        record = self._recorded(self._recent.listed(keys), num_tokens, now)
        self._latest = (record, keys.array.item(-1, 0))
        return record

    def _recorded(self, words: Words, num_tokens: int, now: float) -> int:
        """A new record of a request: what it goes on with, if anything, and what it shares."""
        listed = self._recent.find(words)
        known = self._recent.look(listed)
        at = None
        if known.depth > known.shared:
            at = self.records.place(known.record)
        turn, kind, row = 1, TurnKind.NEW, self.table.used(self.unknown)
        self.before = NO_RECORD
        if at is not None:
            facts = self.records.facts(at)
            if known.depth * _MOSTLY >= facts.length:
                self.records.returns(known.record, now)
                self.before = known.record
                turn, gap = facts.turn + 1, now - self.records.time.item(at)
                grown = num_tokens - facts.tokens
                kind = TurnKind.CONTINUES if known.depth >= facts.length else TurnKind.BRANCHES
                row = self.table.row(conversation(turn=turn, gap=gap, grown=grown, kind=kind))
        if kind is not TurnKind.CONTINUES:
            known = self._recent.shared_up_to(listed, known)
        record = self.records.add(now, row, length=len(words), turn=turn, tokens=num_tokens)
        self._recent.note(listed, record, 0 if kind is TurnKind.CONTINUES else known.depth)
        if known.ways:  # the first to go another way tells little: an edited question does so
            self._share(listed, record, known, now)
        return record

    def _share(self, listed: Listed, record: int, known: Known, now: float) -> None:
        """Record that the part of a request which others have, too, was asked for again."""
        by = self.records.place(known.sharer)
        gap = 0.0
        if by is not None:
            gap = now - self.records.time.item(by)
            self.records.returns(known.sharer, now)
        ways = known.ways + 1
        row = self.table.row(shared(ways=ways, gap=gap))
        self._recent.share(listed, known.shared, self.records.add(now, row))
        at = self.records.place(record)
        if at is not None:
            self.records.share(at, LISTED.item(known.shared - 1) + 1, row, ways)

    def answered(self, keys: Keys, num_tokens: int, now: float) -> tuple[int, int]:
        """A request was answered; returns its record as it was, and as it is from now on."""
        record, last = self._latest
        listed = None
        if last != keys.array.item(-1, 0):
            listed = self._recent.find(self._recent.listed(keys))
            record = self._recent.deepest(listed)
        at = self.records.place(record)
        if at is None:
            return NO_RECORD, NO_RECORD
        before, facts = record, self.records.facts(at)
        row = self.table.row(with_answer(self.table.traits(facts.row), num_tokens))
        length = len(listed.words) if listed is not None else facts.length
        if self.records.time.item(at) == now:
            self.records.amend(at, row, length)
        else:  # it is from now on that nobody has gone on with it
            record = self.records.renew(record, now, row, length)
            self._latest = (record, keys.array.item(-1, 0))
            if listed is None:
                listed = self._recent.find(self._recent.listed(keys))
        if listed is not None:
            self._recent.note(listed, record)
        return before, record

    def said(self, record: int, said: Said, until: float | None = None) -> None:
        """Whoever sent a request knows more of its conversation: it may go on ``until`` then."""
        at = self.records.place(record)
        if at is not None:
            facts = self.records.facts(at)
            within = until - self.records.time.item(at) if until is not None else None
            row = self.table.row(with_said(self.table.traits(facts.row), said, within))
            self.records.amend(at, row, facts.length)

    # -- what it makes of blocks ----------------------------------------------------------------

    def latest_with(self, keys: Keys) -> int | None:
        """The latest request, if the last of these blocks was its last one, too."""
        record, last = self._latest
        return record if last == keys.array.item(-1, 0) else None

    def record_of(self, keys: Keys) -> int:
        """The last request that had the last of these blocks, as far as is known."""
        latest = self.latest_with(keys)
        if latest is not None:
            return latest
        return self._recent.deepest(self._recent.find(keys.array[:, 0].view(np.int64)))

    def records_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """For each block its last request, as far as is known; else that of the one before it."""
        records = self._recent.records_of(keys)
        known = np.where(records >= 0, np.arange(len(keys)), 0)
        return records.take(np.maximum.accumulate(known))

    def is_deeper(self, key: Keys, than: Keys) -> bool:
        """Whether one block of a conversation comes behind another."""
        return bool(self._recent.depths_of(key)[0] > self._recent.depths_of(than)[0])

    def row(self, record: int) -> int:
        """Where the table says what a request's own blocks are worth."""
        at = self.records.place(record)
        return self.unknown if at is None else self.table.used(self.records.row(at))

    def time(self, record: int, now: float) -> float:
        """When a request was last heard of; now, where that is not known."""
        at = self.records.place(record)
        return now if at is None else self.records.time.item(at)

    def shared(self, record: int) -> tuple[int, int, int]:
        """How many leading blocks of it others have too, their row, and the ways from there."""
        at = self.records.place(record)
        return (0, NO_ROW, 0) if at is None else self.records.shared(at)

    def common_row(self, ways: int, gap: float) -> int:
        """The row of what several share, passed so long ago before."""
        return self.table.row(shared(ways=ways, gap=gap))

    def worths(
        self,
        rows: npt.NDArray[np.int64],
        commons: npt.NDArray[np.int64],
        ages: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """What blocks are worth at these ages: by their conversation, and by others."""
        self.table.follow(rows)
        self.table.work_out(commons)
        buckets = ENDS.searchsorted(ages, "right")
        np.minimum(buckets, NUM_BUCKETS - 1, out=buckets)
        table = self.table.worth.reshape(-1)
        worths = table.take(rows * NUM_BUCKETS + buckets)
        worths += table.take(commons * NUM_BUCKETS + buckets)
        return worths

    def bids(self, record: int) -> tuple[float, float]:
        """What a newcomer's own blocks are worth, and those that it shares."""
        row, (_, common, _) = self.row(record), self.shared(record)
        own = self.table.first(row)
        return own, own + self.table.first(common) if common != NO_ROW else own


# ------------------------------------------------------------------------------------------------
# Slots in segments: runs of a chain that one conversation has, or several share.
#
# A segment is a stack of slots in chain order, in pieces as they came: its end goes first. A
# slot is
# in one segment at a time; what it leaves behind elsewhere is stale and passed over when it is met,
# so a batch of any size is a few array operations.
#
# ::
#
#     segment 4   piece (7) 20 21 22   piece (9) 23 30     stamp 7: 20 22   9: 23 30
#                          ^ 21 moved elsewhere, its stamp is another: stale

_NOT_HELD = 0
_SPARE = 64  # stale entries that nobody minds, beside four times the slots

Piece = tuple[int, SlotArray]


class Segments:
    """Owns which slot is in which segment, and in which order. What a segment is worth, others say.

    ``ids[:count]`` are the segments there are. A segment without slots is none; ``on_empty`` is
    told of each that becomes so, and may still look at what it was.
    """

    def __init__(self, num_slots: int, on_empty: Callable[[int], None]) -> None:
        self.count = 0
        self.num_held = 0
        self.ids = np.full(num_slots, 0, dtype=np.int64)
        self.end = np.full(num_slots, NO_SLOT, dtype=np.int64)
        """The last slot of each segment."""
        self.size = np.full(num_slots, 0, dtype=np.int64)
        self._of_slot = np.full(num_slots, 0, dtype=np.int64)
        self._stamp = np.full(num_slots, _NOT_HELD, dtype=np.int64)
        self._place = np.full(num_slots, 0, dtype=np.int64)  # in ids, of each segment
        self._pieces: list[list[Piece]] = []
        self._torn: set[int] = set()  # segments in whose pieces there may be stale entries
        self._free: list[int] = []
        self._on_empty = on_empty
        self._next_stamp = _NOT_HELD + 1
        self._num_entries = 0
        self._most_entries = 4 * num_slots + _SPARE

    # -- asking ---------------------------------------------------------------------------------

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._stamp.take(slots) != _NOT_HELD

    def holds_all(self, slots: SlotArray) -> bool:
        return int(np.count_nonzero(self._stamp.take(slots))) == len(slots)

    def holds_any(self, slots: SlotArray) -> bool:
        return int(np.count_nonzero(self._stamp.take(slots))) > 0

    def has(self, slot: int) -> bool:
        return self._stamp.item(slot) != _NOT_HELD

    def of(self, slot: int) -> int:
        """The segment of a slot that is held, or was last in."""
        return self._of_slot.item(slot)

    def of_slots(self, slots: SlotArray) -> npt.NDArray[np.int64]:
        return self._of_slot.take(slots)

    def runs(self, slots: SlotArray) -> Iterator[tuple[int, int, int]]:
        """The segments that these slots of a chain pass, up to the first slot that is not held.

        For each the number of the first slot in it, and that of the first behind. What was yielded
        may change before the next is asked for. Mostly a whole segment is passed, which its size
        and its end tell.
        """
        start, count = 0, len(slots)
        while start < count:
            first = slots.item(start)
            if not self.has(first):
                return
            segment = self._of_slot.item(first)
            end = start + self.size.item(segment)
            if end > count or self.end.item(segment) != slots.item(end - 1):
                rest = slots[start:]
                others = (self._of_slot.take(rest) != segment) | ~self.holds(rest)
                end = start + int(others.argmax()) if others.any() else count
            yield segment, start, end
            start = end

    def last(self, segment: int, count: int) -> SlotArray:
        """Up to ``count`` slots of a segment, its end first; changes nothing."""
        found: list[SlotArray] = []
        for stamp, slots in reversed(self._pieces[segment]):
            valid = slots[self._stamp.take(slots) == stamp][::-1][:count]
            found.append(valid)
            count -= len(valid)
            if count <= 0:
                break
        return np.concatenate((NO_SLOTS, *found))

    # -- changing -------------------------------------------------------------------------------

    def new(self, slots: SlotArray) -> int:
        """A segment of these slots, at least one, in chain order."""
        if self._free:
            segment = self._free.pop()
        else:
            segment = len(self._pieces)
            self._pieces.append([])
        self._place[segment] = self.count
        self.ids[self.count] = segment
        self.count += 1
        self.push(segment, slots)
        return segment

    def push(self, segment: int, slots: SlotArray) -> None:
        """These slots follow the last of the segment."""
        self._enter(segment, slots)
        self._pieces[segment].append((self._next_stamp - 1, slots))
        self.end[segment] = slots[-1]

    def sink(self, segment: int, slots: SlotArray) -> None:
        """These slots come before the first of the segment."""
        self._enter(segment, slots)
        self._pieces[segment].insert(0, (self._next_stamp - 1, slots))

    def _enter(self, segment: int, slots: SlotArray) -> None:
        if self._num_entries + len(slots) > self._most_entries:
            self._compact()
        count = len(slots)
        self._stamp[slots] = self._next_stamp
        self._next_stamp += 1
        self._of_slot[slots] = segment
        self.size[segment] += count
        self.num_held += count
        self._num_entries += count

    def pop(self, segment: int, count: int) -> SlotArray:
        """Let go of up to ``count`` slots of a segment, its end first."""
        found: list[SlotArray] = []
        pieces = self._pieces[segment]
        while count > 0 and pieces:
            stamp, slots = pieces.pop()
            self._num_entries -= len(slots)
            if segment in self._torn:
                slots = slots[self._stamp.take(slots) == stamp]
            rest = len(slots) - count
            if rest > 0:
                pieces.append((stamp, slots[:rest]))
                self._num_entries += rest
                slots = slots[rest:]
            found.append(slots[::-1])
            count -= len(slots)
        popped = found[0] if len(found) == 1 else np.concatenate((NO_SLOTS, *found))
        self._stamp[popped] = _NOT_HELD
        self._lost(segment, len(popped))
        return popped

    def leave(self, slots: SlotArray) -> None:
        """These slots, all held, are held no longer."""
        if not len(slots):
            return
        segments = self._of_slot.take(slots)
        self._stamp[slots] = _NOT_HELD
        first = segments.item(0)
        if np.count_nonzero(segments == first) == len(slots):
            self._torn.add(first)
            self._lost(first, len(slots))
            return
        for segment, count in zip(*np.unique(segments, return_counts=True), strict=True):
            self._torn.add(int(segment))
            self._lost(int(segment), int(count))

    def clear(self) -> None:
        for segment in self.ids[: self.count].tolist():
            self._on_empty(segment)
        self._stamp.fill(_NOT_HELD)
        self.size.fill(0)
        self._pieces.clear()
        self._torn.clear()
        self._free.clear()
        self.count = self.num_held = self._num_entries = 0

    # -- the parts ------------------------------------------------------------------------------

    def _lost(self, segment: int, count: int) -> None:
        """So many of a segment's slots are held no longer."""
        self.num_held -= count
        left = self.size.item(segment) - count
        self.size[segment] = left
        if left:
            self._find_end(segment)
            return
        self._on_empty(segment)
        pieces = self._pieces[segment]
        self._num_entries -= sum(len(slots) for _, slots in pieces)
        pieces.clear()
        self._torn.discard(segment)
        self.count -= 1
        moved, place = self.ids.item(self.count), self._place.item(segment)
        self.ids[place] = moved
        self._place[moved] = place
        self._free.append(segment)

    def _find_end(self, segment: int) -> None:
        pieces = self._pieces[segment]
        while True:
            stamp, slots = pieces[-1]
            last = slots.item(-1) if len(slots) else NO_SLOT
            if last != NO_SLOT and self._stamp.item(last) == stamp:
                self.end[segment] = last
                return
            pieces.pop()
            self._num_entries -= len(slots)
            valid = slots[self._stamp.take(slots) == stamp]
            if len(valid):
                pieces.append((stamp, valid))
                self._num_entries += len(valid)

    def _compact(self) -> None:
        """Let go of all stale entries: paid for by those that came since the last time."""
        self._num_entries = 0
        self._torn.clear()
        for segment in self.ids[: self.count].tolist():
            fresh = [(n, slots[self._stamp.take(slots) == n]) for n, slots in self._pieces[segment]]
            self._pieces[segment] = [(n, slots) for n, slots in fresh if len(slots)]
            self._num_entries += sum(len(slots) for _, slots in self._pieces[segment])
