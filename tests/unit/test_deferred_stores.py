"""What ended requests leave: when each is stored, and what comes before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
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
        return self.rests.add(request or name, 16, key(name))

    def hold(self, name: str, request: str = "") -> None:
        held = (DeviceBlocks(0, np.array([0])),)
        self.rests.add(request or name, 16, key(name), [[0]], held)

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
    world.rests.is_wanted = False  # as after each step
    world.hold("d")
    assert world.due() == []


def test_a_rest_waits_for_the_next_turn_and_is_stored_if_none_comes(world: World) -> None:
    for name in "abcde":
        assert world.wait(name) is None
    twin = world.wait("a", "another")
    assert twin is not None
    assert twin.request == "a"
    (continued,) = [world.rests.take_continued(chain("b"), 1)]
    assert continued is not None
    assert continued.request == "b"
    assert world.rests.take_continued(chain("b"), 1) is None
    assert world.rests.take_continued(chain("c"), 2) is None, "more blocks than keys"
    world.now += WAIT_SECONDS - 0.01
    assert world.due() == []
    world.now += 0.02
    assert world.due() == ["c", "d"], "two a step"
    assert world.due() == ["e", "another"]
    assert len(world.rests) == 0


def test_a_rest_waits_for_nothing_where_the_engine_evicts_or_too_many_wait(world: World) -> None:
    for number in range(MOST + 3):
        world.wait(chr(200 + number))
    assert world.due() == [chr(200 + number) for number in range(3)]
    assert world.due() == []
    world.blocks.evicts = True
    assert len(world.due()) == MOST


def test_while_the_engine_evicts_a_short_turn_is_stored_before_it_ends(world: World) -> None:
    """The next turn may come at once: it finds in host memory what was stored before the end."""
    assert world.rests.step == 4096
    world.blocks.evicts = True
    assert world.rests.step <= 256


def test_a_rest_that_is_held_is_stored_soon_and_may_be_dropped(world: World) -> None:
    for name in "abc":
        world.hold(name)
    world.wait("a", "waiting")
    world.now += SOON_SECONDS / 2
    assert world.due() == []
    second = world.rests._rests[1]
    assert world.rests.drop(second.request) == [second]
    world.now += SOON_SECONDS
    assert world.due() == ["a", "c"]
    assert world.rests.num_held == 0
    world.hold("d")
    assert {rest.request for rest in world.rests.take_all()} == {"waiting", "d"}
    assert (len(world.rests), world.rests.num_held) == (0, 0)
