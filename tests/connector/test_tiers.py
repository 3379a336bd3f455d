"""Tiers below host memory under vLLM: at any number of ranks, by either kind, with any failure."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.fakes.memory_tiers import Fault
from tests.fakes.sides import BLOCK_TOKENS, NUM_BLOCKS, Sides, assert_same, request_of

from kvferry.core.keys import Key
from kvferry.tiers.contract import Way
from kvferry.tiers.movers import TierMover

LAYER_BYTES = 2 * BLOCK_TOKENS * 8 * 4
HOST_BLOCKS = 16
CHAT_BLOCKS = 4
STAGES = [["a0", "a1", "a2"], ["b0"], ["c0", "c1"]]
KINDS = ["memory:1MiB", "memory-by-key:1MiB"]


def hashes(number: int) -> list[bytes]:
    return [bytes([number + 1, block + 1]) * 16 for block in range(CHAT_BLOCKS)]


@pytest.fixture
def make(make_sides: Callable[..., Sides]) -> Callable[..., Sides]:
    def begin(num_ranks: int = 2, *, tiers: str = KINDS[0], **options: Any) -> Sides:
        stages = STAGES[:num_ranks]
        host = [f"{HOST_BLOCKS * LAYER_BYTES * len(stage)}B" for stage in stages]
        settings = {"promote_deadline": "5min", "lookup_deadline": "5min", **options}
        return make_sides(*stages, host=host, tiers=tiers, **settings)

    return begin


def hang(until: threading.Event, seconds: float = 30) -> Fault:
    """A medium that does not answer."""

    def wait(way: Way, key: Key) -> None:
        until.wait(seconds)

    return wait


def scheduler_of(sides: Sides) -> Any:
    assert sides.side.serving is not None, sides.side.idle_reason
    return sides.side.serving.scheduler


def tiers_of_ranks(sides: Sides) -> list[TierMover]:
    memories = [rank._memory for rank in sides.ranks if rank._memory is not None]
    return [tier for memory in memories for tier in memory.tiers.values()]


def tiers_of(sides: Sides) -> list[Any]:
    return [tier._tier for tier in tiers_of_ranks(sides)]


def step(sides: Sides, scheduled: dict[str, int] | None = None) -> Any:
    """One step of vLLM's: its orders travel as bytes, and every rank answers."""
    orders = pickle.loads(pickle.dumps(sides.orders(scheduled)))
    for rank in sides.ranks:
        rank.begin(orders)
        rank.after_forward()
    return sides.answer(*range(len(sides.ranks)))


def settle(sides: Sides) -> None:
    """Step while the connector says that there is something to step for."""
    give_up = time.monotonic() + 30
    while sides.side.has_work:
        step(sides)
        assert time.monotonic() < give_up


def chat(sides: Sides, number: int) -> list[dict[str, Any]]:
    """Compute a conversation of fresh bytes, and end it; returns the bytes, rank by rank."""
    name = f"writer-{number}"
    request = request_of(name, hashes(number))
    while (found := sides.side.match(request, 0)) == (None, False):  # a tier is asked first
        step(sides)
    assert found == (0, False)
    sides.side.allocated(request, sides.allocate(name, CHAT_BLOCKS + 1), 0)
    blocks = sides.tables[name][:CHAT_BLOCKS]
    sides.write(blocks)
    wanted = sides.bytes_at(blocks)
    step(sides, {name: request.num_tokens})
    request.num_computed_tokens = request.num_tokens
    sides.cache(request)
    sides.side.finished(request)
    settle(sides)
    sides.free(request)
    return wanted


def ask(sides: Sides, request: Any) -> tuple[int, bool]:
    """What vLLM is told in the end, asking in every step as it does."""
    give_up = time.monotonic() + 30
    while True:
        num_tokens, is_async = sides.side.match(request, 0)
        if num_tokens is not None:
            return num_tokens, is_async
        assert sides.side.has_work
        step(sides)
        assert time.monotonic() < give_up


def loaded(sides: Sides, number: int) -> tuple[int, list[dict[str, Any]]]:
    """Ask for a conversation and load it; how many blocks came, and their bytes."""
    name = f"reader-{number}"
    request = request_of(name, hashes(number))
    num_tokens, is_async = ask(sides, request)
    if not is_async:
        sides.side.finished(request)
        return 0, []
    num_blocks = num_tokens // BLOCK_TOKENS
    sides.side.allocated(request, sides.allocate(name, CHAT_BLOCKS + 1), num_tokens)
    blocks = sides.tables[name][:num_blocks]
    sides.write(blocks, np.nan)
    told = step(sides)
    while not told.finished_recving:
        told = step(sides)
    assert not told.invalid_block_ids
    found = sides.bytes_at(blocks)
    sides.side.finished(request)
    settle(sides)
    sides.free(request)
    return num_blocks, found


@pytest.mark.parametrize("tiers", KINDS)
@pytest.mark.parametrize("write", ["spill", "through"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_the_host_dropped_comes_back_from_below(make, num_ranks, write, tiers):
    sides = make(num_ranks, tiers=tiers, tier_write=write)
    wanted = [chat(sides, number) for number in range(8)]  # twice what the host holds
    for number in range(8):
        num_blocks, found = loaded(sides, number)
        assert num_blocks == CHAT_BLOCKS, number
        assert_same(found, wanted[number])
    assert f"below it, {write}: " in sides.side.banner()
    stats = scheduler_of(sides).stats()
    assert stats.promoted_tokens > 0
    assert not sides.side.guard.reason
    scheduler_of(sides).check_integrity()
    assert sides.pool.get_num_free_blocks() == NUM_BLOCKS - 1  # one is vLLM's own


@pytest.mark.parametrize("tiers", KINDS)
def test_a_hit_is_told_by_the_tier_that_had_its_blocks(make, tiers):
    """To vLLM's statistics, also where only a part of the hit is loaded."""
    sides = make(1, tiers=tiers, tier_write="through")
    for number in range(8):
        chat(sides, number)
    told = []
    for name in ("first", "again"):
        request = request_of(name, hashes(0))
        num_tokens, _ = ask(sides, request)
        assert num_tokens == CHAT_BLOCKS * BLOCK_TOKENS
        sides.side.allocated(request, sides.allocate(name, CHAT_BLOCKS + 1), num_tokens)
        told.append([sides.side.hit_sources(name, count) for count in (num_tokens, BLOCK_TOKENS)])
        sides.end(request)
        settle(sides)
    below = tiers.partition(":")[0]
    for where, counted in zip((below, "host"), told, strict=True):
        assert counted == [{where: CHAT_BLOCKS * BLOCK_TOKENS}, {where: BLOCK_TOKENS}]


def test_a_tier_that_is_away_on_one_rank_is_a_miss_and_comes_back(make):
    sides = make(2)
    wanted = [chat(sides, number) for number in range(8)]
    tiers_of(sides)[1].go_away("its cable was pulled")
    step(sides)
    assert "cable" in scheduler_of(sides).stats().ailments["memory"]
    assert loaded(sides, 0) == (0, [])
    tiers_of(sides)[1].come_back()
    step(sides)
    assert scheduler_of(sides).stats().ailments["memory"] == ""
    num_blocks, found = loaded(sides, 0)
    assert num_blocks == CHAT_BLOCKS
    assert_same(found, wanted[0])


@pytest.mark.parametrize("tiers", KINDS)
def test_a_tier_that_goes_away_under_a_request_lets_it_go_on(make, tiers):
    sides = make(2, tiers=tiers)
    for number in range(8):
        chat(sides, number)
    hung = threading.Event()
    for tier in tiers_of(sides):
        tier.fault = hang(hung)
    request = request_of("reader", hashes(0))
    assert sides.side.match(request, 0) == (None, False)
    step(sides)
    for tier in tiers_of(sides):
        tier.go_away("unplugged")
    step(sides)
    step(sides)
    try:
        assert sides.side.match(request, 0) == (0, False)
    finally:
        hung.set()
    sides.side.finished(request)
    settle(sides)
    scheduler_of(sides).check_integrity()


def test_a_block_lost_on_one_rank_is_a_shorter_hit_with_the_right_bytes(make):
    sides = make(2)
    wanted = [chat(sides, number) for number in range(8)]
    lost: list[bytes] = []

    def lose_the_third(way: Way, key: Key) -> None:
        if way is Way.READ:  # others are written down meanwhile
            lost.append(key)
            if len(lost) == 3:
                raise OSError("bad sector")

    tiers_of(sides)[1].fault = lose_the_third
    num_blocks, found = loaded(sides, 0)
    assert num_blocks == 2
    assert_same(found, wanted[0])
    assert scheduler_of(sides).stats().lost_blocks > 0


def test_a_hung_tier_neither_holds_a_request_nor_the_end(make, monkeypatch):
    monkeypatch.setattr("kvferry.tiers.movers._abandoned_memory", [])
    sides = make(2, promote_deadline="200ms")
    for number in range(8):
        chat(sides, number)
    hung = threading.Event()
    tiers_of(sides)[0].fault = hang(hung, 8)
    for tier in tiers_of_ranks(sides):
        tier._close_seconds = 0.1
    assert loaded(sides, 0) == (0, [])
    # Out of service, the ranks are asked to finish what touches the device: not what hangs below.
    sides.ranks[0]._drain()
    assert tiers_of(sides)[0]._tasks
    for rank in sides.ranks:
        rank.close()
    assert tiers_of_ranks(sides)[0].is_stuck
    hung.set()
    for thread in tiers_of(sides)[0]._threads:  # they touch the memory, which this test gives back
        thread.join(10)


def test_a_reset_reaches_the_tiers(make):
    sides = make(2)
    for number in range(8):
        chat(sides, number)
    assert all(tier._blocks for tier in tiers_of(sides))
    sides.side.reset()
    assert sides.side.has_work  # the ranks must hear of it even where no request comes
    settle(sides)
    assert not any(tier._blocks for tier in tiers_of(sides))
    assert loaded(sides, 0) == (0, [])


def test_questions_reach_the_ranks_while_others_only_decode(make):
    """A quiet step would keep them waiting."""
    sides = make(2, tiers=KINDS[1])
    for number in range(8):
        chat(sides, number)
    scheduler_of(sides).lower.tiers[0].reset()  # what it was told: it has to ask again
    runner = request_of("runner", hashes(20))
    assert ask(sides, runner) == (0, False)
    sides.side.allocated(runner, sides.allocate("runner", CHAT_BLOCKS + 1), 0)
    step(sides, {"runner": runner.num_tokens})
    runner.num_computed_tokens = runner.num_tokens
    runner.num_output_tokens = 1
    for _ in range(3):
        step(sides, {"runner": 1})
    assert sides.orders({"runner": 1}).is_quiet
    reader = request_of("reader", hashes(0))
    assert sides.side.match(reader, 0) == (None, False)
    orders = sides.orders({"runner": 1})
    assert len(orders.plan.questions[0]) == CHAT_BLOCKS
    sides.run(orders)
    while (found := sides.side.match(reader, 0)) == (None, False):
        sides.answer(0, 1)
        orders = sides.orders({"runner": 1})
        assert not orders.is_quiet
        sides.run(orders)
    assert found == (CHAT_BLOCKS * BLOCK_TOKENS, True)
    assert scheduler_of(sides).stats().asked["memory-by-key"][1] >= CHAT_BLOCKS
