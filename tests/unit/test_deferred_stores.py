"""What ended requests leave, against a list of what waits.

Breaks seen to fail here: a twin forgotten; evictions ignored; ``is_wanted`` never reset; shortage
not seen; too many held not seen; the newest taken first; no bound on how many wait; ripe ones all
at once; a rest that is held only taken when idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.fakes.crafted_keys import keys as numbered

from kvferry.core.keys import Key, Keys
from kvferry.scheduler.stores import SOON_SECONDS, WAIT_SECONDS, Deferred, DeferredStores
from kvferry.scheduler.transfers import BlockTable
from kvferry.types import DeviceBlocks

NUM_BLOCKS = 80  # at most 10 are held
MOST = 64


class Blocks:
    """What the engine says of its blocks is up to the test."""

    def __init__(self) -> None:
        self.num_free = NUM_BLOCKS
        self.num_held = 0
        self.evicts = False

    def tables(self, request: Any, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        raise AssertionError("what is left is not looked at here")

    remains = tables


def key(name: str) -> Key:
    return chain(name)[0]


def chain(name: str) -> Keys:
    return numbered([sum(ord(letter) << (8 * at) for at, letter in enumerate(name))])


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.blocks = Blocks()
        self.rests = DeferredStores(
            self.blocks,
            least_tokens=16,
            is_full=True,
            num_device_blocks=NUM_BLOCKS,
            clock=lambda: self.now,
        )

    def wait(self, name: str, request: str = "") -> Deferred | None:
        return self.rests.wait(request or name, 16, key(name))

    def hold(self, name: str, request: str = "") -> None:
        held = (DeviceBlocks(0, np.array([0])),)
        self.rests.hold(request or name, 16, key(name), [[0]], held)

    def due(self, *, is_idle: bool = False) -> list[str]:
        return [rest.request for rest in self.rests.take_due(is_idle=is_idle)]


@pytest.fixture
def world() -> World:
    return World()


def test_what_is_put_back_comes_first_again_and_in_order(world: World) -> None:
    world.hold("held")
    for name in "abc":
        world.wait(name)
    taken = world.rests.take_due(is_idle=True)
    world.wait("d")
    world.hold("another")
    world.rests.put_back(taken)
    assert world.rests.num_held
    assert world.due(is_idle=True) == ["held", "another", *"abcd"]


@pytest.mark.parametrize("short", ["told", "few free", "many held"])
def test_blocks_that_the_engine_needs_are_held_no_longer(world: World, short: str) -> None:
    for name in "abc":
        world.hold(name)
    if short == "told":
        world.rests.is_wanted = True
    elif short == "few free":
        world.blocks.num_free = 9
    else:
        world.blocks.num_held = 11
    assert world.due() == list("abc")
    world.blocks.num_free, world.blocks.num_held = NUM_BLOCKS, 0
    world.hold("d")
    assert world.due() == [], "wanted once, not for ever"


class Waiting(RuleBasedStateMachine):
    """Everything that is left is taken exactly once, and nothing for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.number = 0
        self.waiting: dict[Key, str] = {}
        self.held: set[str] = set()

    def take(self, taken: list[Deferred]) -> None:
        for rest in taken:
            if not rest.held:
                assert self.waiting.pop(rest.key) == rest.request
            else:
                self.held.remove(rest.request)

    def new(self) -> str:
        self.number += 1
        return f"r{self.number}"

    @rule(name=st.sampled_from("abcdef"))
    def wait(self, name: str) -> None:
        request = self.new()
        twin = self.world.wait(name, request)
        assert (twin.request if twin else None) == self.waiting.get(key(name))
        self.waiting[key(name)] = request

    @rule(name=st.sampled_from("abcdef"))
    def hold(self, name: str) -> None:
        request = self.new()
        self.world.hold(name, request)
        self.held.add(request)

    @rule(name=st.sampled_from("abcdef"))
    def go_on(self, name: str) -> None:
        found = self.world.rests.take_continued(chain(name), 1)
        assert (found.request if found else None) == self.waiting.pop(key(name), None)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        known = [*self.waiting.values(), *sorted(self.held)]
        if known:
            taken = self.world.rests.drop(data.draw(st.sampled_from(known)))
            assert len(taken) == 1
            self.take(taken)

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0]), evicts=st.booleans(), free=st.integers(0, 80))
    def step(self, seconds: float, evicts: bool, free: int) -> None:
        self.world.now += seconds
        self.world.blocks.evicts = evicts
        self.world.blocks.num_free = free
        before = len(self.waiting) + len(self.held)
        self.take(self.world.rests.take_due(is_idle=False))
        assert not (evicts and self.waiting)
        if before and len(self.waiting) + len(self.held) == before:
            assert seconds <= WAIT_SECONDS, "waits for ever"
            assert not (seconds > SOON_SECONDS and self.held)

    @rule()
    def rest(self) -> None:
        self.take(self.world.rests.take_due(is_idle=True))
        assert not self.waiting
        assert not self.held

    @invariant()
    def counted(self) -> None:
        assert len(self.world.rests) == len(self.waiting) + len(self.held)

    @rule()
    def forget(self) -> None:
        self.take(self.world.rests.take_all())
        assert not self.waiting
        assert not self.held


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=60, stateful_step_count=30)
