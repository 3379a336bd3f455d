"""What policies with several queues have in common: the queues, ghosts, and what one use is."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.types import NO_SLOT, SlotArray

_APART = 1.0
"""Seconds from one use to another that counts: a request looks a block up, loads it and stores what
follows it, and that is no sign that another request wants it."""
_LOOK = 16
"""Blocks at the front of a queue that are looked at for one that can go."""

Queue = OrderedDict[int, None]


class QueuePolicy:
    """A policy with queues of slots, a slot in one at most. Owns the queues and the last uses.

    What a request brings comes in one call, but its authors' rules are for one block after another,
    the end of a request first. So ``take`` lets each newcomer come in at once, as a number below
    zero, until the room for all is found; one that goes again meanwhile is refused. Where the
    others belong is remembered until their bytes are there.
    """

    def __init__(self, residents: Residents, num_queues: int) -> None:
        self._residents = residents
        self._num_slots = residents.num_slots
        self.queues = [Queue() for _ in range(num_queues)]
        self._in: dict[int, int] = {}  # the queue of each
        self._home: dict[int, int] = {}  # the queue a slot was in last
        self._last_use = np.full(self._num_slots, -np.inf)
        self._arriving: Arriving | None = None
        self._words: list[int] = []  # of the newcomers that did not come in yet
        self._coming: dict[int, int] = {}  # words of those that did, by their numbers
        self._planned: OrderedDict[int, int] = OrderedDict()  # by word, their queues
        self._lacking = 0  # slots for newcomers that are neither taken nor refused yet
        self._gone: list[int] = []  # for what comes in now
        self._followers_gone: dict[int, int] = {}  # of what is taken now, by the slot before

    # -- for each policy to say -----------------------------------------------------------------

    def arrive(self, word: int, number: int, *, is_full: bool) -> None:
        """A block comes in; another goes for it where it is full."""
        raise NotImplementedError

    def used(self, slot: int) -> None:
        """A block that is here was used again."""
        raise NotImplementedError

    def evict(self) -> None:
        """One goes, if there is any."""
        raise NotImplementedError

    def returned(self, word: int) -> None:
        """This was taken and stays all the same."""

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
            for _ in range(len(self._words) - count):  # those for which there is room
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
        """To the end of a queue, from wherever it is."""
        self._out(number)
        self.queues[to][number] = None
        self._in[number] = to
        if number >= 0:
            self._home[number] = to

    def first(self, *queues: Queue) -> int | None:
        """The first of these queues that can go: no block that stays follows it.

        Where many cannot, they wait at the end of theirs: or each look would be at all of them.
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
        if number < 0 or self._residents.can_go(number):
            return True
        num_gone = self._followers_gone.get(number)
        if num_gone is None:
            return False
        slot, residents = np.array([number]), self._residents
        is_idle: bool = residents.is_idle(slot).item()
        return is_idle and residents.num_followers_of(slot).item() == num_gone

    def go(self, number: int) -> int:
        """This goes. Returns its word."""
        word = self.word_of(number)
        self._out(number)
        self._coming.pop(number, None)
        self._gone.append(number)
        if number >= 0:
            parent = self._residents.parents_of(np.array([number])).item()
            self._followers_gone[parent] = self._followers_gone.get(parent, 0) + 1
        return word

    def word_of(self, number: int) -> int:
        """The first word of a block's key."""
        return self._coming[number] if number < 0 else self._words_of(np.array([number]))[0]

    def _words_of(self, slots: SlotArray) -> list[int]:
        words: list[int] = self._residents.keys_of(slots).array[:, 0].tolist()
        return words

    def _arrive(self, *, is_full: bool) -> None:
        """The next newcomer comes in."""
        number, word = -1 - len(self._words), self._words.pop()
        self._coming[number] = word
        self.arrive(word, number, is_full=is_full)

    def _plan(self) -> None:
        """Of the newcomers nothing is here yet but where they belong."""
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
    """Blocks that are gone, the longest gone first, by the first word of their keys."""

    def add(self, word: int) -> None:
        self[word] = None
        self.move_to_end(word)

    def trim(self, most: int) -> None:
        """Forget the longest gone until there are so few."""
        while len(self) > max(0, most):
            self.popitem(last=False)
