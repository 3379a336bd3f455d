"""Segmented LRU: what was used again is protected from what came only once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.cache.policies.slot_lists import FRONT, SlotLists, Uses
from kvferry.types import SlotArray

_PROBATION, _PROTECTED = 1, 2
_PROTECTED_SHARE = 0.8


class Slru:
    """Two queues by last use: newcomers, and what was used again since it came.

    The second has at most four fifths of the slots: what is too much for it goes back to the first,
    as its newest. The first goes before the second. Owns the queues.
    """

    wants_chains = False

    def __init__(self, residents: Residents) -> None:
        self._lists = SlotLists(residents, 3)
        self._uses = Uses(residents)
        self._most_protected = max(1, int(residents.num_slots * _PROTECTED_SHARE))

    def insert(self, slots: SlotArray) -> None:
        self._uses.begin(slots)
        self._lists.push(slots, _PROBATION)

    def use(self, slots: SlotArray) -> None:
        again = self._uses.count(slots)
        again |= self._lists.homes(slots) == _PROTECTED
        self._lists.push(slots[again], _PROTECTED)
        self._lists.push(slots[~again], _PROBATION)
        excess = self._lists.lengths[_PROTECTED] - self._most_protected
        if excess > 0:
            self._lists.push_in_order(self._lists.pop(_PROTECTED, excess), _PROBATION)

    def keep(self, slots: SlotArray) -> None:
        self._lists.push_home(slots)

    def put_back(self, slots: SlotArray) -> None:
        self._lists.put_back(slots)

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        taken = [self._lists.pop(FRONT, count)]
        for at in (_PROBATION, _PROTECTED):
            taken.append(self._lists.pop(at, count - sum(map(len, taken))))
        return np.concatenate(taken)

    def peek(self, count: int) -> SlotArray:
        seen = [self._lists.peek(FRONT, count)]
        for at in (_PROBATION, _PROTECTED):
            seen.append(self._lists.peek(at, count - sum(map(len, seen))))
        return np.concatenate(seen)

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._lists.holds(slots)

    def discard(self, slots: SlotArray) -> None:
        self._lists.discard(slots)

    def clear(self) -> None:
        self._lists.clear()
