"""What routers are told: a block once it can be matched, and once it no longer can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.sides import BLOCK_TOKENS, Sides, hashes_of, request_of

from kvferry.vllm import events

SLOT_BYTES = 2 * BLOCK_TOKENS * 8 * 4


@dataclass(frozen=True)
class Stored:
    block_hashes: Any
    parent_block_hash: Any
    token_ids: Any
    block_size: int
    lora_id: Any
    medium: str
    lora_name: Any
    group_idx: int


@dataclass(frozen=True)
class Removed:
    block_hashes: Any
    medium: str
    group_idx: int


@pytest.fixture
def sides(make_sides: Callable[..., Sides], monkeypatch: pytest.MonkeyPatch) -> Sides:
    """With room for eight blocks, and words for events that are not vLLM's."""
    words = SimpleNamespace(stored=Stored, removed=Removed, medium="host", name=bytes.hex)
    monkeypatch.setattr(events, "vllms_words", lambda: words)
    sizes = [f"{8 * SLOT_BYTES}B", f"{8 * SLOT_BYTES}B"]
    return make_sides(["layer0"], ["layer1"], host=sizes, has_listeners=True)


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


def test_a_block_that_goes_is_told_too(sides):
    for tag in (1, 2, 3):
        sides.end(sides.compute(f"r{tag}", hashes_of(tag)))
        sides.rest()
        told = list(sides.side.take_events())
    gone = [event.block_hashes[0] for event in told if isinstance(event, Removed)]
    assert sorted(gone) == [name.hex() for name in hashes_of(1)]
    assert sides.side.match(request_of("again", hashes_of(1)), 0) == (0, False)


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
    assert not sides.side.serving.reports.events._ordered


def test_nobody_listens_nothing_is_kept(make_sides):
    sides = make_sides(["layer0"])
    sides.end(sides.compute("a", hashes_of(1)))
    sides.rest()
    assert sides.side.serving.reports.events is None
    assert list(sides.side.take_events()) == []
