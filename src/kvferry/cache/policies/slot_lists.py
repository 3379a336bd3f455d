"""Several queues over the same slots, a slot in one of them at most, and keys of evicted blocks.

The parts of policies that have more than one queue.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.cache.policies.lru import Lru
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

FRONT = 0
"""The list of what was put back: it goes before everything else."""

_NONE = -1
_NOBODY = Arriving(Keys.empty(), NO_SLOTS, NO_SLOT, chained=False)


class SlotLists:
    """Queues of slots by number, the first of them ``FRONT``. Owns their order and their lengths.

    A slot that is in none has a home all the same: the list it was in last.
    """

    def __init__(self, residents: Residents, num_lists: int) -> None:
        self._queues = [Lru(residents) for _ in range(num_lists)]
        self._list = np.full(residents.num_slots, _NONE, dtype=np.int8)
        self._home = np.full(residents.num_slots, 1, dtype=np.int8)
        self.lengths = [0] * num_lists

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return self._list.take(slots) != _NONE

    def homes(self, slots: SlotArray) -> npt.NDArray[np.int8]:
        """The list that each belongs to: the one it is in, or was before it was put back."""
        return self._home.take(slots)

    def push(self, slots: SlotArray, to: int) -> None:
        """To the end of a list, from wherever they are; the last of them goes first."""
        self._enter(slots, to)
        self._queues[to].use(slots)

    def push_in_order(self, slots: SlotArray, to: int) -> None:
        """The same, and the first of them goes first."""
        self._enter(slots, to)
        self._queues[to].keep(slots)

    def push_home(self, slots: SlotArray) -> None:
        """Each to the end of the list it belongs to; the first of them goes first."""
        homes = self.homes(slots)
        for to in np.unique(homes).tolist():
            self.push_in_order(slots[homes == to], to)

    def put_back(self, slots: SlotArray) -> None:
        """Before everything else, in this order; where they belong does not change."""
        homes = self.homes(slots)
        self._enter(slots, FRONT)
        self._home[slots] = homes
        self._queues[FRONT].put_back(slots)

    def pop(self, at: int, count: int) -> SlotArray:
        """Up to ``count`` from the front of a list, which are in none from now on."""
        slots = self._queues[at].take(min(count, self.lengths[at]), _NOBODY)
        self._list[slots] = _NONE
        self.lengths[at] -= len(slots)
        return slots

    def peek(self, at: int, count: int) -> SlotArray:
        return self._queues[at].peek(min(count, self.lengths[at]))

    def discard(self, slots: SlotArray) -> None:
        lists = self._list.take(slots)
        for at in np.unique(lists[lists != _NONE]).tolist():
            leaving = slots[lists == at]
            self._queues[at].discard(leaving)
            self.lengths[at] -= len(leaving)
        self._list[slots] = _NONE

    def clear(self) -> None:
        for queue in self._queues:
            queue.clear()
        self._list.fill(_NONE)
        self.lengths = [0] * len(self._queues)

    def _enter(self, slots: SlotArray, to: int) -> None:
        lists = self._list.take(slots)
        elsewhere = slots[(lists != to) & (lists != _NONE)]
        if len(elsewhere):
            self.discard(elsewhere)
        self.lengths[to] += len(slots) - int(np.count_nonzero(lists == to))
        self._list[slots] = to
        self._home[slots] = to


class GhostList:
    """Blocks that are gone, the longest gone first, by the first word of their keys.

    Owns no more than the last :meth:`trim` allowed.
    """

    def __init__(self) -> None:
        self._words: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._words)

    def __contains__(self, word: int) -> bool:
        return word in self._words

    def add(self, words: list[int]) -> None:
        """These are gone, the first of them first."""
        for word in words:
            self._words.pop(word, None)
            self._words[word] = None

    def remove(self, words: list[int]) -> None:
        """These are back, or never went."""
        for word in words:
            self._words.pop(word, None)

    def trim(self, most: int) -> None:
        """Forget the longest gone until there are so few."""
        while len(self._words) > max(0, most):
            self._words.popitem(last=False)

    def clear(self) -> None:
        self._words.clear()


class Uses:
    """Tells one use of a block from the next: what one request does within a moment is one use.

    A request looks a block up, loads it and stores what follows it: three calls, and no sign that
    another request wants it. Owns a time for each slot.
    """

    APART = 1.0
    """Seconds from one use to another that counts."""

    def __init__(self, residents: Residents) -> None:
        self._now = residents.now
        self._last = np.zeros(residents.num_slots, dtype=np.float64)

    def begin(self, slots: SlotArray) -> None:
        """These have come, which is their first use."""
        self._last[slots] = self._now()

    def count(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each of these, which are used, whether that is another use than the last."""
        now = self._now()
        counts = now - self._last.take(slots) >= self.APART
        self._last[slots[counts]] = now
        return counts


def words_of(residents: Residents, slots: SlotArray) -> list[int]:
    """The first words of these slots' keys."""
    words: list[int] = residents.keys_of(slots).array[:, 0].tolist()
    return words
