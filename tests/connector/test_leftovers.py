"""What ended requests leave to be stored late: never lost for nothing, never for ever.

Each was seen red before the connector did what it says.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from tests.fakes.sides import BLOCK_TOKENS, Sides, hashes_of, request_of

from kvferry.connectors.vllm.engine import VllmEngine
from kvferry.rank import RankMemory

PROBES = itertools.count()


@pytest.fixture
def make(make_sides: Callable[..., Sides]) -> Callable[..., Sides]:
    return partial(make_sides, ["layer0"])


def take_all_free(sides: Sides, but: int = 0) -> None:
    sides.pool.get_new_blocks(sides.pool.get_num_free_blocks() - but)


def is_stored(sides: Sides, hashes: list[bytes]) -> bool:
    found, _ = sides.side.match(request_of(f"probe{next(PROBES)}", hashes), 0)
    return found == len(hashes) * BLOCK_TOKENS


def evict(monkeypatch: pytest.MonkeyPatch, sides: Sides) -> None:
    monkeypatch.setattr(VllmEngine, "evicts", True)


def test_a_device_without_a_free_block_loses_nothing(make):
    sides = make()
    request = sides.compute("a", hashes_of(1))
    take_all_free(sides)  # vLLM gives blocks away in a step, and asks us for orders at its end
    sides.step({"other": 1})
    sides.end(request)
    take_all_free(sides)
    sides.step({"other": 1})
    for _ in range(3):
        time.sleep(0.03)
        sides.step()
    assert is_stored(sides, hashes_of(1))


def test_two_that_end_in_one_step_where_vllm_evicts_are_both_held(make):
    """The first one's last, nameless block comes to the head of the queue, and hides the rest."""
    sides = make()
    old, first, second = (sides.compute(f"r{tag}", hashes_of(tag)) for tag in (9, 1, 2))
    sides.end(old)
    sides.rest()
    take_all_free(sides, but=4)  # the old one's
    sides.step({"other": 1})
    sides.end(first)
    sides.end(second)
    take_all_free(sides)
    for _ in range(3):
        sides.step()
        time.sleep(0.03)
    assert is_stored(sides, hashes_of(1))
    assert is_stored(sides, hashes_of(2))


@pytest.mark.parametrize("held", [True, False])
def test_a_bound_below_one_block_ends_every_wait(make, monkeypatch, held):
    sides = make(max_bytes_in_flight="512B")
    request = sides.compute("a", hashes_of(1))
    if held:
        evict(monkeypatch, sides)
    sides.end(request)
    for _ in range(20):
        sides.step()
    assert not sides.side.has_work
    assert not sides.side.frees_soon()
    assert sides.side.serving.engine.num_held == 0


def test_blocks_that_vllm_wants_do_not_wait_through_the_quiet(make, monkeypatch):
    sides = make()
    ended, other = sides.compute("a", hashes_of(1)), sides.compute("o", hashes_of(2))
    sides.orders({"o": 1})
    other.num_computed_tokens += 1
    evict(monkeypatch, sides)
    sides.side.serving._requests["o"].ours.progress.since = 512
    sides.end(ended)
    sides.orders({"o": 1})
    time.sleep(0.05)
    num_steps = 0
    while sides.side.serving.engine.num_held:
        assert sides.side.frees_soon()
        sides.step({"o": 1})
        num_steps += 1
        assert num_steps <= 2


@pytest.mark.parametrize("wants", ["more for a running one", "some for the next"])
def test_blocks_that_vllm_wants_do_not_wait_for_host_slots(make, monkeypatch, wants):
    """Seen red: a request waited while memory was made ready for what another had left."""
    monkeypatch.setattr(RankMemory, "ready_slots", 2)
    sides = make()
    ended = sides.compute("a", hashes_of(1))
    evict(monkeypatch, sides)
    sides.end(ended)
    sides.step()
    engine, scheduled = sides.side.serving.engine, {}
    assert engine.num_held == 4, "two are stored, and the others wait for slots"
    if wants == "some for the next":
        sides.side.match(request_of("b", hashes_of(2)), 0)
    else:
        assert sides.side.frees_soon()
        scheduled = {"o": 1}
    sides.step(scheduled)
    sides.step(scheduled)
    assert engine.num_held == 0
    assert not sides.side.serving._rests.is_wanted, "wanted once, not for ever"


@pytest.mark.parametrize("evicts", [True, False])
def test_what_another_connector_was_to_bring_is_not_ours_to_store(make, monkeypatch, evicts):
    """vLLM counts such tokens as computed before they have come; here they never do."""
    sides = make()
    request = request_of("x", hashes_of(1))
    assert sides.side.match(request, 0) == (0, False)
    sides.allocate("x", 5)
    sides.side.allocated(request, SimpleNamespace(get_block_ids=lambda: ([],)), 0)
    request.num_computed_tokens = 4 * BLOCK_TOKENS
    if evicts:
        evict(monkeypatch, sides)
    sides.step({"other": 1})
    sides.end(request)
    for _ in range(4):
        sides.step()
    assert not is_stored(sides, hashes_of(1))


def test_a_reset_gives_held_blocks_back_at_once(make, monkeypatch):
    """Seen red: nothing was left to step for, so vLLM waited for its blocks until a request came.

    Until then it refused to reset its own cache.
    """
    sides = make()
    request = sides.compute("a", hashes_of(1))
    evict(monkeypatch, sides)
    sides.end(request)
    engine = sides.side.serving.engine
    assert engine.num_held
    sides.side.reset()
    assert engine.num_held == 0
    assert not sides.side.has_work
