"""Learns when conversations return, and keeps those that are most likely to before they cost much.

Every request is a record: how many turns its conversation has had, how long it stayed away, how
much it grew, how long its answer was. From those that came back, when, and those that did not, it
learns the chance to return at each age (``returns_model.py``). The value of a block is that chance
over the time it would be kept. To make room, a few segments are sampled, and the one of least value
loses its end; where that would be the newcomer, it is not stored.

Deterministic: the same calls at the same times make the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Evidence, Residents
from kvferry.cache.policies.returns_history import NO_RECORD, RequestHistory
from kvferry.cache.policies.returns_model import NO_ROW, HintKind
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

_SAMPLES = 64
_VICTIMS = 4  # at least, of one look; then others are looked at
_FEW = 4  # but no more than one in so many: of few samples some have a high value
_PART = 8  # of those looked at, one in so many may go
_LOOK_EVERY = 8  # requests, where those that were looked at last have not gone meanwhile
_WIDE = 512  # segments sampled where the next to go are asked for
_LOOKS = 4
_DRAWS = 4096
_NOT_HELD = 0
_SPARE = 64  # stale entries that are kept, beside four times the slots

Piece = tuple[int, SlotArray]


class Segments:
    """Slots in segments: runs of a chain that one conversation has, or several share.

    A segment is a stack of slots in chain order, in pieces as they came: its end goes first. A slot
    is in one segment at a time. What it leaves behind elsewhere is stale, and skipped when it is
    met, so a batch of any size is a few array operations::

        segment 4   piece (7) 20 21 22   piece (9) 23 30     stamp 7: 20 22   9: 23 30
                             ^ 21 moved elsewhere, its stamp is another: stale

    ``ids[:count]`` are the segments there are. ``on_empty`` is called with each segment that has
    lost its last slot. Owns which slot is in which segment, and in which order.
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
            if self._stamp.item(first) == _NOT_HELD:
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

    def push(self, segment: int, slots: SlotArray, *, first: bool = False) -> None:
        """These slots follow the last of the segment; or come before its ``first``."""
        if self._num_entries + len(slots) > self._most_entries:
            self._compact()
        count = len(slots)
        self._stamp[slots] = self._next_stamp
        if first:
            self._pieces[segment].insert(0, (self._next_stamp, slots))
        else:
            self._pieces[segment].append((self._next_stamp, slots))
            self.end[segment] = slots[-1]
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
        for _, slots in pieces:
            self._num_entries -= len(slots)
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


class Returns:
    """The policy ``returns``. Owns segments, and for each its record, its rows and its time."""

    wants_chains = True

    def __init__(self, residents: Residents, seed: int = 0) -> None:
        num_slots = residents.num_slots
        self._residents = residents
        self._segments = Segments(num_slots, self._emptied)
        self._history = RequestHistory(num_slots)
        self._time = np.full(num_slots, 0.0)
        self._row = np.full(num_slots, 0, dtype=np.int64)
        self._record = np.full(num_slots, NO_RECORD, dtype=np.int64)
        self._common = np.full(num_slots, NO_ROW, dtype=np.int64)
        self._ways = np.full(num_slots, 0, dtype=np.int64)  # 0: not shared
        self._segment_of: dict[int, int] = {}  # by record
        self._feeds_below = False  # as of the last choice
        self._walks = False  # whether requests are noted with the slots they found
        self._front = -1  # the segment of what was put back
        self._queue: dict[int, float] = {}  # segments that go next, and what they were value
        self._now = 0.0
        self._chance = np.random.default_rng(seed)
        self._draws = self._chance.random(_DRAWS)
        self._drawn = 0
        self._asked_by: Arriving | None = None
        # Of that newcomer, until the next request.
        self._bid: tuple[float, float, int] | None = None
        self._lacking = 0
        self._look_again = 0

    # -- the slots ------------------------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        held = self._segments.holds(slots)
        if np.count_nonzero(held):
            self._segments.leave(slots[held])
        self._attach(slots)

    def _leave(self, slots: SlotArray) -> None:
        """Those of these slots that are held are held no longer."""
        held = self._segments.holds(slots)
        if np.count_nonzero(held):
            self._segments.leave(slots[held])

    def use(self, slots: SlotArray) -> None:
        held = self._segments.holds(slots)
        if np.count_nonzero(held) < len(slots):
            self._attach(slots[~held])
            slots = slots[held]
        if self._front >= 0 and len(slots):
            in_front = slots[self._segments.of_slots(slots) == self._front]
            if len(in_front):
                self._segments.leave(in_front)
                self._attach(in_front)
        if not self._walks and len(slots):  # what is used is all there is to go by
            self._refresh(slots)

    def _refresh(self, slots: SlotArray) -> None:
        """Segments of which slots were used are as new as the last request that had these."""
        record = self._record_of(slots)
        segments = self._segments.of_slots(slots)
        self._time[segments] = self._tick()
        self._row[segments] = self._history.row(record)

    def keep(self, slots: SlotArray) -> None:
        if len(slots):
            self.insert(np.ascontiguousarray(slots[::-1]))

    def put_back(self, slots: SlotArray) -> None:
        if not len(slots):
            return
        self._leave(slots)
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
        edges = (parents[1:] != slots[:-1]).nonzero()[0]
        if not len(edges):
            self._attach_run(slots, parents.item(0))
            return
        if len(edges) == len(slots) - 1:
            self._attach_loose(slots)
            return
        bounds = [0, *(edges + 1).tolist(), len(slots)]
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
        record = self._record_of(slots)
        num_shared, common, ways = self._history.shared(record)
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

    def _record_of(self, slots: SlotArray) -> int:
        """The last request that had the last of these blocks, as far as is known."""
        return self._history.record_of(self._residents.keys_of(slots))

    def _attach_loose(self, slots: SlotArray) -> None:
        """Blocks that stand alone, or are parts of many chains: by the requests that had them."""
        records = self._history.records_of(self._residents.keys_of(slots))
        for record in dict.fromkeys(records.tolist()):
            self._attach_part(slots[records == record], record)

    def _attach_part(self, slots: SlotArray, record: int) -> None:
        """Before or behind what is here of the same conversation: its end must go first."""
        segment = self._segment_of.get(record)
        if segment is None:
            self._belongs(self._begin(slots, record), record)
            return
        keys_of, end = self._residents.keys_of, self._segments.end[segment : segment + 1]
        if self._history.is_deeper(keys_of(slots[:1]), keys_of(end)):
            self._segments.push(segment, slots)
        else:
            self._segments.push(segment, slots, first=True)

    def _begin(self, slots: SlotArray, record: int) -> int:
        """A segment of these slots, with the value of a record."""
        segment = self._segments.new(slots)
        row, self._time[segment] = self._history.row_and_time(record, self._tick())
        self._row[segment] = row
        self._ways[segment] = 0
        self._common[segment] = NO_ROW
        return segment

    def _emptied(self, segment: int) -> None:
        if segment == self._front:
            self._front = -1
        self._belongs(segment, NO_RECORD)

    def _belongs(self, segment: int, record: int) -> None:
        """A segment is the end of this record's conversation; of none, where there is no record."""
        self._queue.pop(segment, None)
        before = self._record.item(segment)
        if before != NO_RECORD and self._segment_of.get(before) == segment:
            del self._segment_of[before]
        self._record[segment] = record
        if record != NO_RECORD:
            self._segment_of[record] = segment

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._segments.holds(slots)

    def discard(self, slots: SlotArray) -> None:
        self._leave(slots)

    def clear(self) -> None:
        self._segments.clear()
        self._queue.clear()

    def _tick(self) -> float:
        """The time, which never goes back."""
        self._now = max(self._now, self._residents.now())
        return self._now

    # -- requests and hints ---------------------------------------------------------------------

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        if len(keys.array):
            self._bid = None
            self._now = now = max(self._now, self._residents.now())
            record = self._history.asked(keys, num_tokens, now)
            if len(slots):
                self._walks = True
                self._walk(slots, record, now)
            elif self._history.before in self._segment_of:  # what is here of it may be of use later
                self._own(self._segment_of[self._history.before], record, now)

    def answered(self, keys: Keys, num_tokens: int) -> None:
        if len(keys.array):
            self._bid = None
            self._now = now = max(self._now, self._residents.now())
            before, record = self._history.answered(keys, num_tokens, now)
            segment = self._segment_of.get(before)
            if segment is not None:
                self._own(segment, record, now)

    def _walk(self, slots: SlotArray, record: int, now: float) -> None:
        """A request passes these slots: what it shares with others, and what is its own."""
        segments = self._segments
        num_shared, _, num_ways = self._history.shared(record)
        for segment, start, end in segments.runs(slots):
            if segment == self._front:
                continue
            ways = num_ways if end == num_shared else 1
            if segments.end.item(segment) != slots.item(end - 1):  # others of it went another way
                part = slots[start:end]
                segments.leave(part)
                time = self._time.item(segment)
                segment = self._begin(part, record)
                self._time[segment] = time
                self._pass(segment, record, now, ways)
            elif (
                end == len(slots)
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
        self._row[segment] = self._history.row(record)
        self._time[segment] = now
        self._belongs(segment, record)

    def _pass(self, segment: int, record: int, now: float, ways: int) -> None:
        """A request passed a segment that several share, which go so many ways behind it.

        It may return by that request's conversation, or by another one.
        """
        ways = max(ways, self._ways.item(segment), 1)
        self._ways[segment] = ways
        self._common[segment] = self._history.common_row(ways, now - self._time.item(segment))
        self._row[segment] = self._history.row(record)
        self._time[segment] = now
        self._belongs(segment, NO_RECORD)

    def hint(self, slots: SlotArray, evidence: Evidence) -> None:
        if not self._segments.has(slots.item(-1)):
            return
        segment = self._segments.of(slots.item(-1))
        record = self._record.item(segment)
        if record != NO_RECORD:
            self._bid = None
            continues = HintKind.CONTINUES if evidence.continues else HintKind.NOTHING
            hinted = HintKind.ENDED if evidence.ended else continues
            within = evidence.within
            until = self._tick() + within if evidence.continues and within is not None else None
            self._history.hinted(record, hinted, until)
            self._row[segment] = self._history.row(record)

    # -- victims --------------------------------------------------------------------------------

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        if arriving is self._asked_by:  # what is lacking still, where the pool looks wider
            count = min(count, max(self._lacking, 1))
        else:
            self._asked_by, self._bid = arriving, None
        if count <= 0 or not self._segments.count:
            return NO_SLOTS
        if self._front >= 0:
            found = [self._segments.pop(self._front, count)]
        else:
            found = self._least(count, arriving)
        taken = found[0] if len(found) == 1 else np.concatenate((NO_SLOTS, *found))
        self._lacking = count - len(taken)
        return taken

    def _least(self, count: int, arriving: Arriving) -> list[SlotArray]:
        """Let go of the ends of segments whose value is not above the newcomer's, the least first.

        Segments that were announced go first: they may have been copied to a tier by now.
        """
        found: list[SlotArray] = []
        feeds_below = self._feeds_below = self._residents.feeds_below()
        if self._bid is None:
            self._bid = self._bids(arriving)
        own, common, num_shared = self._bid
        if not feeds_below and self._history.num_asked >= self._look_again:
            self._queue.clear()
        while count > 0:
            segment, value = self._next()
            if segment < 0:
                self._fill(_WIDE if feeds_below else _SAMPLES, _VICTIMS)
                self._look_again = self._history.num_asked + _LOOK_EVERY
                segment, value = self._next()
            if value > own:  # its own blocks are refused
                count -= int(np.count_nonzero(arriving.slots[num_shared:] == NO_SLOT))
                own = inf
            if segment < 0 or count <= 0 or value > common:
                break
            popped = self._segments.pop(segment, count)
            count -= len(popped)
            found.append(popped)
        return found

    def _next(self) -> tuple[int, float]:
        """The segment that goes next, and its value when it was announced; -1 where there is none.

        Some that were announced are in use again by now, or are followed.
        """
        while self._queue:
            segment, value = next(iter(self._queue.items()))
            if self._residents.can_go(self._segments.end.item(segment)):
                return segment, value
            del self._queue[segment]
        return -1, inf

    def _fill(self, samples: int, least: int) -> None:
        """Sample segments, and announce at least so many of those of least value."""
        segments, values = self._look(self._tick(), samples)
        num = len(segments)
        count = max(num // _PART, min(least, num // _FEW), 1)
        for segment, value in zip(segments[:count], values, strict=False):
            if segment != self._front:
                self._queue.setdefault(segment, value)

    def _can_lose(self, ends: SlotArray) -> npt.NDArray[np.bool_]:
        """For each end of a segment, whether it can go."""
        return self._residents.is_idle(ends) & (self._residents.num_followers_of(ends) == 0)

    def _look(self, now: float, samples: int = _SAMPLES) -> tuple[list[int], list[float]]:
        """Some segments whose end can go, those of the least value first."""
        count = self._segments.count
        every = self._segments.ids[:count]
        picks = every if count <= samples else every.take(self._drawn_from(count, samples))
        picks = picks[self._can_lose(self._segments.end.take(picks))]
        if not len(picks) and count > samples:
            picks = every[self._can_lose(self._segments.end.take(every))]
        values = self._values(picks, now)
        order = values.argsort(kind="stable")
        return picks.take(order).tolist(), values.take(order).tolist()

    def _drawn_from(self, count: int, samples: int) -> npt.NDArray[np.int64]:
        if self._drawn + samples > _DRAWS:
            self._draws = self._chance.random(_DRAWS)
            self._drawn = 0
        draws = self._draws[self._drawn : self._drawn + samples]
        self._drawn += samples
        return (draws * count).astype(np.int64)

    def _values(self, segments: npt.NDArray[np.int64], now: float) -> npt.NDArray[np.float64]:
        if self._feeds_below:  # the last tier chooses: see docs/policies.md
            return self._time.take(segments)
        rows, commons = self._row.take(segments), self._common.take(segments)
        return self._history.values(rows, commons, now - self._time.take(segments))

    def _bids(self, arriving: Arriving) -> tuple[float, float, int]:
        """The value of the newcomer's own blocks, of those it shares, and how many it shares."""
        # Of what stands alone, one block does not speak for the others.
        if self._feeds_below or not arriving.chained:
            return inf, inf, 0
        record = self._history.record_of(arriving.keys)
        own, common, num_shared = self._history.bids(record)
        if num_shared and arriving.parent != NO_SLOT:
            parent = np.array([arriving.parent])
            num_shared -= self._residents.positions_of(parent).item(0) + 1
        return (own, common, num_shared) if num_shared > 0 else (own, own, 0)

    def peek(self, count: int) -> SlotArray:
        self._feeds_below = self._residents.feeds_below()
        found: list[SlotArray] = []
        if self._front >= 0:
            found.append(self._segments.last(self._front, count))
            count -= len(found[-1])
        if count > 0:
            self._announce(count)
            found += self._ends(self._queue, count)
            count -= sum(map(len, found[1:] if self._front >= 0 else found))
        if count > 0:  # more than can go at once: all there is
            every = self._segments.ids[: self._segments.count]
            values = self._values(every, self._now)
            every = every.take(values.argsort(kind="stable"))
            rest = [each for each in every.tolist() if each not in self._queue]
            found += self._ends((each for each in rest if each != self._front), count)
        return np.concatenate((NO_SLOTS, *found))

    def _announce(self, count: int) -> None:
        """Announce enough segments that go next; those announced before stay in front."""
        size = self._segments.size
        for _ in range(_LOOKS):
            if sum(map(size.item, self._queue)) >= count:
                return
            self._fill(_WIDE, _VICTIMS)

    def _ends(self, segments: Iterable[int], count: int) -> list[SlotArray]:
        """Up to ``count`` slots of segments, each from its end on."""
        found: list[SlotArray] = []
        for segment in segments:
            if count <= 0:
                break
            found.append(self._segments.last(segment, count))
            count -= len(found[-1])
        return found
