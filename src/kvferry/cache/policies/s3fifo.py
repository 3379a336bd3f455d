"""S3-FIFO: three queues in order of arrival; a small one sifts out what comes only once.

After Yang and others, "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023).
"""

from __future__ import annotations

import numpy as np

from kvferry.cache.policies.contract import Residents
from kvferry.cache.policies.slot_lists import Ghosts, QueuePolicy
from kvferry.types import NO_SLOT, SlotArray

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
_MOST_USES = 3
_PROMOTE_AFTER = 2
"""Uses since it came that bring a block from the small queue to the main one."""


class S3Fifo(QueuePolicy):
    """A small queue for newcomers, a main one for what was used, ghosts of what left the small one.

    A block that comes back as a ghost goes to the main queue at once. At the front of the main
    queue a block that was used goes to its end again, once for each use; three are counted.
    """

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents, 2)
        self._num_uses = np.zeros(self._num_slots, dtype=np.int8)
        self._most_small = max(1, int(self._num_slots * _SMALL_SHARE))
        self._ghosts = Ghosts()

    def used(self, slot: int) -> None:
        self._num_uses[slot] = min(_MOST_USES, self._num_uses.item(slot) + 1)

    def insert(self, slots: SlotArray) -> None:
        self._num_uses[slots] = 0
        super().insert(slots)

    def place(self, word: int) -> int:
        return _MAIN if self._ghosts.remove(word) else _SMALL

    def admit(self, word: int) -> None:
        self.coming(_MAIN if word in self._ghosts else _SMALL)

    def victim(self, word: int | None) -> int | None:
        slot = self._evicted()
        if word is not None and slot is not None:
            self.admit(word)
        return slot

    def _evicted(self) -> int | None:
        small, main = self.queues
        while small or main or self._num_coming[_SMALL]:
            if self.size(_SMALL) < self._most_small and main:
                slot = self.pop(_MAIN)
                if not self._num_uses.item(slot):
                    return slot
                self._num_uses[slot] -= 1
                self.push(slot, _MAIN)
            elif small:
                slot = self.pop(_SMALL)
                if self._num_uses.item(slot) < _PROMOTE_AFTER:
                    self._ghosts.add(self.word_of(slot))
                    self._ghosts.trim(self._num_slots - self._most_small)
                    return slot
                self._num_uses[slot] = 0
                self.push(slot, _MAIN)
            elif self._num_coming[_SMALL]:
                self._num_coming[_SMALL] -= 1
                return NO_SLOT
        return None

    def returned(self, slots: SlotArray) -> None:
        for word in self.words_of(slots):
            self._ghosts.remove(word)

    def clear(self) -> None:
        super().clear()
        self._num_uses.fill(0)
        self._ghosts.clear()
