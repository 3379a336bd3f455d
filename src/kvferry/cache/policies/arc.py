"""Adaptive replacement: recency and frequency share the slots, as misses say they should.

After Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003).
"""

from __future__ import annotations

from kvferry.cache.policies.contract import Residents
from kvferry.cache.policies.slot_lists import Ghosts, QueuePolicy
from kvferry.types import NO_SLOT, SlotArray

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
        self._known = Ghosts()  # ghosts that are about to come in

    def used(self, slot: int) -> None:
        self.push(slot, _AGAIN)

    def place(self, word: int) -> int:
        to = self._adapt(word)
        self._known.remove(word)
        return to

    def admit(self, word: int) -> None:
        self.coming(self._adapt(word))

    def _adapt(self, word: int) -> int:
        """The queue of a newcomer. If it is a ghost there was too little room where it was."""
        if word in self._known:
            return _AGAIN
        once, again = self._ghosts
        if word in once:
            step = max(1.0, len(again) / len(once))
            self.target = min(float(self._num_slots), self.target + step)
        elif word in again:
            step = max(1.0, len(once) / len(again))
            self.target = max(0.0, self.target - step)
        else:
            return _ONCE
        once.remove(word)
        again.remove(word)
        self._known.add(word)
        self._known.trim(self._num_slots)
        return _AGAIN

    def victim(self, word: int | None) -> int | None:
        was_frequent = word is not None and word in self._ghosts[_AGAIN]
        to = self._adapt(word) if word is not None else None
        num_once = self.size(_ONCE)
        at = _AGAIN
        if num_once and (num_once > self.target or (was_frequent and num_once == self.target)):
            at = _ONCE
        if not self.size(at):
            at = 1 - at
        if to is not None:
            self.coming(to)
        if not self.queues[at]:
            if not self._num_coming[at]:
                return None
            self._num_coming[at] -= 1  # all that is in it is about to come: its own end goes
            return NO_SLOT
        slot = self.pop(at)
        once, again = self._ghosts
        self._ghosts[at].add(self.word_of(slot))
        once.trim(self._num_slots - self.size(_ONCE))
        held = self.size(_ONCE) + self.size(_AGAIN)
        again.trim(2 * self._num_slots - held - len(once))
        return slot

    def returned(self, slots: SlotArray) -> None:
        for word in self.words_of(slots):
            for ghosts in self._ghosts:
                ghosts.remove(word)

    def clear(self) -> None:
        super().clear()
        self.target = 0.0
        for ghosts in (*self._ghosts, self._known):
            ghosts.clear()
