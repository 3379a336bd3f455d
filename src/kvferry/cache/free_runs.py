"""Free slots of a medium that is read in runs: what is read together should lie together."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from kvferry.errors import InputError
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

EXTENT = 64
"""Slots of one extent: 6 MiB of small blocks, which a drive reads as fast as it can."""

_LOOK_EXTENTS = 64
"""So many are looked at together for a run that is long enough."""


class SlotPlacement(NamedTuple):
    """Where new blocks should lie. ``wanted`` names a slot for each, or ``NO_SLOT``.

    Those with the same number in ``runs`` follow each other. ``grows_down`` says that what comes
    next belongs before them, not behind.
    """

    wanted: SlotArray
    runs: SlotArray
    grows_down: bool

    def at(self, positions: SlotArray) -> SlotPlacement:
        return SlotPlacement(self.wanted[positions], self.runs[positions], self.grows_down)


class FreeRuns:
    """Free slots by extent, for slots that are places on a medium which is read in runs.

    ::

        extents      |  A A A A . .|. . B B B B|C C . . . .|. . . . . .|
        B's beginning is still to come, and goes before it; C's end, and goes behind it

    A conversation is read back in a few long reads if its blocks lie in neighbouring places in
    order. They come in pieces: each goes next to its neighbours if there is room, else into a hole
    that fits, else into an extent of its own, whose rest is left for its neighbours.

    Owns which slots are free and which extents to try next.
    """

    def __init__(self, num_slots: int) -> None:
        self.count = 0
        self._free = np.zeros(num_slots, dtype=bool)
        self._num_extents = -(-num_slots // EXTENT)
        self._hints: deque[int] = deque()  # extents that may have free slots, the next one last
        self._next = NO_SLOTS

    @property
    def slots(self) -> SlotArray:
        """All of them, in the order of their numbers."""
        return np.flatnonzero(self._free)

    def push(self, ascending: SlotArray) -> None:
        """These are free from now on."""
        self._free[ascending] = True
        self.count += len(ascending)
        extents = ascending // EXTENT
        extents = extents[np.flatnonzero(np.diff(extents, prepend=-1))]
        self._hints.extend(extents[::-1].tolist())
        if len(self._hints) > 2 * self._num_extents + EXTENT:
            self._hints = deque(np.unique(self.slots // EXTENT)[::-1].tolist())

    def give_out_next(self, slots: SlotArray) -> None:
        """The next ones taken are these, in this order."""
        if not self._free.take(slots).all():
            raise InputError(f"{len(slots)} slots cannot be given out next: some are not free")
        self._next = slots

    def take(self, count: int, placement: SlotPlacement | None = None) -> SlotArray:
        """As many slots, of which there are enough: those wanted that are free, else runs."""
        slots = np.full(count, NO_SLOT, dtype=np.int64)
        if len(self._next):
            taken, self._next = self._next[:count], self._next[count:]
            slots[: len(taken)] = taken
        elif placement is not None:
            self._grant(slots, placement.wanted)
        self._free[slots[slots != NO_SLOT]] = False
        lacking = np.flatnonzero(slots == NO_SLOT)
        if len(lacking):
            runs = placement.runs[lacking] if placement is not None else np.zeros_like(lacking)
            cuts = np.flatnonzero((np.diff(runs) != 0) | (np.diff(lacking) != 1)) + 1
            parts = [slots[part[0] : part[-1] + 1] for part in np.split(lacking, cuts)]
            self._fill(parts, grows_down=placement is not None and placement.grows_down)
        self.count -= count
        return slots

    def _grant(self, slots: SlotArray, wanted: SlotArray) -> None:
        there = np.flatnonzero((wanted >= 0) & (wanted < len(self._free)))
        there = there[self._free.take(wanted[there])]
        _, first = np.unique(wanted[there], return_index=True)  # two may want the same
        slots[there[first]] = wanted[there[first]]

    def _fill(self, parts: list[SlotArray], *, grows_down: bool) -> None:
        """Find slots for pieces of conversations, the longest first: each in a run if there is."""
        holes: list[range] = []
        for part in sorted(parts, key=len, reverse=True):
            start, end = 0, len(part)
            while start < end:
                if not holes:
                    holes = self._holes()
                hole = _best(holes, end - start)
                taken, rest = _cut(hole, end - start, at_end=grows_down)
                holes += rest
                if grows_down:
                    part[end - len(taken) : end] = np.arange(taken.start, taken.stop)
                    end -= len(taken)
                else:
                    part[start : start + len(taken)] = np.arange(taken.start, taken.stop)
                    start += len(taken)
                self._free[taken.start : taken.stop] = False

    def _holes(self) -> list[range]:
        """Runs of free slots in the extents to try next. What is left of those is tried last."""
        slots = NO_SLOTS
        while not len(slots):  # there are enough: what has none is met once
            extents = {self._hints.pop() for _ in range(min(len(self._hints), _LOOK_EXTENTS))}
            tried = np.sort(np.fromiter(extents, np.int64, len(extents)))
            slots = (tried[:, None] * EXTENT + np.arange(EXTENT)).reshape(-1)
            slots = slots[slots < len(self._free)]
            slots = slots[self._free.take(slots)]
        self._hints.extendleft(np.unique(slots // EXTENT).tolist())
        cuts = np.flatnonzero(np.diff(slots) != 1) + 1
        return [range(int(run[0]), int(run[-1]) + 1) for run in np.split(slots, cuts) if len(run)]


def _best(holes: list[range], count: int) -> range:
    """One that fits, or is wide, or else the tightest that is long enough, or the longest.

    It is taken out.
    """

    def rank(at: int) -> tuple[int, int]:
        length = len(holes[at])
        if count <= length <= count + count // 4:
            return 0, length
        if length >= 2 * EXTENT:
            return 1, holes[at].start
        return (2, length) if length >= count else (3, -length)

    at = min(range(len(holes)), key=rank)
    holes[at], holes[-1] = holes[-1], holes[at]
    return holes.pop()


def _cut(hole: range, count: int, *, at_end: bool) -> tuple[range, list[range]]:
    """So many slots of a hole, or all; and what is left of it.

    A hole of several extents is cut into whole ones: what is left of the last is for neighbours.
    """
    count = min(count, len(hole))
    room = range(hole.start, min(hole.stop, hole.start + -(-count // EXTENT) * EXTENT))
    taken = range(room.stop - count, room.stop) if at_end else range(room.start, room.start + count)
    rest = (range(hole.start, taken.start), range(taken.stop, hole.stop))
    return taken, [part for part in rest if part]
