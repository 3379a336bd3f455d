"""The free slots of a pool in memory: what is stored together lies in as few runs as can be had.

::

    free        ..4 5..  ..9..  ..12 13 14 15..       three runs
    3 wanted    12 13 14                              the tightest that holds them all
    6 wanted    12 13 14 15, 4 5                      else the longest, then the tightest

A copy takes a run at a time. Slots become free where conversations end, a few here and a few there;
given out as they come they would be scattered more with every day. So a few are kept free: single
ones wait there until their neighbours are free too. Who goes, and in which order, others say.
"""

from __future__ import annotations

import numpy as np

from kvferry.errors import InputError
from kvferry.types import NO_SLOTS, SlotArray

_SPARE_SHARE = 64
_MOST_SPARE = 1024


def num_spare_together(num_slots: int) -> int:
    """So many slots are made free beyond need where others must go: among them are runs."""
    return min(num_slots // _SPARE_SHARE, _MOST_SPARE)


class FreeTogether:
    """Free slots as runs, in the order of their numbers. Owns which are free."""

    def __init__(self) -> None:
        self.count = 0
        self._starts = NO_SLOTS
        self._ends = NO_SLOTS
        self._next = NO_SLOTS

    @property
    def slots(self) -> SlotArray:
        """All of them, in the order of their numbers."""
        return _slots(self._starts, self._ends)

    def push(self, ascending: SlotArray) -> None:
        """These are free from now on."""
        if not len(ascending):
            return
        self.count += len(ascending)
        cuts = (ascending[1:] != ascending[:-1] + 1).nonzero()[0]
        starts = np.concatenate((self._starts, ascending[:1], ascending[1:][cuts]))
        ends = np.concatenate((self._ends, ascending[cuts] + 1, ascending[-1:] + 1))
        order = starts.argsort(kind="stable")
        self._starts, self._ends = _joined(starts[order], ends[order])

    def give_out_next(self, slots: SlotArray) -> None:
        """The next ones taken are these, in this order."""
        if not np.isin(slots, self.slots).all():
            raise InputError(f"{len(slots)} slots cannot be given out next: some are not free")
        self._next = slots

    def take(self, count: int, beside: object = None) -> SlotArray:
        """As many slots, of which there are enough: in one run if there is one, else in few."""
        if len(self._next):
            return self._take_next(count)
        if not count:
            return NO_SLOTS
        lengths = self._ends - self._starts
        fitting = (lengths >= count).nonzero()[0]
        if len(fitting):
            run = fitting[lengths[fitting].argmin()]
            first = int(self._starts[run])
            self._cut(run, count)
            self.count -= count
            return np.arange(first, first + count)
        return self._take_longest(count, lengths)

    def num_in_runs(self, most_runs: int) -> int:
        """How many there are in so many runs, the longest."""
        lengths = self._ends - self._starts
        if len(lengths) > most_runs:
            lengths = np.partition(lengths, len(lengths) - most_runs)[-most_runs:]
        return int(lengths.sum())

    def _take_longest(self, count: int, lengths: SlotArray) -> SlotArray:
        order = (-lengths).argsort(kind="stable")
        total = lengths[order].cumsum()
        num_whole = int(total.searchsorted(count))
        rest = count - int(total[num_whole - 1])
        whole, others = order[:num_whole], order[num_whole:]
        last = others[int((lengths[others] >= rest).nonzero()[0][-1])]  # the tightest of them
        goes = np.zeros(len(lengths), dtype=bool)
        goes[whole] = goes[last] = True
        starts, ends = self._starts[goes], self._ends[goes]
        first = self._starts.item(last)
        ends[starts == first] = first + rest
        self._starts[last] = first + rest
        goes[last] = lengths.item(last) == rest
        stays = ~goes
        self._starts, self._ends = self._starts[stays], self._ends[stays]
        self.count -= count
        return _slots(starts, ends)

    def _cut(self, run: int, count: int) -> None:
        """So many slots of the beginning of a run are free no more."""
        self._starts[run] += count
        if self._starts[run] == self._ends[run]:
            stays = self._starts != self._ends
            self._starts, self._ends = self._starts[stays], self._ends[stays]

    def _take_next(self, count: int) -> SlotArray:
        taken, self._next = self._next[:count], self._next[count:]
        left = np.setdiff1d(self.slots, taken, assume_unique=True)
        self._starts = self._ends = NO_SLOTS
        self.count = 0
        self.push(left)
        more = count - len(taken)
        return np.concatenate((taken, self.take(more))) if more else taken


def _joined(starts: SlotArray, ends: SlotArray) -> tuple[SlotArray, SlotArray]:
    """Runs in order; those that touch are one."""
    touching = (starts[1:] == ends[:-1]).nonzero()[0]
    if not len(touching):
        return starts, ends
    is_start, is_end = np.ones(len(starts), dtype=bool), np.ones(len(starts), dtype=bool)
    is_start[touching + 1] = is_end[touching] = False
    return starts[is_start], ends[is_end]


def _slots(starts: SlotArray, ends: SlotArray) -> SlotArray:
    """The numbers in these runs, one run after the other."""
    lengths = ends - starts
    before = lengths.cumsum() - lengths
    slots = (starts - before).repeat(lengths)
    slots += np.arange(len(slots))
    return slots
