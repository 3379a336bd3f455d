"""The slots of a policy that thinks in conversations: which segment each is in, whose it is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvferry.policy.eviction import Residents
from kvferry.policy.heard import NO_RECORD, Heard
from kvferry.policy.segments import Segments
from kvferry.policy.worth_table import NO_ROW
from kvferry.types import NO_SLOT, SlotArray


class ConversationSlots:
    """Owns segments, and for each its record, its rows in the table of worths, and its time.

    What is worth least, and what is heard of requests, is for :class:`Returns` to say.
    """

    wants_chains = True

    def __init__(self, residents: Residents) -> None:
        num_slots = residents.num_slots
        self._residents = residents
        self._segments = Segments(num_slots, self._emptied)
        self._heard = Heard(num_slots)
        self._time = np.full(num_slots, 0.0)
        self._row = np.full(num_slots, 0, dtype=np.int64)
        self._record = np.full(num_slots, NO_RECORD, dtype=np.int64)
        self._common = np.full(num_slots, NO_ROW, dtype=np.int64)
        self._ways = np.full(num_slots, 0, dtype=np.int64)  # 0: not shared
        self._segment_of: dict[int, int] = {}  # by record
        self._walks = False  # whether requests are told with what they found
        self._front = -1  # the segment of what was put back
        self._queue: dict[int, float] = {}  # segments that go next, and what they were worth
        self._now = 0.0

    # -- the slots ------------------------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        self._leave(slots)
        self._attach(slots)

    def _leave(self, slots: SlotArray) -> None:
        """Those of these slots that are held are held no longer."""
        if self._segments.holds_any(slots):
            self._segments.leave(slots[self._segments.holds(slots)])

    def use(self, slots: SlotArray) -> None:
        if not self._segments.holds_all(slots):
            held = self._segments.holds(slots)
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
        self._row[segments] = self._heard.row(record)

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

    def _record_of(self, slots: SlotArray) -> int:
        """The last request that had the last of these, as far as is known."""
        record = self._heard.latest_with(self._residents.keys_of(slots[-1:]))
        if record is None:
            record = self._heard.record_of(self._residents.keys_of(slots))
        return record

    def _attach_loose(self, slots: SlotArray) -> None:
        """Blocks that stand alone, or are parts of many chains: by whom they were asked for."""
        records = self._heard.records_of(self._residents.keys_of(slots))
        for record in dict.fromkeys(records.tolist()):
            self._attach_part(slots[records == record], record)

    def _attach_part(self, slots: SlotArray, record: int) -> None:
        """Before or behind what is here of the same conversation: its end must go first."""
        segment = self._segment_of.get(record)
        if segment is None:
            self._belongs(self._begin(slots, record), record)
            return
        keys_of, end = self._residents.keys_of, self._segments.end[segment : segment + 1]
        if self._heard.is_deeper(keys_of(slots[:1]), keys_of(end)):
            self._segments.push(segment, slots)
        else:
            self._segments.sink(segment, slots)

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
