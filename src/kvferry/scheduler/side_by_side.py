"""Where on a level blocks should go so that each conversation's lie side by side.

::

    spilled      ends before beginnings: each piece goes right before the one that follows it
    stored       beginnings before ends: each piece goes right behind the one before it
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvferry.free_runs import Neighbours
from kvferry.keys import Keys
from kvferry.lease import Lease
from kvferry.pool import Pool
from kvferry.types import NO_SLOT, Key, SlotArray

Runs = tuple[SlotArray, tuple[Key | None, ...]]
"""Where runs of blocks that follow each other begin, and the key before each (``Pool.runs_of``)."""

_MOST_AWAITED = 1 << 14
"""So many conversations whose beginnings are still to come are remembered."""


class SideBySide:
    """Knows of pieces whose beginnings are not here yet. Owns where those should go."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._awaited: OrderedDict[Key, int] = OrderedDict()  # the slot after, by the key to come

    def clear(self) -> None:
        self._awaited.clear()

    def wish(self, keys: Keys, runs: Runs, *, grows_down: bool) -> Neighbours:
        """Right before the block that follows a run, or right behind the one it follows."""
        starts, before = runs
        lengths = np.diff(np.append(starts, len(keys)))
        numbers = np.repeat(np.arange(len(starts)), lengths)
        wanted = np.full(len(keys), NO_SLOT, dtype=np.int64)
        pieces = zip(starts.tolist(), lengths.tolist(), before, strict=True)
        for start, length, parent in pieces:
            after = self._awaited.pop(keys[start + length - 1], None) if grows_down else None
            if after is not None:
                wanted[start : start + length] = np.arange(after - length, after)
            elif parent is not None:
                slot = self._pool.slot_of(parent)
                if slot != NO_SLOT:
                    wanted[start : start + length] = np.arange(slot + 1, slot + 1 + length)
        return Neighbours(wanted, numbers, grows_down)

    def note(self, keys: Keys, runs: Runs, lease: Lease) -> None:
        """These got slots: what is before each run, and still to come, should lie before it."""
        starts, before = runs
        at = np.searchsorted(lease.positions, starts)
        for position, start, parent in zip(at.tolist(), starts.tolist(), before, strict=True):
            if parent is None or position >= len(lease) or lease.positions[position] != start:
                continue
            if self._pool.slot_of(parent) == NO_SLOT:
                self._awaited[parent] = lease.slots.item(position)
        while len(self._awaited) > _MOST_AWAITED:
            self._awaited.popitem(last=False)
