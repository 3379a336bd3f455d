"""S3-FIFO: three queues in order of arrival; a small one sifts out what comes only once.

After Yang and others, "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023), for whole
batches: room is made for all newcomers of a call at once, then they come in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.cache.policies.slot_lists import FRONT, GhostList, SlotLists, Uses, words_of
from kvferry.types import SlotArray

_SMALL, _MAIN = 1, 2
_SMALL_SHARE = 0.1
_MOST_USES = 3
_PROMOTE_AFTER = 2
"""Uses since it came that bring a block from the small queue to the main one."""
_LOOK, _LEAST_LOOK = 4, 256


class S3Fifo:
    """A small queue for newcomers, a main one for what was used, ghosts of what left the small one.

    Who comes back as a ghost goes to the main queue at once. At the front of the main queue a block
    that was used goes to its end again, once for each use, of which three are counted. Owns the
    queues, the counts, and at most nine ghosts for ten slots.
    """

    wants_chains = False

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._lists = SlotLists(residents, 3)
        self._uses = Uses(residents)
        self._num_uses = np.zeros(residents.num_slots, dtype=np.int8)
        self._most_small = max(1, int(residents.num_slots * _SMALL_SHARE))
        self._ghosts = GhostList()

    def insert(self, slots: SlotArray) -> None:
        self._uses.begin(slots)
        self._num_uses[slots] = 0
        words = words_of(self._residents, slots)
        known = np.array([word in self._ghosts for word in words], dtype=bool)
        self._ghosts.remove(words)
        self._lists.push(slots[known], _MAIN)
        self._lists.push(slots[~known], _SMALL)
        self._ghosts.trim(self._residents.num_slots - self._most_small)

    def use(self, slots: SlotArray) -> None:
        self._return(slots)
        again = slots[self._uses.count(slots)]
        self._num_uses[again] = np.minimum(self._num_uses.take(again) + 1, _MOST_USES)
        away = slots[~self._lists.holds(slots)]
        if len(away):  # claimed when it was taken: it lost its place
            self._lists.push_home(away[::-1])

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
            self._ghosts.remove(words_of(self._residents, away))

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        front = self._lists.pop(FRONT, count)
        self._mourn(front[self._lists.homes(front) == _SMALL])
        taken, missing = [front], count - len(front)
        while missing > 0 and any(self._lists.lengths):
            excess = self._lists.lengths[_SMALL] - self._most_small + 1
            if excess > 0:
                going = self._from_small(min(missing, excess))
            elif self._lists.lengths[_MAIN]:
                going = self._from_main(missing)
            else:
                going = self._last_of_small(missing)
            taken.append(going)
            missing -= len(going)
        return np.concatenate(taken)

    def _from_small(self, count: int) -> SlotArray:
        slots = self._lists.pop(_SMALL, count)
        used = self._num_uses.take(slots) >= _PROMOTE_AFTER
        promoted = slots[used]
        self._num_uses[promoted] = 0
        self._lists.push_in_order(promoted, _MAIN)
        self._mourn(slots[~used])
        return slots[~used]

    def _from_main(self, count: int) -> SlotArray:
        slots = self._lists.pop(_MAIN, count)
        used = self._num_uses.take(slots) > 0
        again = slots[used]
        self._num_uses[again] -= 1
        self._lists.push_in_order(again, _MAIN)
        return slots[~used]

    def _last_of_small(self, count: int) -> SlotArray:
        """With an empty main queue what is promoted goes next, so all go in turn."""
        slots = self._lists.pop(_SMALL, count)
        self._mourn(slots[self._num_uses.take(slots) < _PROMOTE_AFTER])
        return slots

    def _mourn(self, slots: SlotArray) -> None:
        self._ghosts.add(words_of(self._residents, slots))

    def peek(self, count: int) -> SlotArray:
        look = max(_LOOK * count, _LEAST_LOOK)  # all of a large pool would take too long
        front = self._lists.peek(FRONT, count)
        small, main = self._lists.peek(_SMALL, look), self._lists.peek(_MAIN, look)
        excess = max(0, self._lists.lengths[_SMALL] - self._most_small + 1)
        first, rest = small[:excess], small[excess:]
        promoted = self._num_uses.take(first) >= _PROMOTE_AFTER
        laps = np.zeros(len(main) + int(np.count_nonzero(promoted)), dtype=np.int8)
        laps[: len(main)] = self._num_uses.take(main)
        main = np.concatenate((main, first[promoted]))[np.argsort(laps, kind="stable")]
        return np.concatenate((front, first[~promoted], main, rest))[:count]

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._lists.holds(slots)

    def discard(self, slots: SlotArray) -> None:
        self._lists.discard(slots)

    def clear(self) -> None:
        self._lists.clear()
        self._num_uses.fill(0)
        self._ghosts.clear()
