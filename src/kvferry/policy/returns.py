"""Learns when conversations return, and keeps those that are most likely to before they cost much.

Every request is a record: how many turns its conversation has had, how long it stayed away, how
much it grew, how long its answer was. From those that came back, when, and those that did not, it
learns the chance to return at each age (``hazards.py``). What a block is worth is that chance over
the time it would be held. To make room, a few segments are looked at, and the one of least worth
loses its end; where that would be the newcomer, it is not stored.

Deterministic: the same calls at the same times make the same choices.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.policy.eviction import Arriving, Evidence, Residents
from kvferry.policy.hazards import ENDS, NUM_BUCKETS, Hazards
from kvferry.policy.recent import LISTED, Known, RecentBlocks, Words
from kvferry.policy.records import Records
from kvferry.policy.segments import Segments
from kvferry.policy.traits import (
    Said,
    TurnKind,
    conversation,
    shared,
    with_answer,
    with_told,
)
from kvferry.policy.worth_table import NO_ROW, WorthTable
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

_SAMPLES = 64
_VICTIMS = 4  # of one look; then others are looked at
_LEARN_EVERY = 16  # requests
_NO_RECORD = -1
_MOSTLY = 2  # a request goes on with one of whose blocks it has at least one in so many
_RECORDS = 1 << 15
_DRAWS = 4096


class Returns:
    """The policy ``returns``. Owns segments, records and the model; the pool owns the slots."""

    wants_chains = True

    def __init__(self, residents: Residents, seed: int = 0) -> None:
        num_slots = residents.num_slots
        self._residents = residents
        self._segments = Segments(num_slots, self._emptied)
        self._recent = RecentBlocks(min(max(4 * num_slots, 1 << 14), 1 << 20))
        self._records = Records(_RECORDS)
        self._hazards = Hazards()
        self._table = WorthTable(self._hazards)
        self._chance = np.random.default_rng(seed)
        self._draws = self._chance.random(_DRAWS)
        self._drawn = 0
        self._time = np.full(num_slots, 0.0)
        self._row = np.full(num_slots, 0, dtype=np.int64)
        self._record = np.full(num_slots, _NO_RECORD, dtype=np.int64)
        self._common = np.full(num_slots, NO_ROW, dtype=np.int64)
        self._ways = np.full(num_slots, 0, dtype=np.int64)  # 0: not shared
        self._factor = np.full(num_slots, 1.0)
        self._front = -1  # the segment of what was put back
        self._now = 0.0
        self._asked_by: Arriving | None = None
        self._lacking = 0
        self._num_asked = 0
        self._latest: tuple[int, int] = (_NO_RECORD, 0)  # a record, and its last listed word
        self._unknown = self._table.row(conversation(turn=1, gap=None, grown=0, kind=TurnKind.NEW))

    # -- what is heard --------------------------------------------------------------------------

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        now = self._tick()
        self._num_asked += 1
        if self._num_asked % _LEARN_EVERY == 0 and self._records.teach(self._hazards, now):
            self._table.follow()
        words = self._recent.listed(keys)
        if not len(words):
            return
        record = self._recorded(words, num_tokens, now)
        self._latest = (record, keys.array.item(-1, 0))
        if len(slots):
            self._walk(slots, record, now)

    def _recorded(self, words: Words, num_tokens: int, now: float) -> int:
        """A new record of a request: what it goes on with, if anything, and what it shares."""
        known = self._recent.look(words)
        at = None
        if known.depth > known.shared:
            at = self._records.place(known.record)
        turn, gap, grown, kind = 1, None, 0, TurnKind.NEW
        if at is not None:
            time, before, turns, tokens = self._records.facts(at)
            if known.depth * _MOSTLY >= before:
                self._records.returns(known.record, now)
                turn, gap, grown = turns + 1, now - time, num_tokens - tokens
                kind = TurnKind.GOES_ON if known.depth >= before else TurnKind.BRANCHES
        if kind is not TurnKind.GOES_ON:
            known = self._recent.shared_up_to(words, known)
        traits = conversation(turn=turn, gap=gap, grown=grown, kind=kind)
        record = self._records.add(now, traits, length=len(words), turn=turn, tokens=num_tokens)
        self._recent.note(words, record, 0 if kind is TurnKind.GOES_ON else known.depth)
        if known.shared:
            self._share(words, record, known, now)
        return record

    def _share(self, words: Words, record: int, known: Known, now: float) -> None:
        """Record that the part of a request which others have, too, was asked for again."""
        by = self._records.place(known.sharer)
        gap = 0.0
        if by is not None:
            gap = now - self._records.time.item(by)
            self._records.returns(known.sharer, now)
        ways = known.ways + 1
        traits = shared(ways=ways, gap=gap)
        self._recent.share(words, known.shared, self._records.add(now, traits))
        at = self._records.place(record)
        if at is not None:
            self._records.shared[at] = LISTED.item(known.shared - 1) + 1
            self._records.shared_row[at] = self._table.row(traits)
            self._records.shared_ways[at] = ways

    def _walk(self, slots: SlotArray, record: int, now: float) -> None:
        """A request passes these slots: what it shares with others, and what is its own."""
        segments = self._segments
        held = segments.holds(slots)
        if not held.all():
            slots = slots[: int(held.argmin())]
            if not len(slots):
                return
        at = self._records.place(record)
        num_shared = self._records.shared.item(at) if at is not None else 0
        each = segments.of_slots(slots)
        edges = (each[1:] != each[:-1]).nonzero()[0] + 1
        bounds = [0, *edges.tolist(), len(slots)]
        for start, end in pairwise(bounds):
            segment, last = each.item(start), slots.item(end - 1)
            if segment == self._front:
                continue
            is_last = end == len(slots)
            ways = self._records.shared_ways.item(at) if at is not None and end == num_shared else 1
            if segments.end.item(segment) != last:  # the others of it went another way
                part = slots[start:end]
                segments.leave(part)
                time = self._time.item(segment)
                segment = self._begin(part, self._row.item(segment), time, _NO_RECORD)
                self._pass(segment, record, now, ways)
            elif (
                is_last
                and end > num_shared
                and not self._residents.num_followers_of(slots[-1:]).item(0)
            ):
                self._own(segment, record, now)
            else:
                self._pass(segment, record, now, ways)

    def _own(self, segment: int, record: int, now: float) -> None:
        """A conversation's end is what its last request says."""
        at = self._records.place(record)
        assert at is not None
        self._ways[segment] = 0
        self._common[segment] = NO_ROW
        self._record[segment] = record
        self._row[segment] = self._table.row(self._records.traits(at))
        self._time[segment] = now
        self._factor[segment] = 1.0
        self._records.segment[at] = segment

    def _pass(self, segment: int, record: int, now: float, ways: int) -> None:
        """A request passed a segment that several share, which go so many ways behind it.

        It may return by that request's conversation, or by another one.
        """
        ways = max(ways, self._ways.item(segment), 1)
        traits = shared(ways=ways, gap=now - self._time.item(segment))
        at = self._records.place(record)
        assert at is not None
        self._ways[segment] = ways
        self._common[segment] = self._table.row(traits)
        self._record[segment] = _NO_RECORD
        self._row[segment] = self._table.row(self._records.traits(at))
        self._time[segment] = now

    def answered(self, keys: Keys, num_tokens: int) -> None:
        if not len(keys):
            return
        now = self._tick()
        record, last = self._latest
        is_latest = last == keys.array.item(-1, 0)
        words = None
        if not is_latest:
            words = self._recent.listed(keys)
            record = self._recent.look(words).record
        at = self._records.place(record) if record != _NO_RECORD else None
        if at is None:
            return
        time, length, *_ = self._records.facts(at)
        traits = with_answer(self._records.traits(at), num_tokens)
        segment = self._records.segment.item(at)
        is_mine = segment >= 0 and self._record.item(segment) == record
        if words is not None:
            length = len(words)
        if time == now:
            self._records.amend(at, traits, length)
        else:  # it is from now on that nobody has gone on with it
            record = self._records.renew(record, now, traits, length)
            words = self._recent.listed(keys) if words is None else words
            self._latest = (record, keys.array.item(-1, 0))
        if words is not None:
            self._recent.renew(words, record)
        if is_mine:
            self._own(segment, record, now)

    def hint(self, slots: SlotArray, evidence: Evidence) -> None:
        if not self._segments.has(slots.item(-1)):
            return
        segment = self._segments.of(slots.item(-1))
        record = self._record.item(segment)
        at = self._records.place(record) if record != _NO_RECORD else None
        if at is None or self._ways.item(segment):
            return
        told = Said.OVER if evidence.over else Said.GOES_ON if evidence.goes_on else Said.NOTHING
        traits = with_told(self._records.traits(at), told)
        self._records.amend(at, traits, self._records.facts(at)[1])
        self._row[segment] = self._table.row(traits)

    # -- the slots ------------------------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        held = self._segments.holds(slots)
        if held.any():
            self._segments.leave(slots[held])
        self._attach(slots)

    def use(self, slots: SlotArray) -> None:
        held = self._segments.holds(slots)
        if not held.all():
            self._attach(slots[~held])
            slots = slots[held]
        if self._front >= 0 and len(slots):
            in_front = slots[self._segments.of_slots(slots) == self._front]
            if len(in_front):
                self._segments.leave(in_front)
                self._attach(in_front)
        if not self._num_asked and len(slots):  # what is used is all there is to go by
            self._time[self._segments.of_slots(slots)] = self._tick()

    def keep(self, slots: SlotArray) -> None:
        if len(slots):
            self.insert(np.ascontiguousarray(slots[::-1]))

    def put_back(self, slots: SlotArray) -> None:
        if not len(slots):
            return
        held = self._segments.holds(slots)
        if held.any():
            self._segments.leave(slots[held])
        slots = np.ascontiguousarray(slots[::-1])
        if self._front >= 0:
            self._segments.push(self._front, slots)
            return
        self._front = self._begin(slots, self._unknown, self._now, _NO_RECORD)
        self._factor[self._front] = -1.0

    def _attach(self, slots: SlotArray) -> None:
        """Slots that are not held: behind those they follow, or in segments of their own."""
        if not len(slots):
            return
        parents = self._residents.parents_of(slots)
        edges = (parents[1:] != slots[:-1]).nonzero()[0] + 1
        if not len(edges):
            self._attach_run(slots, parents.item(0))
            return
        bounds = [0, *edges.tolist(), len(slots)]
        if len(edges) == len(slots) - 1:
            self._attach_loose(slots)
            return
        for start, end in pairwise(bounds):
            self._attach_run(slots[start:end], parents.item(start))

    def _attach_run(self, slots: SlotArray, parent: int) -> None:
        """A run of a chain: first what others share, then what is one conversation's own."""
        segments = self._segments
        behind = -1  # the segment that ends where the run begins
        if parent != NO_SLOT and segments.has(parent):
            segment = segments.of(parent)
            if segments.end.item(segment) == parent and segment != self._front:
                behind = segment
        if (
            behind >= 0
            and not self._ways.item(behind)
            and self._residents.num_followers_of(np.array([parent])).item(0) <= 1
        ):
            segments.push(behind, slots)
            return
        record = self._record_of(self._residents.keys_of(slots))
        at = self._records.place(record)
        num_shared = self._records.shared.item(at) if at is not None else 0
        if num_shared:
            num_shared -= self._residents.positions_of(slots[:1]).item(0)
        if at is not None and num_shared > 0:
            part, slots = slots[:num_shared], slots[num_shared:]
            if behind >= 0:
                segments.push(behind, part)
            else:
                self._begin_shared(part, at)
        if len(slots):
            self._begin_of(slots, record)

    def _begin_shared(self, slots: SlotArray, at: int) -> None:
        row = self._table.row(self._records.traits(at))
        segment = self._begin(slots, row, self._records.time.item(at), _NO_RECORD)
        self._common[segment] = self._records.shared_row.item(at)
        self._ways[segment] = self._records.shared_ways.item(at)

    def _record_of(self, keys: Keys) -> int:
        """The last request that had the last of these blocks, as far as is known."""
        record, last = self._latest
        if last == keys.array.item(-1, 0):
            return record
        records = self._recent.records_of(keys)
        records = records[records != _NO_RECORD]
        return records.item(-1) if len(records) else _NO_RECORD

    def _attach_loose(self, slots: SlotArray) -> None:
        """Blocks that stand alone, or are parts of many chains: by whom they were asked for."""
        records = self._recent.records_of(self._residents.keys_of(slots))
        known = np.where(records >= 0, np.arange(len(slots)), 0)
        records = records.take(np.maximum.accumulate(known))  # those not listed, as those before
        for record in dict.fromkeys(records.tolist()):
            self._begin_of(slots[records == record], record)

    def _begin_of(self, slots: SlotArray, record: int) -> None:
        at = self._records.place(record) if record != _NO_RECORD else None
        if at is None:
            self._begin(slots, self._unknown, self._tick(), _NO_RECORD)
            return
        row = self._table.row(self._records.traits(at))
        segment = self._begin(slots, row, self._records.time.item(at), record)
        self._records.segment[at] = segment

    def _begin(self, slots: SlotArray, row: int, time: float, record: int) -> int:
        segment = self._segments.new(slots)
        self._row[segment] = row
        self._time[segment] = time
        self._record[segment] = record
        self._ways[segment] = 0
        self._common[segment] = NO_ROW
        self._factor[segment] = 1.0
        return segment

    def _emptied(self, segment: int) -> None:
        if segment == self._front:
            self._front = -1
        self._record[segment] = _NO_RECORD

    # -- who goes -------------------------------------------------------------------------------

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        if arriving is self._asked_by:  # what is lacking still, where the pool looks wider
            count = min(count, max(self._lacking, 1))
        self._asked_by = arriving
        if count <= 0 or not self._segments.count:
            return NO_SLOTS
        if self._front >= 0:
            found = [self._segments.pop(self._front, count)]
        else:
            found = self._least(count, *self._bids(arriving), self._tick())
        taken = found[0] if len(found) == 1 else np.concatenate((NO_SLOTS, *found))
        self._lacking = count - len(taken)
        return taken

    def _least(
        self, count: int, own: float, common: float, num_own: int, now: float
    ) -> list[SlotArray]:
        """Let go of the ends of segments that are worth no more than the newcomer, least first.

        ``num_own`` blocks of the newcomer are worth ``own``, those before them ``common``.
        """
        found: list[SlotArray] = []
        while count > 0:
            segments, worths = self._look(now)
            if not segments or worths[0] > max(own, common):
                break
            for segment, worth in zip(segments[:_VICTIMS], worths, strict=False):
                if worth > own:  # its own blocks are refused
                    count -= num_own
                    num_own = 0
                if count <= 0 or worth > max(own, common):
                    break
                if self._segments.size.item(segment):
                    popped = self._segments.pop(segment, count)
                    count -= len(popped)
                    found.append(popped)
        return found

    def _look(self, now: float) -> tuple[list[int], list[float]]:
        """Some segments whose end can go, the least worth first."""
        count = self._segments.count
        picks = self._segments.ids[:count]
        if count > _SAMPLES:
            if self._drawn + _SAMPLES > _DRAWS:
                self._draws = self._chance.random(_DRAWS)
                self._drawn = 0
            draws = self._draws[self._drawn : self._drawn + _SAMPLES]
            self._drawn += _SAMPLES
            picks = picks.take((draws * count).astype(np.int64))
        ends = self._segments.end.take(picks)
        can_go = self._residents.is_idle(ends) & (self._residents.num_followers_of(ends) == 0)
        picks = picks[can_go]
        if not len(picks) and count > _SAMPLES:
            picks = self._segments.ids[:count]
            ends = self._segments.end.take(picks)
            can_go = self._residents.is_idle(ends) & (self._residents.num_followers_of(ends) == 0)
            picks = picks[can_go]
        worths = self._worths(picks, now)
        order = worths.argsort(kind="stable")
        return picks.take(order).tolist(), worths.take(order).tolist()

    def _worths(self, segments: npt.NDArray[np.int64], now: float) -> npt.NDArray[np.float64]:
        buckets = ENDS.searchsorted(now - self._time.take(segments), "right")
        np.minimum(buckets, NUM_BUCKETS - 1, out=buckets)
        table = self._table.worth.reshape(-1)
        worths = table.take(self._row.take(segments) * NUM_BUCKETS + buckets)
        worths += table.take(self._common.take(segments) * NUM_BUCKETS + buckets)
        return worths * self._factor.take(segments)

    def _bids(self, arriving: Arriving) -> tuple[float, float, int]:
        """What the newcomer's own blocks are worth, those it shares, and how many are its own."""
        at = self._records.place(self._record_of(arriving.keys))
        missing = arriving.slots == NO_SLOT
        num_own = int(np.count_nonzero(missing))
        if at is None:
            return self._table.worth.item(self._unknown, 0), 0.0, num_own
        row = self._table.row(self._records.traits(at))
        worth = self._table.worth
        own = worth.item(row, 0)
        num_shared = self._records.shared.item(at)
        if num_shared and arriving.parent != NO_SLOT:
            parent = np.array([arriving.parent])
            num_shared -= self._residents.positions_of(parent).item(0) + 1
        if num_shared <= 0 or not arriving.chained:
            return own, 0.0, num_own
        num_own = int(np.count_nonzero(missing[num_shared:]))
        return own, own + worth.item(self._records.shared_row.item(at), 0), num_own

    def peek(self, count: int) -> SlotArray:
        found: list[SlotArray] = []
        if self._front >= 0:
            found.append(self._segments.last(self._front, count))
            count -= len(found[-1])
        if count > 0:
            every = self._segments.ids[: self._segments.count]
            every = every[every != self._front]
            worths = self._worths(every, self._now)
            for segment in every.take(worths.argsort(kind="stable")).tolist():
                found.append(self._segments.last(segment, count))
                count -= len(found[-1])
                if count <= 0:
                    break
        return np.concatenate((NO_SLOTS, *found))

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._segments.holds(slots)

    def discard(self, slots: SlotArray) -> None:
        self._segments.leave(slots[self._segments.holds(slots)])

    def clear(self) -> None:
        self._segments.clear()

    def _tick(self) -> float:
        """The time, which never goes back."""
        self._now = max(self._now, self._residents.now())
        return self._now
