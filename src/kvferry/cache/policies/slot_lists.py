"""Base of the eviction policies with several queues: queues, ghosts, and what counts as a use."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.types import NO_SLOT, SlotArray

_APART = 1.0
"""Seconds within which two uses count as one. One request looks a block up, loads it and stores
what follows it; that is no sign that another request wants the block."""
_LOOK = 16
"""Blocks examined at once, from the front of a queue, for one that can be evicted."""

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
        self._last_use = np.full(self._num_slots, -np.inf)
        self._arriving: Arriving | None = None
        self._words: list[int] = []  # key words of the newcomers that are in no queue yet
        self._coming: dict[int, int] = {}  # key word of each newcomer in a queue, by number
        self._planned: OrderedDict[int, int] = OrderedDict()  # queue of a newcomer, by key word
        self._lacking = 0  # slots for newcomers that are neither taken nor refused yet
        self._gone: list[int] = []  # slots and newcomers evicted for the newcomer that arrives now
        self._followers_gone: dict[int, int] = {}  # evicted in this call, by the slot before each

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
            self.push(slot, 0)
            self.queues[0].move_to_end(slot, last=False)

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        if arriving is not self._arriving:
            self._plan()
            self._arriving, self._lacking = arriving, count
            missing = (arriving.slots == NO_SLOT).nonzero()[0]
            self._words = arriving.keys.array[missing, 0].tolist()
            for _ in range(len(self._words) - count):  # newcomers for which there is room
                self._arrive(is_full=False)
        taken: list[int] = []
        self._followers_gone.clear()
        while self._lacking > 0 and len(taken) < count:
            if self._words:
                self._arrive(is_full=True)
            else:
                self.evict()
            if not self._gone:
                break
            number = self._gone.pop()
            self._lacking -= 1
            if number >= 0:
                taken.append(number)
        return np.array(taken, dtype=np.int64)

    def peek(self, count: int) -> SlotArray:
        found = (slot for queue in self.queues for slot in queue if slot >= 0)
        return np.array([*islice(found, max(0, count))], dtype=np.int64)

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return np.array([slot in self._in for slot in slots.tolist()], dtype=bool)

    def discard(self, slots: SlotArray) -> None:
        for slot in slots.tolist():
            self._out(slot)

    def clear(self) -> None:
        for queue in self.queues:
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

    def first(self, *queues: Queue) -> int | None:
        """Return the first block of these queues that can be evicted: none that stays follows it.

        Blocks that cannot be evicted move to the end of their queue: later calls start with others.
        """
        for queue in queues:
            for _ in range(0, len(queue), _LOOK):
                looked = [*islice(queue, _LOOK)]
                found = next(filter(self.can_leave, looked), None)
                if found is not None:
                    return found
                for number in looked:
                    queue.move_to_end(number)
        return None

    def can_leave(self, number: int) -> bool:
        """Return whether all blocks that followed this one are evicted, in this call or before."""
        if number < 0 or self._residents.can_go(number):
            return True
        num_gone = self._followers_gone.get(number)
        if num_gone is None:
            return False
        slot, residents = np.array([number]), self._residents
        is_idle: bool = residents.is_idle(slot).item()
        return is_idle and residents.num_followers_of(slot).item() == num_gone

    def go(self, number: int) -> int:
        """Evict a slot or newcomer; return the first word of its key."""
        word = self.word_of(number)
        self._out(number)
        self._coming.pop(number, None)
        self._gone.append(number)
        if number >= 0:
            parent = self._residents.parents_of(np.array([number])).item()
            self._followers_gone[parent] = self._followers_gone.get(parent, 0) + 1
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
