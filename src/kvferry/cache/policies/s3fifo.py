"""S3-FIFO: three queues in order of arrival; a small one sifts out what comes only once.

After Yang and others, "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023).
"""

from __future__ import annotations

from kvferry.cache.policies.contract import Residents
from kvferry.cache.policies.slot_lists import Ghosts, QueuePolicy
from kvferry.types import SlotArray

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
        self._num_uses: dict[int, int] = {}
        self._most_small = max(1, int(self._num_slots * _SMALL_SHARE))
        self._ghosts = Ghosts()

    def used(self, slot: int) -> None:
        self._num_uses[slot] = min(_MOST_USES, self._num_uses.get(slot, 0) + 1)

    def go(self, number: int) -> int:
        self._num_uses.pop(number, None)
        return super().go(number)

    def arrive(self, word: int, number: int, *, is_full: bool) -> None:
        if is_full:
            self.evict()
        to = _MAIN if word in self._ghosts else _SMALL
        self.returned(word)
        self.push(number, to)

    def can_leave(self, number: int) -> bool:
        least = _PROMOTE_AFTER if self._in[number] == _SMALL else 1
        return self._num_uses.get(number, 0) >= least or super().can_leave(number)

    def evict(self) -> None:
        small, main = self.queues
        while True:
            order = (small, main) if len(small) >= self._most_small else (main, small)
            number = self.first(*order)
            if number is None:
                return
            num_uses = self._num_uses.pop(number, 0)
            if self._in[number] == _MAIN and num_uses:
                self._num_uses[number] = num_uses - 1
            elif num_uses < _PROMOTE_AFTER:
                is_ghost = self._in[number] == _SMALL and number >= 0
                word = self.go(number)
                if is_ghost:
                    self._ghosts.add(word)
                    self._ghosts.trim(self._num_slots - self._most_small)
                return
            self.push(number, _MAIN)

    def returned(self, word: int) -> None:
        self._ghosts.pop(word, None)

    def discard(self, slots: SlotArray) -> None:
        super().discard(slots)
        for slot in slots.tolist():
            self._num_uses.pop(slot, None)

    def clear(self) -> None:
        super().clear()
        self._num_uses.clear()
        self._ghosts.clear()
