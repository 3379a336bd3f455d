"""What routers are told: a block once it can be matched, and once it no longer can be."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.sides import BLOCK_TOKENS, Sides, hashes_of, request_of

from kvferry.connectors.vllm import events

SLOT_BYTES = 2 * BLOCK_TOKENS * 8 * 4
TAGS = range(1, 6)


class Stored(SimpleNamespace):
    """vLLM's word for a block that can be had."""


class Removed(SimpleNamespace):
    """And for one that no longer can be."""


@pytest.fixture
def make(make_sides: Callable[..., Sides], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sides]:
    """With room for eight blocks, and words for events that are not vLLM's."""
    forms = SimpleNamespace(
        BlockStored=Stored, BlockRemoved=Removed, MEDIUM_CPU="host", MEDIUM_STORAGE="below"
    )
    monkeypatch.setattr(events, "vllm_events", lambda: (forms, bytes.hex))
    sizes = [f"{8 * SLOT_BYTES}B", f"{8 * SLOT_BYTES}B"]

    def begin(**settings: Any) -> Sides:
        return make_sides(["layer0"], ["layer1"], host=sizes, has_listeners=True, **settings)

    return begin


@pytest.fixture
def sides(make: Callable[..., Sides]) -> Sides:
    return make()


def take(sides: Sides, kind: type) -> list[Any]:
    return [event for event in sides.side.take_events() if isinstance(event, kind)]


def test_a_block_is_told_when_it_can_be_matched(sides):
    request = sides.compute("a", hashes_of(1))
    request.lora_request = SimpleNamespace(adapter_id=3, name="tuned")
    sides.end(request)
    sides.run(sides.orders())
    sides.answer(0)
    assert list(sides.side.take_events()) == [], "one rank has it"
    sides.answer(1)
    told = take(sides, Stored)
    names = [name.hex() for name in hashes_of(1)]
    assert [event.block_hashes for event in told] == [[name] for name in names]
    assert [event.parent_block_hash for event in told] == [None, *names[:-1]]
    assert [event.token_ids[0] for event in told] == [0, 16, 32, 48]
    assert {len(event.token_ids) for event in told} == {BLOCK_TOKENS}
    assert {(e.lora_id, e.lora_name, e.medium, e.group_idx) for e in told} == {
        (3, "tuned", "host", 0)
    }
    assert list(sides.side.take_events()) == [], "once"


def test_a_reset_takes_back_what_was_told(sides):
    sides.end(sides.compute("a", hashes_of(1)))
    sides.rest()
    assert len(take(sides, Stored)) == 4
    sides.side.reset()
    assert len(take(sides, Removed)) == 4


def test_what_fails_is_not_told(sides):
    request = sides.compute("a", hashes_of(1))
    sides.end(request)
    orders = sides.orders()
    sides.ranks[1]._refuse(orders.plan.transfers, "a mistake")
    sides.ranks[0].begin(orders)
    sides.ranks[0]._drain()
    sides.answer(0, 1)
    assert sides.side.serving.scheduler.stats().failed == 1
    assert list(sides.side.take_events()) == []
    assert not sides.side.serving.events._ordered


def test_without_a_listener_no_event_is_kept(make_sides):
    sides = make_sides(["layer0"])
    sides.end(sides.compute("a", hashes_of(1)))
    sides.rest()
    assert sides.side.serving.events is None
    assert list(sides.side.take_events()) == []


KINDS = ["memory:1MiB", "memory-by-key:1MiB"]


def follow(sides: Sides, believed: dict[str, set[str]]) -> list[Any]:
    """A router: takes what is told, and refuses what cannot be."""
    told = list(sides.side.take_events())
    for event in told:
        (name,) = event.block_hashes
        there = believed.setdefault(event.medium, set())
        if isinstance(event, Stored):
            assert name not in there, "told twice"
            there.add(name)
        else:
            assert name in there, "taken back what was not told"
            there.remove(name)
    return told


def settle(sides: Sides, believed: dict[str, set[str]]) -> None:
    """Until nothing moves any more."""
    serving = sides.side.serving
    assert serving is not None
    scheduler = serving.scheduler
    for _ in range(3000):
        sides.rest()
        follow(sides, believed)
        sides.run(sides.orders())
        sides.answer(0, 1)
        if not scheduler.num_in_flight and not scheduler.num_queued and not sides.side.has_work:
            return
        time.sleep(0.001)
    raise AssertionError("copies do not end")


def fill(sides: Sides) -> dict[str, set[str]]:
    """Store five times four blocks, of which the host holds eight; what a router believes then."""
    believed: dict[str, set[str]] = {}
    for tag in TAGS:
        sides.end(sides.compute(f"r{tag}", hashes_of(tag)))
        settle(sides, believed)
    return believed


def truth(sides: Sides) -> dict[str, set[str]]:
    """What really is where."""
    serving: Any = sides.side.serving
    (tier,) = serving.scheduler.lower.tiers
    found: dict[str, set[str]] = {"host": set(), "below": set()}
    for tag in TAGS:
        names = hashes_of(tag)
        keys = serving._state_of(request_of(f"look{tag}", names)).ours.chain.keys()
        there = {"host": serving.scheduler.pool.cached(keys)}
        there["below"] = tier.lookup(keys, 0.0).readable
        for where, flags in there.items():
            found[where] |= {names[at].hex() for at in flags.nonzero()[0]}
    return found


@pytest.mark.parametrize("write", ["spill", "through"])
@pytest.mark.parametrize("tiers", KINDS)
def test_blocks_below_the_host_are_told_with_another_medium(make, tiers, write):
    sides = make(tiers=tiers, tier_write=write, load_policy="always")
    believed = fill(sides)
    names = {name.hex() for tag in TAGS for name in hashes_of(tag)}
    assert believed == truth(sides)
    assert believed["host"] | believed["below"] == names, "nothing is lost, and all of it told"
    first = {name.hex() for name in hashes_of(1)}
    assert first <= believed["below"] - believed["host"]


def ask(sides: Sides, tag: int, believed: dict[str, set[str]]) -> int:
    """How many tokens of a conversation are in host memory once tiers were asked and read."""
    request = request_of(f"again{tag}", hashes_of(tag))
    while (found := sides.side.match(request, 0))[0] is None:
        sides.run(sides.orders())
        sides.answer(0, 1)
        follow(sides, believed)
    sides.side.finished(request)
    return found[0] or 0


@pytest.mark.parametrize("tiers", KINDS)
def test_what_comes_up_again_is_told_again(make, tiers):
    sides = make(tiers=tiers, load_policy="always", lookup_deadline="5min", promote_deadline="5min")
    believed = fill(sides)
    first = {name.hex() for name in hashes_of(1)}
    assert not first & believed["host"]
    assert ask(sides, 1, believed) > 0
    settle(sides, believed)
    assert first & believed["host"]
    assert first <= believed["below"]
    assert believed == truth(sides)
    sides.side.reset()
    settle(sides, believed)
    assert believed == {"host": set(), "below": set()}


def test_what_a_tier_dropped_is_taken_back(make):
    sides = make(tiers=f"memory:{8 * SLOT_BYTES}B", tier_write="through")
    believed = fill(sides)
    assert believed == truth(sides)
    assert len(believed["below"]) == 8


def test_what_a_store_has_lost_is_taken_back_when_it_says_so(make):
    sides = make(tiers=f"memory-by-key:{8 * SLOT_BYTES}B", tier_write="through")
    believed = fill(sides)
    first = {name.hex() for name in hashes_of(1)}
    assert first <= believed["below"], "nobody has asked"
    for tier in sides.side.serving.scheduler.lower.tiers:
        tier._answers.doubt()
    ask(sides, 1, believed)
    settle(sides, believed)
    assert hashes_of(1)[0].hex() not in believed["below"], "what follows is of no use without it"


def test_routers_are_told_of_a_bounded_number_of_blocks_below(make, monkeypatch):
    monkeypatch.setattr(events, "_MAX_LOWER", 10)
    sides = make(tiers="memory-by-key:1MiB", tier_write="through")
    believed = fill(sides)
    names = [name.hex() for tag in TAGS for name in hashes_of(tag)]
    assert believed["below"] == set(names[-10:]), "the newest"
    assert len(sides.side.serving.events._reported) == 10
