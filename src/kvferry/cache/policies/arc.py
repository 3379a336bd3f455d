"""Adaptive replacement: recency and frequency share the slots, as misses say they should.

After Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003).
"""

from __future__ import annotations

from kvferry.cache.policies.contract import Residents
from kvferry.cache.policies.slot_lists import Ghosts, QueuePolicy

_ONCE, _AGAIN = 0, 1


class Arc(QueuePolicy):
    """Blocks used once and blocks used again, each by last use, and the ghosts of both.

    ``target`` is how many slots the first should have: a newcomer that went from the first too
    soon raises it, one that went from the second lowers it. Owns at most as many ghosts as slots.
    """

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents, 2)
        self.target = 0.0
        self._ghosts = (Ghosts(), Ghosts())

    def used(self, slot: int) -> None:
        self.push(slot, _AGAIN)

    def arrive(self, word: int, number: int, *, is_full: bool) -> None:
        once, again = self._ghosts
        was_once, was_frequent = word in once, word in again
        if was_once:
            step = max(1.0, len(again) / len(once))
            self.target = min(float(self._num_slots), self.target + step)
        elif was_frequent:
            step = max(1.0, len(once) / len(again))
            self.target = max(0.0, self.target - step)
        self.returned(word)
        if is_full:
            self._replace(was_frequent=was_frequent)
        self.push(number, _AGAIN if was_once or was_frequent else _ONCE)
        num_once, num_again = map(len, self.queues)
        once.trim(self._num_slots - num_once)
        again.trim(2 * self._num_slots - num_once - num_again - len(once))

    def _replace(self, *, was_frequent: bool) -> None:
        once, again = self.queues
        too_many = len(once) > self.target or (was_frequent and len(once) == self.target)
        at = _ONCE if once and (too_many or not again) else _AGAIN
        number = self.first(self.queues[at], self.queues[_AGAIN - at])
        if number is not None:
            at = self._in[number]
            word = self.go(number)
            if number >= 0:
                self._ghosts[at].add(word)

    def evict(self) -> None:
        self._replace(was_frequent=False)

    def returned(self, word: int) -> None:
        for ghosts in self._ghosts:
            ghosts.pop(word, None)

    def clear(self) -> None:
        super().clear()
        self.target = 0.0
        for ghosts in self._ghosts:
            ghosts.clear()
