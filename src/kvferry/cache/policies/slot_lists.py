"""Base of the eviction policies with several queues: queues, ghosts, and what counts as a use."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.types import NO_SLOT, SlotArray

_APART = 1.0
"""Seconds within which two uses count as one. One request looks a block up, loads it and stores
what follows it; that is no sign that another request wants the block."""

Queue = OrderedDict[int, None]


class QueuePolicy:
    """A policy with queues of slots, a slot in at most one. Owns the queues and the last uses.

    A request's new blocks arrive in one call, but the published rules take one block at a time,
    here the request's last block first. So ``take`` adds each newcomer to a queue at once, under a
    negative number, until there is room for all. A newcomer evicted meanwhile is refused. The
    queues of the others are remembered until ``insert``.
    """

    def __init__(self, residents: Residents, num_queues: int) -> None:
        self._residents = residents
        self._num_slots = residents.num_slots
        self.queues = [Queue() for _ in range(num_queues)]
        self._in: dict[int, int] = {}  # the queue of each slot or newcomer
        self._home: dict[int, int] = {}  # the queue a slot was in last
        self._front: Queue = Queue()  # slots put back, which are evicted before all others
        self._last_use = np.full(self._num_slots, -np.inf)
        self._arriving: Arriving | None = None
        self._words: list[int] = []  # key words of the newcomers that are in no queue yet
        self._coming: dict[int, int] = {}  # key word of each newcomer in a queue, by number
        self._planned: OrderedDict[int, int] = OrderedDict()  # queue of a newcomer, by key word
        self._refused = 0
        self._gone: list[int] = []  # slots and newcomers evicted for the newcomer that arrives now

    # -- for each policy to implement -----------------------------------------------------------

    def arrive(self, word: int, number: int, *, is_full: bool) -> None:
        """Add a block to a queue; evict another for it if the pool ``is_full``."""
        raise NotImplementedError

    def used(self, slot: int) -> None:
        """Note that a cached block was used again."""
        raise NotImplementedError

    def evict(self) -> None:
        """Evict one block, if there is any."""
        raise NotImplementedError

    def returned(self, word: int) -> None:
        """Note that a block taken for eviction stays in the cache."""

    # -- the contract ---------------------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        self._last_use[slots] = self._residents.now()
        self._plan()
        for slot, word in zip(
            reversed(slots.tolist()), reversed(self._words_of(slots)), strict=True
        ):
            self._out(slot)
            if word in self._planned:
                self.push(slot, self._planned.pop(word))
            else:
                self.arrive(word, slot, is_full=False)

    def use(self, slots: SlotArray) -> None:
        self._come_back(slots)
        now = self._residents.now()
        counts = now - self._last_use.take(slots) >= _APART
        self._last_use[slots[counts]] = now
        for slot in reversed(slots[counts].tolist()):
            if slot in self._in:
                self.used(slot)

    def keep(self, slots: SlotArray) -> None:
        self._come_back(slots)
        for slot in slots.tolist():
            self.push(slot, self._home[slot])

    def put_back(self, slots: SlotArray) -> None:
        self._come_back(slots)
        for slot in reversed(slots.tolist()):
            self._out(slot)
            self._front[slot] = None
            self._front.move_to_end(slot, last=False)

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        if arriving is not self._arriving:
            self._plan()
            self._arriving, self._refused = arriving, 0
            missing = (arriving.slots == NO_SLOT).nonzero()[0]
            self._words = arriving.keys.array[missing, 0].tolist()
            for _ in range(len(self._words) - count):  # newcomers for which there is room
                self._arrive(is_full=False)
        taken: list[int] = []
        count -= self._refused
        while len(taken) < count:
            if self._front:
                taken.append(self._front.popitem(last=False)[0])
                continue
            if self._words:
                self._arrive(is_full=True)
            else:
                self.evict()
            if not self._gone:
                break
            number = self._gone.pop()
            if number < 0:
                self._refused += 1
                count -= 1
            else:
                taken.append(number)
        return np.array(taken, dtype=np.int64)

    def peek(self, count: int) -> SlotArray:
        found = [*self._front, *(slot for queue in self.queues for slot in queue if slot >= 0)]
        return np.array(found[: max(0, count)], dtype=np.int64)

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        held = [slot in self._in or slot in self._front for slot in slots.tolist()]
        return np.array(held, dtype=bool)

    def discard(self, slots: SlotArray) -> None:
        for slot in slots.tolist():
            self._out(slot)

    def clear(self) -> None:
        for queue in (self._front, *self.queues):
            queue.clear()
        for noted in (self._in, self._coming, self._planned):
            noted.clear()
        self._arriving = None

    # -- the parts ------------------------------------------------------------------------------

    def push(self, number: int, to: int) -> None:
        """Move a slot or newcomer to the end of the queue ``to``."""
        self._out(number)
        self.queues[to][number] = None
        self._in[number] = to
        if number >= 0:
            self._home[number] = to

    def go(self, number: int) -> int:
        """Evict a slot or newcomer; return the first word of its key."""
        word = self.word_of(number)
        self._out(number)
        self._coming.pop(number, None)
        self._gone.append(number)
        return word

    def word_of(self, number: int) -> int:
        """Return the first word of a block's key."""
        return self._coming[number] if number < 0 else self._words_of(np.array([number]))[0]

    def _words_of(self, slots: SlotArray) -> list[int]:
        words: list[int] = self._residents.keys_of(slots).array[:, 0].tolist()
        return words

    def _arrive(self, *, is_full: bool) -> None:
        """Add the next newcomer to a queue."""
        number, word = -1 - len(self._words), self._words.pop()
        self._coming[number] = word
        self.arrive(word, number, is_full=is_full)

    def _plan(self) -> None:
        """Take the newcomers out of the queues, and remember which queue each belongs to."""
        for number, word in self._coming.items():
            self._planned[word] = self._in[number]
            self._out(number)
        while len(self._planned) > self._num_slots:
            self._planned.popitem(last=False)
        self._coming.clear()
        self._arriving = None

    def _out(self, number: int) -> None:
        at = self._in.pop(number, None)
        if at is not None:
            del self.queues[at][number]
        elif self._front:
            self._front.pop(number, None)

    def _come_back(self, slots: SlotArray) -> None:
        away = slots[~self.holds(slots)]
        for slot, word in zip(reversed(away.tolist()), reversed(self._words_of(away)), strict=True):
            self.returned(word)
            self.push(slot, self._home.get(slot, 0))


class Ghosts(Queue):
    """Evicted blocks by the first word of their keys, the first evicted first."""

    def add(self, word: int) -> None:
        self[word] = None
        self.move_to_end(word)

    def trim(self, most: int) -> None:
        """Forget the first evicted until at most ``most`` are left."""
        while len(self) > max(0, most):
            self.popitem(last=False)
