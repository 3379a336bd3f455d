"""Requests we have nothing of: answered at once, and told to our scheduler before it matters."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.sides import BLOCK_TOKENS, NUM_BLOCKS, Sides, hashes_of, request_of

from kvferry.scheduler import stores

PROMPT = 4 * BLOCK_TOKENS + 1


@pytest.fixture(autouse=True)
def stores_as_in_service(monkeypatch):
    """Other tests here store more often, to have more to look at."""
    monkeypatch.setattr(stores, "STORE_TOKENS", 4096)


@pytest.fixture
def sides(make_sides: Callable[..., Sides]) -> Sides:
    made = make_sides(["layer0"])
    made.step()  # the first look of all
    return made


def come(sides: Sides, name: str, tag: int) -> Any:
    """A request is asked about and gets its blocks; nothing of it is with us."""
    request = request_of(name, hashes_of(tag))
    assert sides.side.match(request, 0) == (0, False)
    sides.side.allocated(request, sides.allocate(name, 5), 0)
    return request


def compute(sides: Sides, request: Any, **others: int) -> None:
    """Its first step, and what vLLM does after it."""
    name = request.request_id
    sides.step({name: PROMPT, **others}, new=[name])
    request.num_computed_tokens, request.num_output_tokens = PROMPT, 1
    sides.cache(request)


def is_stored(sides: Sides, tag: int) -> bool:
    probe = request_of(f"probe{tag}", hashes_of(tag))
    found, _ = sides.side.match(probe, 0)
    sides.side.finished(probe)
    return bool(found == 4 * BLOCK_TOKENS)


def test_one_that_never_ran_is_not_stored(sides):
    request = come(sides, "a", 1)
    sides.end(request)
    sides.rest()
    sides.step()
    assert not is_stored(sides, 1)
    assert "a" not in [each.id for each in sides.side.serving.scheduler.requests], "known for ever"


def test_what_another_left_is_gone_on_with(sides):
    """Seen red with ``run`` that does not go on: the first turn is then stored by itself."""
    first = come(sides, "first", 1)
    compute(sides, first)
    sides.end(first)
    assert len(sides.side.serving.scheduler.deferred) == 1
    second = request_of("second", hashes_of(1) + hashes_of(2))
    assert sides.side.match(second, 4 * BLOCK_TOKENS) == (0, False)
    sides.side.allocated(second, sides.allocate("second", 9), 0)
    sides.step({"second": 4 * BLOCK_TOKENS + 1}, new=["second"])
    second.num_computed_tokens, second.num_output_tokens = 8 * BLOCK_TOKENS + 1, 1
    assert len(sides.side.serving.scheduler.deferred) == 0


def test_a_load_that_cannot_be_is_not_kept_from_the_ranks(sides):
    lost = request_of("lost", hashes_of(1))
    sides.side.allocated(lost, sides.allocate("lost", 5), 2 * BLOCK_TOKENS)
    come(sides, "a", 2)
    assert sides.orders({"a": PROMPT}, new=["a"]).loads.keys() == {"lost"}


def crowd(sides, numbers, running):
    """One request comes with every step, beside those that run by now."""
    for number in numbers:
        request = come(sides, f"r{number}", 10 + number)
        compute(sides, request, **dict.fromkeys(running, 1))
        running.append(request.request_id)
        yield


def test_one_that_comes_back_and_ends_at_once_is_stored(sides):
    """It has one token to compute, so it looks like one that decodes."""
    old = come(sides, "old", 1)
    compute(sides, old)
    sides.step({"old": 1})
    ids = sides.tables["old"]
    sides.pool.free_blocks([sides.pool.blocks[number] for number in reversed(ids)])
    old.num_preemptions, old.num_computed_tokens = 1, 0
    sides.step({}, preempted=["old"])
    assert sides.side.match(old, 4 * BLOCK_TOKENS) == (0, False)
    sides.pool.touch([sides.pool.blocks[number] for number in ids])
    sides.side.allocated(old, SimpleNamespace(get_block_ids=lambda: (ids,)), 0)
    old.num_computed_tokens = 4 * BLOCK_TOKENS
    come(sides, "new", 2)
    sides.step({"old": 1, "new": PROMPT}, new=["new"])
    old.num_computed_tokens += 1
    sides.end(old)
    sides.rest()
    sides.step({"new": 1})
    assert is_stored(sides, 1)


def test_a_prefill_is_timed_to_the_step_after_its_first_token(sides, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvferry.connectors.common.serving.time.monotonic", lambda: now[0])
    samples = []
    monkeypatch.setattr(
        sides.side.serving.scheduler, "note_prefill", lambda _, seconds: samples.append(seconds)
    )
    running: list[str] = []
    for _ in crowd(sides, range(4), running):
        now[0] += 0.01
    sides.step(dict.fromkeys(running, 1))
    assert samples == pytest.approx([0.01] * 4)


def test_one_that_is_preempted_and_resumed_before_we_hear_of_it_is_known_by_its_count(sides):
    """vLLM may do both in one step. What it has from now on is not from before the reset."""
    request = sides.compute("r", hashes_of(1))
    sides.side.reset()
    sides.pool.evict_blocks(set(range(1, NUM_BLOCKS)))
    sides.free(request)
    sides.end(sides.compute("other", hashes_of(1)[:1], 2))
    sides.rest()
    request.num_preemptions, request.num_computed_tokens = 1, BLOCK_TOKENS
    assert sides.side.match(request, BLOCK_TOKENS) == (0, False)
    sides.side.allocated(request, sides.allocate("r", 5), 0)
    sides.step({"r": 3 * BLOCK_TOKENS + 1})
    request.num_computed_tokens = request.num_tokens
    sides.cache(request)
    sides.end(request)
    sides.rest()
    reader = request_of("reader", hashes_of(1))
    sides.promise(reader)
    assert sides.step().finished_recving == {"reader"}
    sides.end(reader)
    sides.rest()
    assert sides.side.serving.scheduler.pool.num_leases == 0
