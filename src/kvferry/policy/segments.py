"""Slots in segments: runs of a chain that one conversation has, or several share.

A segment is a stack of slots in chain order, in pieces as they came: its end goes first. A slot is
in one segment at a time; what it leaves behind elsewhere is stale and passed over when it is met,
so a batch of any size is a few array operations.

::

    segment 4   piece (7) 20 21 22   piece (9) 23 30     stamp 7: 20 22   9: 23 30
                         ^ 21 moved elsewhere, its stamp is another: stale
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

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
