"""Adaptive replacement: recency and frequency share the slots, as misses say they should.

After Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), for
whole batches: room is made for all newcomers of a call at once, then they come in.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.cache.policies.slot_lists import FRONT, GhostList, SlotLists, Uses, words_of
from kvferry.types import SlotArray

_ONCE, _AGAIN = 1, 2


class Arc:
    """Blocks used once and blocks used again, each by last use, and the ghosts of both.

    ``target`` is how many slots the first should have: a newcomer that went from the first too
    soon raises it, one that went from the second lowers it. Owns the queues and at most as many
    ghosts as slots.
    """

    wants_chains = False

    def __init__(self, residents: Residents) -> None:
        self.target = 0.0
        self._residents = residents
        self._lists = SlotLists(residents, 3)
        self._uses = Uses(residents)
        self._gone_once, self._gone_again = GhostList(), GhostList()

    def insert(self, slots: SlotArray) -> None:
        self._uses.begin(slots)
        words = words_of(self._residents, slots)
        known = np.array([self._adapt(word) for word in words], dtype=bool)
        self._lists.push(slots[known], _AGAIN)
        self._lists.push(slots[~known], _ONCE)
        self._trim()

    def _adapt(self, word: int) -> bool:
        """Whether a newcomer was here before; if so, there was too little room where it was."""
        once, again = self._gone_once, self._gone_again
        if word in once:
            step = max(1.0, len(again) / len(once))
            self.target = min(float(self._residents.num_slots), self.target + step)
            once.remove([word])
            return True
        if word in again:
            step = max(1.0, len(once) / len(again))
            self.target = max(0.0, self.target - step)
            again.remove([word])
            return True
        return False

    def _trim(self) -> None:
        slots = self._residents.num_slots
        lengths = self._lists.lengths
        self._gone_once.trim(slots - lengths[_ONCE])
        self._gone_again.trim(2 * slots - sum(lengths) - len(self._gone_once))

    def use(self, slots: SlotArray) -> None:
        self._return(slots)
        again = self._uses.count(slots)
        again |= self._lists.homes(slots) == _AGAIN
        self._lists.push(slots[again], _AGAIN)
        self._lists.push(slots[~again], _ONCE)

    def keep(self, slots: SlotArray) -> None:
        self._return(slots)
        self._lists.push_home(slots)

    def put_back(self, slots: SlotArray) -> None:
        self._return(slots)
        self._lists.put_back(slots)

    def _return(self, slots: SlotArray) -> None:
        """What was taken and is still here is no ghost."""
        away = slots[~self._lists.holds(slots)]
        if len(away):
            words = words_of(self._residents, away)
            self._gone_once.remove(words)
            self._gone_again.remove(words)

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        self._trim()
        front = self._lists.pop(FRONT, count)
        homes = self._lists.homes(front)
        first, second, rest = self._split(count - len(front))
        once, again = self._lists.pop(_ONCE, first + rest), self._lists.pop(_AGAIN, second)
        self._gone_once.add(words_of(self._residents, front[homes == _ONCE]))
        self._gone_again.add(words_of(self._residents, front[homes == _AGAIN]))
        self._gone_once.add(words_of(self._residents, once))
        self._gone_again.add(words_of(self._residents, again))
        return np.concatenate((front, once[:first], again, once[first:]))

    def _split(self, count: int) -> tuple[int, int, int]:
        """How many of ``count`` go: from the first while it has more than its target, from the
        second, and from the first again where the second has no more.
        """
        num_once, num_again = self._lists.lengths[_ONCE], self._lists.lengths[_AGAIN]
        first = min(count, num_once, max(0, math.ceil(num_once - self.target)))
        second = min(count - first, num_again)
        return first, second, min(num_once - first, count - first - second)

    def peek(self, count: int) -> SlotArray:
        front = self._lists.peek(FRONT, count)
        first, second, rest = self._split(count - len(front))
        once, again = self._lists.peek(_ONCE, first + rest), self._lists.peek(_AGAIN, second)
        return np.concatenate((front, once[:first], again, once[first:]))

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._lists.holds(slots)

    def discard(self, slots: SlotArray) -> None:
        self._lists.discard(slots)

    def clear(self) -> None:
        self._lists.clear()
        self._gone_once.clear()
        self._gone_again.clear()
        self.target = 0.0
