"""What is held, against a plain list of wishes; and that a wish never takes a look at everything.

One-line breaks that were tried; each made a test of this module fail.

- ``Pins.add`` tells nothing of what it names, so that its own slots give way
- ``Pins._queue`` is not called for what was truncated, or for what a pin no longer covers
- ``Pins._weakest`` takes part of an entry; ignores ``below``; goes by the highest priority
- no entry is ever thrown away, of what ends or of what gives way
- ``Pins.expire`` looks at firm ends alone
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from kvferry.cache.pins import FOREVER, Pins

SLOTS = 40


@dataclass
class Wish:
    firm: float = 0.0
    soft: float = 0.0
    priority: int = 0
    told: int = 0

    @property
    def is_held(self) -> bool:
        return self.firm > 0 or self.soft > 0

    @property
    def gives_way(self) -> bool:
        return self.soft > 0 and self.firm == 0


class Model:
    """Every slot's wish, by hand; what gave way is judged, not foretold."""

    def __init__(self, most: int) -> None:
        self.holds = Pins(SLOTS, most)
        self.wishes = [Wish() for _ in range(SLOTS)]
        self.told = 0
        self.now = 1.0

    def add(self, slots: list[int], seconds: float, priority: int | None) -> None:
        until = self.now + seconds
        lacking = sum(not self.wishes[s].is_held for s in slots)
        lacking -= self.holds.most - self.holds.count
        could = [s for s in self.weak(priority) if s not in slots]
        came, gone = self.holds.add(np.array(slots, dtype=np.int64), until, self.now, priority)
        self.judge(gone.tolist(), could, lacking)
        self.told += 1
        cut = len(slots)
        room = self.holds.most - sum(wish.is_held for wish in self.wishes)
        for at, slot in enumerate(slots):
            if not self.wishes[slot].is_held:
                room -= 1
                if room < 0:
                    cut = at
                    break
        fresh = [s for s in slots[:cut] if not self.wishes[s].is_held]
        assert came.tolist() == fresh
        for slot in slots[:cut]:
            wish = self.wishes[slot]
            if priority is None:
                wish.firm = max(wish.firm, until)
            else:
                wish.soft = max(wish.soft, until)
                wish.priority = max(wish.priority, priority)
        for slot in slots:
            self.wishes[slot].told = self.told

    def weak(self, below: int | None = None) -> list[int]:
        return [
            slot
            for slot, wish in enumerate(self.wishes)
            if wish.gives_way and (below is None or wish.priority <= below)
        ]

    def judge(self, gone: list[int], could: list[int], wanted: int) -> None:
        """As many as are wanted went if they could, and none before one that matters less."""
        assert len(set(gone)) == len(gone)
        assert set(gone) <= set(could)
        assert len(gone) >= min(len(could), wanted)
        stay = [self.wishes[s] for s in could if s not in gone]
        for slot in gone:
            priority = self.wishes[slot].priority
            assert all(wish.priority >= priority for wish in stay)
        for slot in gone:
            self.wishes[slot] = Wish()

    def give_way(self, count: int) -> None:
        could = self.weak()
        self.judge(self.holds.give_way(count).tolist(), could, count)

    def drop(self, slots: list[int]) -> None:
        self.holds.drop(np.array(slots, dtype=np.int64))
        for slot in slots:
            self.wishes[slot] = Wish()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        ended = []
        for slot, wish in enumerate(self.wishes):
            was_held = wish.is_held
            wish.firm = wish.firm if wish.firm > self.now else 0.0
            wish.soft = wish.soft if wish.soft > self.now else 0.0
            wish.priority = wish.priority if wish.soft else 0
            ended += [slot] if was_held and not wish.is_held else []
        assert self.holds.expire(self.now).tolist() == ended

    def check(self) -> None:
        every = np.arange(SLOTS)
        held = [slot for slot, wish in enumerate(self.wishes) if wish.is_held]
        assert self.holds.all_pinned().tolist() == held
        assert self.holds.count == len(held) <= self.holds.most
        assert self.holds.until(every).tolist() == [max(w.firm, w.soft) for w in self.wishes]
        assert self.holds.firmly(every).tolist() == [w.firm > 0 for w in self.wishes]
        bound = 4 * self.holds.most + 1024 + SLOTS
        assert self.holds._num_queued <= bound
        assert self.holds._num_ending <= bound
        queued = [s for q in self.holds._queues.values() for _, part in q for s in part.tolist()]
        assert len(queued) == self.holds._num_queued
        assert set(self.weak()) <= set(queued), "some would never give way"


@pytest.mark.parametrize("seed", range(30))
def test_wishes_of_all_kinds(seed: int) -> None:
    rng = random.Random(seed)
    model = Model(rng.choice((0, 5, 12, SLOTS)))
    for _ in range(150):
        what = rng.choice(("add", "add", "add", "wait", "drop", "way"))
        slots = rng.sample(range(SLOTS), rng.randint(1, 8))
        if what == "add":
            seconds = rng.choice((0.5, 3.0, 20.0, FOREVER))
            model.add(slots, seconds, rng.choice((None, 36, 50, 50, 100)))
        elif what == "wait":
            model.wait(rng.choice((0.3, 1.0, 10.0)))
        elif what == "drop":
            model.drop(slots[:3])
        else:
            model.give_way(rng.randint(1, 6))
        model.check()


@pytest.mark.parametrize("kinds", [(50,), (None,), (None, 50), (40, 50)])
def test_the_same_wish_again_and_again_takes_no_memory(kinds: tuple[int | None, ...]) -> None:
    holds = Pins(1000, 50)
    slots = np.arange(50)
    for number in range(2000):
        holds.add(slots, 1e9 + number, float(number), kinds[number % len(kinds)])
        assert holds._num_ending <= 4 * 50 + 1024 + 100
        assert holds._num_queued <= 4 * 50 + 1024 + 50
    assert holds.count == 50
    assert holds.expire(1e9 + 1998).tolist() == []
    assert holds.expire(1e9 + 2000).tolist() == list(range(50))


def test_told_together_they_go_together_and_the_oldest_first() -> None:
    holds = Pins(100, 12)
    for number in range(3):
        holds.add(np.arange(4 * number, 4 * number + 4), FOREVER, 0.0, 50)
    holds.add(np.arange(4), FOREVER, 0.0, 50)  # the first is told again
    assert holds.give_way(1).tolist() == [4, 5, 6, 7]
    assert holds.give_way(5).tolist() == [8, 9, 10, 11, 0, 1, 2, 3]


def test_a_wish_that_finds_no_room_looks_at_no_other_slots() -> None:
    """Where all is pinned, or matters more, thousands of wishes cost what they name.

    Seen red with a look at every slot's hold for each of them.
    """
    holds = Pins(1 << 20, 1 << 10)
    holds.add(np.arange(1 << 10), FOREVER, 0.0)
    looks = []

    class Watched(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
            plain = [np.asarray(each) for each in inputs]
            looks.append(max(np.size(each) for each in plain))
            return getattr(ufunc, method)(*plain, **kwargs)

    holds._soft, holds._firm = holds._soft.view(Watched), holds._firm.view(Watched)
    for number in range(50):
        first = 2000 + 10 * number
        came, gave_way = holds.add(np.arange(first, first + 10), 5.0, 0.0, 36)
        assert not len(came)
        assert not len(gave_way)
    assert holds.num_refused == 500
    assert max(looks, default=0) <= 10
