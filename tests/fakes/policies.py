"""Eviction policies that are nothing like LRU, to see what the contract carries."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import Arriving, Residents
from kvferry.cache.slots import as_slots
from kvferry.core.keys import Key
from kvferry.types import NO_SLOT, SlotArray


class Fifo:
    """The oldest request goes first, its end before its beginning; use is nothing to it.

    Goes by keys and time: a block that comes back is as old as when it first came.
    """

    def __init__(self, residents: Residents) -> None:
        self.residents = residents
        self.came: dict[Key, float] = {}
        self.rank: dict[int, tuple[float, ...]] = {}

    def insert(self, slots: SlotArray) -> None:
        now = self.residents.now()
        keys = self.residents.keys_of(slots)
        for position, (slot, key) in enumerate(zip(slots.tolist(), keys, strict=True)):
            self.rank[slot] = (1, self.came.setdefault(key, now), -position)

    def use(self, slots: SlotArray) -> None:
        self.insert(slots)

    def keep(self, slots: SlotArray) -> None:
        self.insert(slots)

    def put_back(self, slots: SlotArray) -> None:
        first = min([rank[1] for rank in self.rank.values() if rank[0] == 0], default=0.0)
        for at, slot in enumerate(slots.tolist()):
            self.rank[slot] = (0, first - len(slots) + at)

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        taken = self.peek(count)
        self.discard(taken)
        return taken

    def peek(self, count: int) -> SlotArray:
        return as_slots(sorted(self.rank, key=lambda slot: self.rank[slot])[: max(0, count)])

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return np.array([slot in self.rank for slot in slots.tolist()], dtype=bool)

    def discard(self, slots: SlotArray) -> None:
        for slot in slots.tolist():
            self.rank.pop(slot, None)

    def clear(self) -> None:
        self.rank.clear()


class Tails(Fifo):
    """A conversation that is picked by chance loses its last block; or the newcomer does.

    So it gives room only by blocks that can go at once, and may refuse.
    """

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents)
        self.chance = Random(7)
        self.refused = 0

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        assert len(arriving.keys) == len(arriving.slots)
        wants = int((arriving.slots == NO_SLOT).sum())
        assert wants >= 1
        if self.chance.random() < 0.2:
            self.refused += 1
            return as_slots(())
        slots = np.array(sorted(self.rank), dtype=np.int64)
        ends = self.residents.num_followers_of(slots) == 0
        slots = slots[ends & self.residents.is_idle(slots)]
        if not len(slots):
            return slots
        slots = as_slots([self.chance.choice(slots.tolist())])[:count]
        self.discard(slots)
        return slots


class Odd(Fifo):
    """Gives too few, too many, and slots that it never had; asks to be asked again."""

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents)
        self.chance = Random(11)
        self.asked_by: Arriving | None = None
        self.given: set[int] = set()

    def insert(self, slots: SlotArray) -> None:
        for slot in slots.tolist():
            self.rank[slot] = (1, self.chance.random())

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        if arriving is not self.asked_by:
            self.asked_by, self.given = arriving, set()
        kind = self.chance.randint(0, 3)
        if kind == 0:  # any slots at all, some of which are free, claimed, or not ready
            every = list(set(range(self.residents.num_slots)) - self.given)
            taken = as_slots(self.chance.sample(every, self.chance.randint(0, len(every))))
        else:
            taken = self.peek((1, count, 3 * count)[kind - 1])
        self.given |= set(taken.tolist())
        self.discard(taken)
        return taken
