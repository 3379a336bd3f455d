"""W-TinyLFU: a newcomer stays if it was asked for more often than what would go for it.

After Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy" (ACM
Transactions on Storage 2017): a small window by last use, then a main part in two segments.
"""

from __future__ import annotations

from kvferry.cache.policies.contract import Residents
from kvferry.cache.policies.slot_lists import QueuePolicy
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOT, SlotArray

_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2
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
        self._admitted: dict[int, None] = {}
        self._window: list[int] = []  # newcomers that are about to come into the window

    def asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        counts = self._counts
        for word in keys.array[:, 0].tolist():
            counts[word] = counts.get(word, 0) + 1
        self._num_counted += len(keys)
        if self._num_counted >= _SAMPLE * self._num_slots:
            self._num_counted //= 2
            self._counts = {word: num // 2 for word, num in counts.items() if num > 1}

    def used(self, slot: int) -> None:
        home = self.home(slot)
        self.push(slot, _WINDOW if home == _WINDOW else _PROTECTED)
        if len(self.queues[_PROTECTED]) > self._most_protected:
            self.push(self.pop(_PROTECTED), _PROBATION)

    def insert(self, slots: SlotArray) -> None:
        super().insert(slots)
        self._window.clear()
        while len(self.queues[_WINDOW]) > self._most_window:  # there was room for all
            self.push(self.pop(_WINDOW), _PROBATION)

    def place(self, word: int) -> int:
        if word in self._admitted:
            del self._admitted[word]
            return _PROBATION
        return _WINDOW

    def admit(self, word: int) -> None:
        self._window.append(word)
        if len(self.queues[_WINDOW]) + len(self._window) > self._most_window:
            if self.queues[_WINDOW]:
                self.push(next(iter(self.queues[_WINDOW])), _PROBATION)
            else:
                self._admitted[self._window.pop(0)] = None

    def victim(self, word: int | None) -> int | None:
        window, probation, protected = self.queues
        main = probation or protected
        if word is not None:
            if len(window) + len(self._window) < self._most_window and main:
                self._window.append(word)
                return self.pop(_PROBATION if probation else _PROTECTED)
            self._window.append(word)
        if not window and not self._window:
            return self.pop(_PROBATION if probation else _PROTECTED) if main else None
        oldest = next(iter(window), None)
        candidate = self._window[0] if oldest is None else self.word_of(oldest)
        if main:
            at = _PROBATION if probation else _PROTECTED
            rival = next(iter(main))
            if self._counts.get(candidate, 0) > self._counts.get(self.word_of(rival), 0):
                if oldest is None:
                    self._admitted[self._window.pop(0)] = None
                else:
                    self.push(oldest, _PROBATION)
                return self.pop(at)
        if oldest is not None:
            return self.pop(_WINDOW)
        self._window.pop(0)
        return NO_SLOT

    def clear(self) -> None:
        super().clear()
        self._admitted.clear()
        self._window.clear()
