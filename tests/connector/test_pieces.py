"""Loads in pieces under vLLM: ordered while the last blocks still come up, told once and whole.

Seen red with: ranks that tell of a load whose first piece has landed; ends of requests that are not
told to the ranks; a failure that counts for the blocks before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.connector.test_restart import StubWeights
from tests.connector.test_tiers import (
    CHAT_BLOCKS,
    HOST_BLOCKS,
    chat,
    hashes,
    make,
    scheduler_of,
    settle,
    step,
    tiers_of,
    tiers_of_ranks,
)
from tests.fakes.pools import evict
from tests.fakes.sides import BLOCK_TOKENS, NUM_BLOCKS, Sides, assert_same, request_of

from kvferry.connectors.common.weights import Freshness
from kvferry.core.keys import Key
from kvferry.tiers.contract import Way
from kvferry.types import DEVICE, Outcome

__all__ = ["make"]  # a fixture
ALL = CHAT_BLOCKS * BLOCK_TOKENS


class Gates:
    """Holds reads of a conversation's blocks on one rank until each is let through, or fails."""

    def __init__(self, sides: Sides, rank: int, number: int) -> None:
        assert sides.side.serving is not None
        probe = request_of("probe", hashes(number))
        ferried = sides.side.serving._state_of(probe).ours
        keys = list(scheduler_of(sides).matcher.names[0].all(ferried.chain.keys()))
        sides.side.finished(probe)
        self._gates = {key: threading.Event() for key in keys}
        self._failing: set[bytes] = set()
        self._keys = keys
        self._others = tiers_of(sides)[rank].fault
        tiers_of(sides)[rank].fault = self._hold

    def _hold(self, way: Way, key: Key) -> None:
        if way is Way.READ and key in self._gates:
            assert self._gates[key].wait(30)
            if key in self._failing:
                raise OSError("bad sector")
        elif self._others is not None:
            self._others(way, key)

    def let(self, *blocks: int) -> None:
        for block in blocks:
            self._gates[self._keys[block]].set()

    def fail(self, *blocks: int) -> None:
        self._failing.update(self._keys[block] for block in blocks)
        self.let(*blocks)


def let_all(gates: list[Gates], *blocks: int) -> None:
    """On every rank."""
    for gate in gates:
        gate.let(*blocks)


@pytest.fixture
def begin(make: Callable[..., Sides]) -> Any:
    """Sides whose first conversations are below only, each piece of them one block."""
    gates: list[Gates] = []

    def start(num_ranks: int = 2, **options: Any) -> tuple[Sides, list[Any], list[Gates]]:
        sides = make(num_ranks, tier_write="through", **options)
        parts = scheduler_of(sides)._requests
        parts.lower.piece_slots = 1
        parts.promoter._share = lambda tiers: 1.0
        wanted = [chat(sides, number) for number in range(8)]
        evict(scheduler_of(sides).pool, HOST_BLOCKS)
        gates.extend(Gates(sides, rank, 0) for rank in range(num_ranks))
        return sides, wanted, gates

    yield start
    let_all(gates, *range(CHAT_BLOCKS))


def until(sides: Sides, holds: Callable[[Any], bool], scheduled: Any = None) -> Any:
    give_up = time.monotonic() + 20
    while True:
        told = step(sides, scheduled)
        if holds(told):
            return told
        assert not told.finished_recving, "told of before its time"
        assert time.monotonic() < give_up


def hear(sides: Sides) -> Any:
    """Until vLLM is told of a load."""
    return until(sides, lambda told: told.finished_recving)


def expect_only_the_first(sides: Sides, blocks: list[int], wanted: list[Any]) -> None:
    """A load ends early: vLLM is told of all blocks but the first, which has come."""
    assert set(hear(sides).invalid_block_ids) == set(blocks[1:])
    assert_same(sides.bytes_at(blocks[:1]), wanted[0])


def loading(sides: Sides, gates: list[Gates], num_up: int = 1) -> tuple[Any, list[int]]:
    """A reader that vLLM was told of while only its first blocks were up."""
    request = request_of("reader", hashes(0))
    let_all(gates, *range(num_up))
    found: Any = (None, False)
    give_up = time.monotonic() + 20
    while (found := sides.side.match(request, 0)) == (None, False):
        step(sides)
        assert time.monotonic() < give_up
    assert found == (ALL, True)
    sides.side.allocated(request, sides.allocate("reader", CHAT_BLOCKS + 1), ALL)
    blocks = sides.tables["reader"][:CHAT_BLOCKS]
    sides.write(blocks, np.nan)
    return request, blocks


def has_landed(sides: Sides, block: int) -> bool:
    return all(not np.isnan(kv[block]).any() for arrays in sides.kv for kv in arrays.values())


def finish(sides: Sides, request: Any) -> None:
    sides.end(request)
    settle(sides)
    scheduler_of(sides).check_integrity()
    assert not scheduler_of(sides).requests
    assert not scheduler_of(sides).transfers.blocks_to_device
    assert sides.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert not any(rank._loads for rank in sides.ranks)
    assert not sides.side.guard.reason
    assert not any(rank.guard.reason for rank in sides.ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_first_blocks_are_on_the_device_while_the_last_are_read(begin, num_ranks):
    sides, wanted, gates = begin(num_ranks)
    request, blocks = loading(sides, gates)
    until(sides, lambda told: has_landed(sides, blocks[0]))
    assert not has_landed(sides, blocks[1])
    let_all(gates, 1, 2)
    until(sides, lambda told: has_landed(sides, blocks[2]))
    assert not has_landed(sides, blocks[3])
    let_all(gates, 3)
    told = hear(sides)
    assert told.finished_recving == {"reader"}
    assert not told.invalid_block_ids
    assert_same(sides.bytes_at(blocks), wanted[0])
    assert scheduler_of(sides).stats().hit_tokens == ALL
    finish(sides, request)


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_does_not_come_up_is_computed_and_what_did_is_kept(begin, bad, rank):
    sides, wanted, gates = begin(2)
    request, blocks = loading(sides, gates)
    gates[rank].fail(bad)
    let_all(gates, *range(CHAT_BLOCKS))
    invalid: set[int] = set()
    give_up = time.monotonic() + 20
    while True:
        told = step(sides)
        invalid |= set(told.invalid_block_ids or ())
        if told.finished_recving:
            break
        assert time.monotonic() < give_up
    assert blocks[bad] in invalid
    assert not invalid & set(blocks[:bad])
    assert_same(sides.bytes_at(blocks[:bad]), wanted[0])
    request.num_computed_tokens = bad * BLOCK_TOKENS
    sides.side.allocated(request, None, 0)
    step(sides, {"reader": request.num_tokens - request.num_computed_tokens})
    finish(sides, request)


def test_a_piece_that_cannot_be_copied_leaves_those_before_it(begin, monkeypatch):
    sides, wanted, gates = begin(1)
    request, blocks = loading(sides, gates)
    until(sides, lambda told: has_landed(sides, blocks[0]))
    worker = sides.ranks[0]._worker
    execute, poll = worker.execute, worker.poll
    loads: set[int] = set()

    def note(plan: Any) -> None:
        loads.update(each.id for each in plan.transfers if each.dst == DEVICE)
        execute(plan)

    def fail() -> list[Any]:
        return [
            replace(each, outcome=Outcome.FAILED, reason="the link is down")
            if each.transfer_id in loads
            else each
            for each in poll()
        ]

    monkeypatch.setattr(worker, "execute", note)
    monkeypatch.setattr(worker, "poll", fail)
    gates[0].let(1, 2, 3)
    expect_only_the_first(sides, blocks, wanted)
    finish(sides, request)


def fall_silent(sides: Sides) -> None:
    """Nothing comes up for a minute, as far as loads in pieces can see."""
    pipelined = scheduler_of(sides)._requests.promoter
    clock = pipelined._clock
    pipelined._clock = lambda: clock() + 60.001


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_drive_that_falls_silent_ends_the_load_long_before_its_deadline(begin, num_ranks):
    sides, wanted, gates = begin(num_ranks)
    request, blocks = loading(sides, gates)
    until(sides, lambda told: has_landed(sides, blocks[0]))
    fall_silent(sides)
    told = hear(sides)
    assert set(told.invalid_block_ids) == set(blocks[1:])
    request.num_computed_tokens = BLOCK_TOKENS
    sides.side.allocated(request, None, 0)
    let_all(gates, 1, 2, 3)
    step(sides, {"reader": request.num_tokens - request.num_computed_tokens})
    settle(sides)
    assert not has_landed(sides, blocks[1])  # it is the engine's now: what comes late stays above
    assert_same(sides.bytes_at(blocks[:1]), wanted[0])
    finish(sides, request)


def test_a_request_that_is_aborted_is_told_of_once_no_rank_writes_its_blocks(begin):
    """vLLM frees the blocks of such a request when it hears of it, and waits for that."""
    sides, _wanted, gates = begin(2)
    request, blocks = loading(sides, gates)
    until(sides, lambda told: has_landed(sides, blocks[0]))
    sides.side.finished(request)
    assert sides.side.has_work
    told = hear(sides)
    assert told.finished_recving == {"reader"}
    let_all(gates, 1, 2, 3)
    settle(sides)
    assert not has_landed(sides, blocks[1])
    sides.free(request)
    assert sides.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    scheduler_of(sides).check_integrity()


def test_an_abort_right_after_a_piece_was_ordered(begin):
    sides, _wanted, gates = begin(2)
    request, _blocks = loading(sides, gates, num_up=CHAT_BLOCKS - 1)
    step(sides)
    let_all(gates, CHAT_BLOCKS - 1)
    scheduler = scheduler_of(sides)
    (ferried,) = scheduler.requests
    until(sides, lambda told: not ferried.has_more_to_load)
    assert scheduler.transfers._loads  # the last piece waits for the next plan
    sides.side.finished(request)
    told = hear(sides)
    assert told.finished_recving == {"reader"}
    settle(sides)
    sides.free(request)
    assert sides.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    scheduler.check_integrity()


def test_a_reset_ends_the_load_and_keeps_what_has_landed(begin):
    sides, wanted, gates = begin(2)
    request, blocks = loading(sides, gates)
    until(sides, lambda told: has_landed(sides, blocks[0]))
    sides.side.reset()
    expect_only_the_first(sides, blocks, wanted)
    let_all(gates, 1, 2, 3)
    finish(sides, request)


def test_others_that_want_the_same_wait_and_load_nothing(begin):
    sides, _wanted, gates = begin(1)
    request, _blocks = loading(sides, gates)
    other = request_of("other", hashes(0))
    for _ in range(5):
        assert sides.side.match(other, 0) == (None, False)
        step(sides)
    gates[0].let(1, 2, 3)
    give_up = time.monotonic() + 20
    while not (told := step(sides)).finished_recving:
        assert sides.side.match(other, 0) == (None, False)
        assert time.monotonic() < give_up
    assert told.finished_recving == {"reader"}
    sides.side.finished(other)
    finish(sides, request)


def test_out_of_service_in_the_midst_tells_vllm_what_will_not_come(begin):
    sides, wanted, gates = begin(2)
    _request, blocks = loading(sides, gates)
    until(sides, lambda told: has_landed(sides, blocks[0]))
    sides.side._trip("test", RuntimeError("a mistake of ours"))
    expect_only_the_first(sides, blocks, wanted)
    let_all(gates, 1, 2, 3)
    for tier in tiers_of_ranks(sides):
        tier._close_seconds = 5


def test_a_rank_that_fails_in_the_midst_tells_of_the_request_once(begin, monkeypatch):
    sides, _wanted, gates = begin(2)
    request, blocks = loading(sides, gates)
    until(sides, lambda told: has_landed(sides, blocks[0]))

    def fail() -> Any:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(sides.ranks[1]._worker, "poll", fail)
    step(sides)
    monkeypatch.undo()
    assert sides.ranks[1].guard.reason
    let_all(gates, 1, 2, 3)
    hear(sides)
    for _ in range(5):
        assert not step(sides).finished_recving
    sides.end(request)


@pytest.mark.parametrize("how", ["last piece", "tier away"])
def test_what_came_before_the_weights_changed_is_lost_however_the_load_ends(
    begin: Any, how: str
) -> None:
    """Seen red with weights looked at only where a piece is ordered."""
    sides, _, gates = begin(1)
    weights: Any = StubWeights()
    sides.ranks[0]._freshness = Freshness(weights)
    _, blocks = loading(sides, gates)
    until(sides, lambda told: has_landed(sides, blocks[0]))
    for _ in range(3):
        step(sides)
    weights.now = 2
    if how == "tier away":
        tiers_of(sides)[0].go_away("unplugged")
    else:
        gates[0].let(*range(CHAT_BLOCKS))
    told = hear(sides)
    assert set(told.invalid_block_ids) == set(blocks)
