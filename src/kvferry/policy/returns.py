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
from kvferry.policy.heard import NO_RECORD, Heard
from kvferry.policy.segments import Segments
from kvferry.policy.traits import Said
from kvferry.policy.worth_table import NO_ROW
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

_SAMPLES = 64
_VICTIMS = 4  # of one look; then others are looked at
_DRAWS = 4096


class Returns:
    """The policy ``returns``. Owns segments and what each is worth; the pool owns the slots."""

    wants_chains = True

    def __init__(self, residents: Residents, seed: int = 0) -> None:
        num_slots = residents.num_slots
        self._residents = residents
        self._segments = Segments(num_slots, self._emptied)
        self._heard = Heard(num_slots)
        self._chance = np.random.default_rng(seed)
        self._draws = self._chance.random(_DRAWS)
        self._drawn = 0
        self._time = np.full(num_slots, 0.0)
        self._row = np.full(num_slots, 0, dtype=np.int64)
        self._record = np.full(num_slots, NO_RECORD, dtype=np.int64)
        self._common = np.full(num_slots, NO_ROW, dtype=np.int64)
        self._ways = np.full(num_slots, 0, dtype=np.int64)  # 0: not shared
        self._segment_of: dict[int, int] = {}  # by record
        self._front = -1  # the segment of what was put back
        self._now = 0.0
        self._asked_by: Arriving | None = None
        self._lacking = 0

    # -- what is heard --------------------------------------------------------------------------

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        if len(keys):
            now = self._tick()
            record = self._heard.asked(keys, num_tokens, now)
            if len(slots):
                self._walk(slots, record, now)

    def answered(self, keys: Keys, num_tokens: int) -> None:
        if len(keys):
            before, record = self._heard.answered(keys, num_tokens, self._tick())
            segment = self._segment_of.get(before)
            if segment is not None:
                self._own(segment, record, self._now)

    def _walk(self, slots: SlotArray, record: int, now: float) -> None:
        """A request passes these slots: what it shares with others, and what is its own."""
        segments = self._segments
        held = segments.holds(slots)
        if not held.all():
            slots = slots[: int(held.argmin())]
            if not len(slots):
                return
        num_shared, _, num_ways = self._heard.shared(record)
        each = segments.of_slots(slots)
        edges = (each[1:] != each[:-1]).nonzero()[0] + 1
        bounds = [0, *edges.tolist(), len(slots)]
        for start, end in pairwise(bounds):
            segment, last = each.item(start), slots.item(end - 1)
            if segment == self._front:
                continue
            is_last = end == len(slots)
            ways = num_ways if end == num_shared else 1
            if segments.end.item(segment) != last:  # the others of it went another way
                part = slots[start:end]
                segments.leave(part)
                time = self._time.item(segment)
                segment = self._begin(part, record)
                self._time[segment] = time
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
        self._ways[segment] = 0
        self._common[segment] = NO_ROW
        self._row[segment] = self._heard.row(record)
        self._time[segment] = now
        self._belongs(segment, record)

    def _belongs(self, segment: int, record: int) -> None:
        """A segment is the end of this record's conversation; of none, where there is no record."""
        before = self._record.item(segment)
        if before != NO_RECORD and self._segment_of.get(before) == segment:
            del self._segment_of[before]
        self._record[segment] = record
        if record != NO_RECORD:
            self._segment_of[record] = segment

    def _pass(self, segment: int, record: int, now: float, ways: int) -> None:
        """A request passed a segment that several share, which go so many ways behind it.

        It may return by that request's conversation, or by another one.
        """
        ways = max(ways, self._ways.item(segment), 1)
        self._ways[segment] = ways
        self._common[segment] = self._heard.common_row(ways, now - self._time.item(segment))
        self._row[segment] = self._heard.row(record)
        self._time[segment] = now
        self._belongs(segment, NO_RECORD)

    def hint(self, slots: SlotArray, evidence: Evidence) -> None:
        if not self._segments.has(slots.item(-1)):
            return
        segment = self._segments.of(slots.item(-1))
        record = self._record.item(segment)
        if record != NO_RECORD:
            said = (
                Said.OVER if evidence.over else Said.GOES_ON if evidence.goes_on else Said.NOTHING
            )
            self._heard.said(record, said)
            self._row[segment] = self._heard.row(record)

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
        if not self._heard.anything and len(slots):  # what is used is all there is to go by
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
        self._front = self._begin(slots, NO_RECORD)

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
        record = self._heard.record_of(self._residents.keys_of(slots))
        num_shared, common, ways = self._heard.shared(record)
        if num_shared:
            num_shared -= self._residents.positions_of(slots[:1]).item(0)
        if num_shared > 0:
            part, slots = slots[:num_shared], slots[num_shared:]
            if behind >= 0:
                segments.push(behind, part)
            else:
                segment = self._begin(part, record)
                self._common[segment] = common
                self._ways[segment] = ways
        if len(slots):
            self._belongs(self._begin(slots, record), record)

    def _attach_loose(self, slots: SlotArray) -> None:
        """Blocks that stand alone, or are parts of many chains: by whom they were asked for."""
        records = self._heard.records_of(self._residents.keys_of(slots))
        for record in dict.fromkeys(records.tolist()):
            self._belongs(self._begin(slots[records == record], record), record)

    def _begin(self, slots: SlotArray, record: int) -> int:
        """A segment of these slots, worth what a record says."""
        segment = self._segments.new(slots)
        self._row[segment] = self._heard.row(record)
        self._time[segment] = self._heard.time(record, self._tick())
        self._ways[segment] = 0
        self._common[segment] = NO_ROW
        return segment

    def _emptied(self, segment: int) -> None:
        if segment == self._front:
            self._front = -1
        self._belongs(segment, NO_RECORD)

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
            if not segments or worths[0] > common:
                break
            for segment, worth in zip(segments[:_VICTIMS], worths, strict=False):
                if worth > own:  # its own blocks are refused
                    count -= num_own
                    num_own = 0
                if count <= 0 or worth > common:
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
        rows, commons = self._row.take(segments), self._common.take(segments)
        return self._heard.worths(rows, commons, now - self._time.take(segments))

    def _bids(self, arriving: Arriving) -> tuple[float, float, int]:
        """What the newcomer's own blocks are worth, those it shares, and how many are its own."""
        record = self._heard.record_of(arriving.keys)
        own, common = self._heard.bids(record)
        missing = arriving.slots == NO_SLOT
        num_shared = self._heard.shared(record)[0] if arriving.chained else 0
        if num_shared and arriving.parent != NO_SLOT:
            parent = np.array([arriving.parent])
            num_shared -= self._residents.positions_of(parent).item(0) + 1
        if num_shared <= 0:
            return own, own, int(np.count_nonzero(missing))
        return own, common, int(np.count_nonzero(missing[num_shared:]))

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
