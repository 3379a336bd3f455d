"""What can be asked of a pool's blocks without claiming any."""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.index import Index
from kvferry.keys import Keys
from kvferry.slot_states import SlotState
from kvferry.types import NO_SLOT, Key, SlotArray

_NEWS = 256  # commits remembered for those who ask what is new; a step has fewer
# As plain numbers: numpy takes an IntEnum the long way.
_CACHED, _UNREADY = int(SlotState.CACHED), int(SlotState.UNREADY)


class PoolFind:
    """Which keys have slots, and in which state those are. Owns the index and the states.

    Asking changes nothing; whoever derives from this does.
    """

    def __init__(self, num_slots: int) -> None:
        self.generation = 0
        """Grows whenever blocks become matchable: an unchanged value means no new hits."""
        self._news: deque[npt.NDArray[np.uint64]] = deque(maxlen=_NEWS)
        self._index = Index(num_slots)
        # One more than there are slots: what NO_SLOT names is never cached.
        self._state = np.full(num_slots + 1, _UNREADY, dtype=np.int8)

    def cached(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key, whether its block can be read now."""
        return self._state.take(self._index.find(keys)) == _CACHED

    def known(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key, whether its block is cached or on its way in."""
        return self._index.find(keys) != NO_SLOT

    def state_of(self, key: Key) -> SlotState:
        """What is true of one key's slot; FREE if it has none."""
        slot = self._index.find_one(key)
        return SlotState(self._state.item(slot)) if slot != NO_SLOT else SlotState.FREE

    def is_cached(self, key: Key) -> bool:
        """Whether one key's block can be read now."""
        slot = self._index.find_one(key)
        return slot != NO_SLOT and self._state.item(slot) == _CACHED

    def slot_of(self, key: Key) -> int:
        """Where one key's block is or will be; ``NO_SLOT`` if nowhere."""
        return self._index.find_one(key)

    def news_since(self, generation: int) -> npt.NDArray[np.uint64] | None:
        """The first words of the keys committed after a generation; None if too long ago."""
        count = self.generation - generation
        if count > len(self._news):
            return None
        return np.concatenate([np.empty(0, np.uint64), *islice(reversed(self._news), count)])

    def find(self, keys: Keys) -> SlotArray:
        """The slot of each key whose block is cached or on its way in, ``NO_SLOT`` for others."""
        return self._index.find(keys)

    def are_cached(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether its block can be read now."""
        return self._state.take(slots) == _CACHED

    def find_cached(self, keys: Keys) -> SlotArray:
        """The slot of each key whose block can be read now, ``NO_SLOT`` for the others."""
        found = self._index.find(keys)
        found[self._state.take(found) != _CACHED] = NO_SLOT
        return found

    def leading(self, keys: Keys) -> SlotArray:
        """The slots of the leading keys whose blocks can be read now."""
        found = self._index.find_leading(keys)
        if not len(found):
            return found
        readable = self._state.take(found) == _CACHED
        first = int(readable.argmin())  # of those that cannot be read, if there are any
        return found if readable[first] else found[:first]

    def match(self, keys: Keys) -> int:
        """How many leading keys can be read now."""
        return len(self.leading(keys))
