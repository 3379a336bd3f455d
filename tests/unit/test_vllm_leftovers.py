"""What ended requests leave, against a list of what waits.

Breaks seen to fail here: a twin forgotten; evictions ignored, in ``is_due`` and in ``take_due``;
``is_wanted`` never reset; shortage not seen; too many held not seen; the newest taken first; no
bound on how many wait; ripe ones all at once; a rest that is held only taken when idle.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvferry.vllm.holds import BlockHolds
from kvferry.vllm.leftovers import SOON_SECONDS, WAIT_SECONDS, Leftovers, Rest

from kvferry.vllm.tracked import Unstored

NUM_BLOCKS = 80  # at most 10 are held
MOST = 64


class Holds(BlockHolds):
    """What vLLM's pool would say is up to the test."""

    def __init__(self) -> None:
        self.says_free = NUM_BLOCKS
        self.says_held = 0
        self.says_evicts = False

    @property
    def num_free(self) -> int:
        return self.says_free

    @property
    def num_held(self) -> int:
        return self.says_held

    @property
    def evicts(self) -> bool:
        return self.says_evicts


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.holds = Holds()
        self.leftovers = Leftovers(self.holds, num_device_blocks=NUM_BLOCKS, clock=lambda: self.now)

    def wait(self, name: str, request: str = "") -> Rest | None:
        return self.leftovers.wait(tracked(request or name), 16, name.encode())

    def hold(self, name: str, request: str = "") -> None:
        held = Unstored(tracked(request or name), [], 16, 0)
        self.leftovers.hold(held, name.encode())

    def due(self, *, is_idle: bool = False) -> list[str]:
        """As the connector does: nothing is taken unless something is due."""
        if not self.leftovers.is_due and not is_idle:
            return []
        return [rest.request_id for rest in self.leftovers.take_due(is_idle=is_idle)]


def tracked(request: str) -> Any:
    return SimpleNamespace(request=SimpleNamespace(request_id=request))


@pytest.fixture
def world() -> World:
    return World()


def test_a_short_rest_waits_for_its_conversation(world: World) -> None:
    world.wait("a")
    world.now += WAIT_SECONDS - 0.1
    assert world.due() == []
    found = world.leftovers.take_continued(b"a")
    assert found is not None
    assert found.request_id == "a"
    assert not world.leftovers
    assert world.leftovers.take_continued(b"a") is None


def test_none_waits_for_ever(world: World) -> None:
    world.wait("a")
    world.now += 0.1
    world.wait("b")
    world.now += WAIT_SECONDS - 0.1
    assert world.due() == ["a"]
    world.now += 0.1
    assert world.due() == ["b"]
    assert not world.leftovers


def test_what_is_held_waits_only_until_others_are_on_their_way(world: World) -> None:
    world.wait("short")
    world.hold("long")
    assert world.due() == []
    assert world.leftovers.take_continued(b"long") is None
    world.now += SOON_SECONDS
    assert world.due() == ["long"]


def test_where_vllm_evicts_nothing_waits(world: World) -> None:
    assert world.leftovers.can_wait
    for name in "abcd":
        world.wait(name)
    assert world.due() == []
    world.holds.says_evicts = True
    assert not world.leftovers.can_wait
    assert world.due() == list("abcd")


def test_an_idle_model_stores_all_of_it(world: World) -> None:
    world.hold("held")
    for name in "abcde":
        world.wait(name)
    assert world.due(is_idle=True) == ["held", *"abcde"]


def test_a_running_model_is_given_few_at_a_time(world: World) -> None:
    for name in "abcde":
        world.wait(name)
    world.now += WAIT_SECONDS
    assert [world.due() for _ in range(3)] == [["a", "b"], ["c", "d"], ["e"]]


def test_so_many_wait_and_no_more(world: World) -> None:
    for number in range(MOST):
        world.wait(f"{number}")
    assert world.due() == []
    world.wait("one more")
    assert world.due() == ["0"]
    assert world.due() == []


def test_as_many_go_as_come(world: World) -> None:
    """However many requests end in every step, so many wait and no more."""
    for step in range(50):
        for number in range(8):
            world.wait(f"{step}-{number}")
        world.due()
        assert len(world.leftovers) <= MOST


def test_what_is_put_back_comes_first_again_and_in_order(world: World) -> None:
    world.hold("held")
    for name in "abc":
        world.wait(name)
    taken = world.leftovers.take_due(is_idle=True)
    world.wait("d")
    world.hold("another")
    world.leftovers.put_back(taken)
    assert world.leftovers.holds_some
    assert world.due(is_idle=True) == ["held", "another", *"abcd"]


@pytest.mark.parametrize("short", ["told", "few free", "many held"])
def test_blocks_that_vllm_needs_are_held_no_longer(world: World, short: str) -> None:
    for name in "abc":
        world.hold(name)
    if short == "told":
        world.leftovers.is_wanted = True
    elif short == "few free":
        world.holds.says_free = 9
    else:
        world.holds.says_held = 11
    assert world.due() == list("abc")
    world.holds.says_free, world.holds.says_held = NUM_BLOCKS, 0
    world.hold("d")
    assert world.due() == [], "wanted once, not for ever"


def test_of_two_that_end_alike_one_is_enough(world: World) -> None:
    assert world.wait("same", "one") is None
    twin = world.wait("same", "other")
    assert twin is not None
    assert twin.request_id == "one"
    assert world.due(is_idle=True) == ["other"]


def test_what_a_namesake_left_is_found(world: World) -> None:
    world.wait("a", "again")
    world.hold("b", "again")
    world.wait("c")
    taken = world.leftovers.take_of("again")
    assert sorted(rest.name for rest in taken) == [b"a", b"b"]
    assert len(world.leftovers) == 1


class Waiting(RuleBasedStateMachine):
    """Everything that is left is taken exactly once, and nothing for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.number = 0
        self.waiting: dict[bytes, str] = {}
        self.held: set[str] = set()

    def take(self, taken: list[Rest]) -> None:
        for rest in taken:
            if rest.held is None:
                assert self.waiting.pop(rest.name) == rest.request_id
            else:
                self.held.remove(rest.request_id)

    def new(self) -> str:
        self.number += 1
        return f"r{self.number}"

    @rule(name=st.sampled_from("abcdef"))
    def wait(self, name: str) -> None:
        request = self.new()
        twin = self.world.wait(name, request)
        assert (twin.request_id if twin else None) == self.waiting.get(name.encode())
        self.waiting[name.encode()] = request

    @rule(name=st.sampled_from("abcdef"))
    def hold(self, name: str) -> None:
        request = self.new()
        self.world.hold(name, request)
        self.held.add(request)

    @rule(name=st.sampled_from("abcdef"))
    def go_on(self, name: str) -> None:
        found = self.world.leftovers.take_continued(name.encode())
        assert (found.request_id if found else None) == self.waiting.pop(name.encode(), None)

    @rule(data=st.data())
    def come_again(self, data: st.DataObject) -> None:
        known = [*self.waiting.values(), *sorted(self.held)]
        if known:
            taken = self.world.leftovers.take_of(data.draw(st.sampled_from(known)))
            assert len(taken) == 1
            self.take(taken)

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0]), evicts=st.booleans(), free=st.integers(0, 80))
    def step(self, seconds: float, evicts: bool, free: int) -> None:
        self.world.now += seconds
        self.world.holds.says_evicts = evicts
        self.world.holds.says_free = free
        before = len(self.waiting) + len(self.held)
        if self.world.leftovers.is_due:
            self.take(self.world.leftovers.take_due(is_idle=False))
            assert len(self.waiting) + len(self.held) < before, "due, and nothing was taken"
            assert not (evicts and self.waiting)
        elif before:
            assert seconds <= WAIT_SECONDS, "waits for ever"
            assert not (evicts and self.waiting)
            assert not (seconds > SOON_SECONDS and self.held)

    @rule()
    def rest(self) -> None:
        self.take(self.world.leftovers.take_due(is_idle=True))
        assert not self.waiting
        assert not self.held

    @invariant()
    def counted(self) -> None:
        assert len(self.world.leftovers) == len(self.waiting) + len(self.held)


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=60, stateful_step_count=30)
