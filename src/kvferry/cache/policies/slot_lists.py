"""What policies with several queues have in common: the queues, ghosts, and what one use is."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.types import NO_SLOT, SlotArray

_APART = 1.0
"""Seconds from one use to another that counts: a request looks a block up, loads it and stores what
follows it, and that is no sign that another request wants it."""

Queue = OrderedDict[int, None]


class QueuePolicy:
    """A policy with queues of slots, a slot in one at most. Owns the queues and the last uses.

    What a request brings comes in one call, but its authors' rules are for one block after another,
    the end of a request first. So ``take`` decides for each newcomer in turn, as if those before it
    had come in already; one that would have to go again at once is refused.
    """

    def __init__(self, residents: Residents, num_queues: int) -> None:
        self._residents = residents
        self._num_slots = residents.num_slots
        self.queues = [Queue() for _ in range(num_queues)]
        self._in = np.full(self._num_slots, -1, dtype=np.int8)
        self._home = np.zeros(self._num_slots, dtype=np.int8)
        self._front: Queue = Queue()  # put back: they go before all others
        self._last_use = np.full(self._num_slots, -np.inf)
        self._arriving: Arriving | None = None
        self._words: list[int] = []  # of the newcomers that were not decided yet
        self._num_coming = [0] * num_queues
        self._refused = 0

    # -- for each policy to say -----------------------------------------------------------------

    def place(self, word: int) -> int:
        """The queue of a newcomer: it comes in now."""
        raise NotImplementedError

    def admit(self, word: int) -> None:
        """A newcomer will come in for which no other goes."""
        self._num_coming[self.place(word)] += 1

    def used(self, slot: int) -> None:
        """A block that is here was used again."""
        raise NotImplementedError

    def victim(self, word: int | None) -> int | None:
        """The slot that goes for a newcomer, out of its queue; ``NO_SLOT`` for the newcomer itself.

        None where there is none. ``word`` is None where room is made for no block in particular.
        """
        raise NotImplementedError

    def returned(self, slots: SlotArray) -> None:
        """These were taken and stay all the same."""

    # -- the contract ---------------------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        self._last_use[slots] = self._residents.now()
        self._arriving = None
        self._num_coming = [0] * len(self.queues)
        words = self.words_of(slots)
        for slot, word in zip(reversed(slots.tolist()), reversed(words), strict=True):
            self.push(slot, self.place(word))

    def use(self, slots: SlotArray) -> None:
        self._come_back(slots)
        now = self._residents.now()
        counts = now - self._last_use.take(slots) >= _APART
        self._last_use[slots[counts]] = now
        for slot in reversed(slots[counts].tolist()):
            self.used(slot)

    def keep(self, slots: SlotArray) -> None:
        self._come_back(slots)
        for slot in slots.tolist():
            self.push(slot, self._home.item(slot))

    def put_back(self, slots: SlotArray) -> None:
        self._come_back(slots)
        for slot in reversed(slots.tolist()):
            self._out(slot)
            self._front[slot] = None
            self._front.move_to_end(slot, last=False)

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        if arriving is not self._arriving:
            self._arriving = arriving
            missing = (arriving.slots == NO_SLOT).nonzero()[0]
            self._words = arriving.keys.array[missing, 0].tolist()
            self._num_coming = [0] * len(self.queues)
            self._refused = 0
            for _ in range(len(self._words) - count):  # those for which there is room
                self.admit(self._words.pop())
        taken: list[int] = []
        count -= self._refused
        while len(taken) < count:
            if self._front:
                taken.append(self._front.popitem(last=False)[0])
                continue
            word = self._words.pop() if self._words else None
            slot = self.victim(word)
            if slot is None:
                break
            if slot == NO_SLOT:
                self._refused += 1
                count -= 1
            else:
                self._in[slot] = -1
                taken.append(slot)
        return np.array(taken, dtype=np.int64)

    def peek(self, count: int) -> SlotArray:
        found = list(self._front)[:count]
        for queue in self.queues:
            for slot in queue:
                if len(found) >= count:
                    break
                found.append(slot)
        return np.array(found, dtype=np.int64)

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        held = self._in.take(slots) >= 0
        if self._front:
            held |= np.array([slot in self._front for slot in slots.tolist()], dtype=bool)
        return np.asarray(held)

    def discard(self, slots: SlotArray) -> None:
        for slot in slots.tolist():
            self._out(slot)

    def clear(self) -> None:
        for queue in (self._front, *self.queues):
            queue.clear()
        self._in.fill(-1)

    # -- the parts ------------------------------------------------------------------------------

    def push(self, slot: int, to: int) -> None:
        """To the end of a queue, from wherever it is."""
        self._out(slot)
        self.queues[to][slot] = None
        self._in[slot] = self._home[slot] = to

    def pop(self, at: int) -> int:
        """From the front of a queue."""
        slot, _ = self.queues[at].popitem(last=False)
        self._in[slot] = -1
        return slot

    def size(self, at: int) -> int:
        """How many are in a queue, with those that are about to come in."""
        return len(self.queues[at]) + self._num_coming[at]

    def coming(self, to: int) -> None:
        """A newcomer will be in this queue."""
        self._num_coming[to] += 1

    def words_of(self, slots: SlotArray) -> list[int]:
        """The first words of these slots' keys."""
        words: list[int] = self._residents.keys_of(slots).array[:, 0].tolist()
        return words

    def word_of(self, slot: int) -> int:
        return self.words_of(np.array([slot]))[0]

    def home(self, slot: int) -> int:
        """The queue a slot is in, or was in last."""
        return self._home.item(slot)

    def _out(self, slot: int) -> None:
        at = self._in.item(slot)
        if at >= 0:
            del self.queues[at][slot]
            self._in[slot] = -1
        elif self._front:
            self._front.pop(slot, None)

    def _come_back(self, slots: SlotArray) -> None:
        away = slots[~self.holds(slots)]
        if len(away):
            self.returned(away)
            for slot in reversed(away.tolist()):
                self.push(slot, self._home.item(slot))


class Ghosts:
    """Blocks that are gone, the longest gone first, by the first word of their keys."""

    def __init__(self) -> None:
        self._words: Queue = Queue()

    def __len__(self) -> int:
        return len(self._words)

    def __contains__(self, word: object) -> bool:
        return word in self._words

    def add(self, word: int) -> None:
        self._words[word] = None
        self._words.move_to_end(word)

    def remove(self, word: int) -> bool:
        """Whether it was here; it is no longer."""
        there = word in self._words
        self._words.pop(word, None)
        return there

    def trim(self, most: int) -> None:
        """Forget the longest gone until there are so few."""
        while len(self._words) > max(0, most):
            self._words.popitem(last=False)

    def clear(self) -> None:
        self._words.clear()
