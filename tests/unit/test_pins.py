"""Pins against a plain list of calls; and no call looks at all slots.

One-line breaks that were tried; each made a test of this module fail.

- ``Pins.add`` tells nothing of what it names, so that its own slots give way
- ``Pins._rank`` is not called for what was truncated, or for what a pin no longer covers
- ``Pins._weakest`` ignores ``below``; goes by the highest priority; takes the beginning first
- no entry of what ends is ever thrown away
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
class Call:
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
    """Every slot's call, by hand; what gave way is judged, not foretold."""

    def __init__(self, most: int) -> None:
        self.pins = Pins(SLOTS, most)
        self.calls = [Call() for _ in range(SLOTS)]
        self.told = 0
        self.now = 1.0

    def add(self, slots: list[int], seconds: float, priority: int | None) -> None:
        until = self.now + seconds
        lacking = sum(not self.calls[s].is_held for s in slots)
        lacking -= self.pins.most - self.pins.count
        could = [s for s in self.weak(priority) if s not in slots]
        came, gone = self.pins.add(np.array(slots, dtype=np.int64), until, self.now, priority)
        self.judge(gone.tolist(), could, lacking)
        self.told += 1
        cut = len(slots)
        room = self.pins.most - sum(call.is_held for call in self.calls)
        for at, slot in enumerate(slots):
            if not self.calls[slot].is_held:
                room -= 1
                if room < 0:
                    cut = at
                    break
        fresh = [s for s in slots[:cut] if not self.calls[s].is_held]
        assert came.tolist() == fresh
        for slot in slots[:cut]:
            call = self.calls[slot]
            if priority is None:
                call.firm = max(call.firm, until)
            else:
                call.soft = max(call.soft, until)
                call.priority = max(call.priority, priority)
        for slot in slots:
            self.calls[slot].told = self.told

    def weak(self, below: int | None = None) -> list[int]:
        return [
            slot
            for slot, call in enumerate(self.calls)
            if call.gives_way and (below is None or call.priority <= below)
        ]

    def judge(self, gone: list[int], could: list[int], wanted: int) -> None:
        """As many as are wanted went if they could, and none before one that matters less."""
        assert len(set(gone)) == len(gone)
        assert set(gone) <= set(could)
        assert len(gone) >= min(len(could), wanted)
        stay = [self.calls[s] for s in could if s not in gone]
        for slot in gone:
            priority = self.calls[slot].priority
            assert all(call.priority >= priority for call in stay)
        for slot in gone:
            self.calls[slot] = Call()

    def give_way(self, count: int) -> None:
        could = self.weak()
        self.judge(self.pins.give_way(count).tolist(), could, count)

    def drop(self, slots: list[int]) -> None:
        self.pins.drop(np.array(slots, dtype=np.int64))
        for slot in slots:
            self.calls[slot] = Call()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        ended = []
        for slot, call in enumerate(self.calls):
            was_held = call.is_held
            call.firm = call.firm if call.firm > self.now else 0.0
            call.soft = call.soft if call.soft > self.now else 0.0
            call.priority = call.priority if call.soft else 0
            ended += [slot] if was_held and not call.is_held else []
        assert self.pins.expire(self.now).tolist() == ended

    def check(self) -> None:
        every = np.arange(SLOTS)
        held = [slot for slot, call in enumerate(self.calls) if call.is_held]
        assert self.pins.all_pinned().tolist() == held
        assert self.pins.count == len(held) <= self.pins.most
        assert self.pins.until(every).tolist() == [max(w.firm, w.soft) for w in self.calls]
        assert self.pins.firmly(every).tolist() == [w.firm > 0 for w in self.calls]
        assert self.pins._num_ending <= 4 * self.pins.most + 1024 + SLOTS
        queued = [slot for queue in self.pins._weak.queues.values() for slot in queue]
        assert sorted(queued) == self.weak(), "those and no others give way"


@pytest.mark.parametrize("seed", range(30))
def test_calls_of_all_kinds(seed: int) -> None:
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
def test_the_same_call_again_and_again_takes_no_memory(kinds: tuple[int | None, ...]) -> None:
    pins = Pins(1000, 50)
    slots = np.arange(50)
    for number in range(2000):
        pins.add(slots, 1e9 + number, float(number), kinds[number % len(kinds)])
        assert pins._num_ending <= 4 * 50 + 1024 + 100
    assert pins.count == 50
    assert pins.expire(1e9 + 1998).tolist() == []
    assert pins.expire(1e9 + 2000).tolist() == list(range(50))


def test_the_oldest_gives_way_first_and_its_end_before_its_beginning() -> None:
    pins = Pins(100, 12)
    for number in range(3):
        pins.add(np.arange(4 * number, 4 * number + 4), FOREVER, 0.0, 50)
    pins.add(np.arange(4), FOREVER, 0.0, 50)  # the first is told again
    assert pins.give_way(1).tolist() == [7]
    assert pins.give_way(8).tolist() == [6, 5, 4, 11, 10, 9, 8, 3]


def test_a_call_that_finds_no_room_looks_at_no_other_slots() -> None:
    """Where all is pinned, or matters more, thousands of calls cost what they name.

    Seen red with a look at every slot's hold for each of them.
    """
    pins = Pins(1 << 20, 1 << 10)
    pins.add(np.arange(1 << 10), FOREVER, 0.0)
    looks = []

    class Watched(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
            plain = [np.asarray(each) for each in inputs]
            looks.append(max(np.size(each) for each in plain))
            return getattr(ufunc, method)(*plain, **kwargs)

    pins._soft, pins._firm = pins._soft.view(Watched), pins._firm.view(Watched)
    for number in range(50):
        first = 2000 + 10 * number
        came, gave_way = pins.add(np.arange(first, first + 10), 5.0, 0.0, 36)
        assert not len(came)
        assert not len(gave_way)
    assert pins.num_refused == 500
    assert max(looks, default=0) <= 10
