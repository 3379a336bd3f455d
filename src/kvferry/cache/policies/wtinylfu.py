"""W-TinyLFU: a newcomer stays if it was asked for more often than what would go for it.

After Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy" (ACM
Transactions on Storage 2017): a small window by last use, then a main part in two segments.
"""

from __future__ import annotations

from kvferry.cache.policies.contract import Residents
from kvferry.cache.policies.slot_lists import QueuePolicy
from kvferry.core.keys import Keys
from kvferry.types import SlotArray

_PROBATION, _PROTECTED, _WINDOW = 0, 1, 2
_WINDOW_SHARE, _PROTECTED_SHARE = 0.01, 0.8
_SAMPLE = 10
"""Blocks asked for, as a multiple of the slots, after which all counts are halved."""


class WTinyLfu(QueuePolicy):
    """Owns the window, both segments, and how often blocks were asked for lately."""

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents, 3)
        self._most_window = max(1, int(self._num_slots * _WINDOW_SHARE))
        main = max(1, self._num_slots - self._most_window)
        self._most_protected = max(1, int(main * _PROTECTED_SHARE))
        self._counts: dict[int, int] = {}
        self._num_counted = 0

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        counts = self._counts
        for word in keys.array[:, 0].tolist():
            counts[word] = counts.get(word, 0) + 1
        self._num_counted += len(keys)
        if self._num_counted >= _SAMPLE * self._num_slots:
            self._num_counted //= 2
            self._counts = {word: num // 2 for word, num in counts.items() if num > 1}

    def used(self, slot: int) -> None:
        self.push(slot, _WINDOW if self._in[slot] == _WINDOW else _PROTECTED)
        if len(self.queues[_PROTECTED]) > self._most_protected:
            self.push(next(iter(self.queues[_PROTECTED])), _PROBATION)

    def arrive(self, word: int, number: int, *, is_full: bool) -> None:
        window = self.queues[_WINDOW]
        self.push(number, _WINDOW)
        if is_full:
            self.evict()
        while len(window) > self._most_window:
            self.push(next(iter(window)), _PROBATION)

    def evict(self) -> None:
        *main, window = self.queues
        rival, candidate = self.first(*main), None
        if rival is None or len(window) > self._most_window:
            candidate = self.first(window)
        if candidate is None:
            candidate = rival
        elif rival is not None and self._count(candidate) > self._count(rival):
            self.push(candidate, _PROBATION)
            candidate = rival
        if candidate is not None:
            self.go(candidate)

    def _count(self, number: int) -> int:
        return self._counts.get(self.word_of(number), 0)
