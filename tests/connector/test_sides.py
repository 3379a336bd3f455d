"""Two ranks that hold different layers, as with pipeline parallel, and what ends badly on one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.connector.test_restart import weights as weights  # a fixture
from tests.fakes.sides import BLOCK_TOKENS, Sides, assert_same, hashes_of, request_of

from kvferry.connectors.common import worker as worker_side
from kvferry.connectors.common.messages import StepOrders, StepReceipts
from kvferry.rank import Activity, RankMemory
from kvferry.types import DEVICE, Receipt

HASHES = [bytes([number]) * 32 for number in range(1, 5)]
STAGES = (["layer0", "layer1", "layer2"], ["layer3"])


@pytest.fixture
def make(make_sides: Callable[..., Sides]) -> Callable[..., Sides]:
    def begin(*stages: Any, **options: Any) -> Sides:
        return make_sides(*(stages or STAGES), **options)

    return begin


def store(sides: Sides, name: str = "writer", hashes: Sequence[bytes] = HASHES) -> None:
    """Compute four blocks of fresh bytes and order their stores; the ranks copy, none answers."""
    request = request_of(name, hashes)
    assert sides.side.match(request, 0) == (0, False)
    sides.side.allocated(request, sides.allocate(name, 5), 0)
    sides.write(slice(None))
    sides.run(sides.orders({name: 4 * BLOCK_TOKENS + 1}))
    request.num_computed_tokens = 4 * BLOCK_TOKENS + 1
    sides.cache(request)
    sides.side.finished(request)
    sides.run(sides.orders())  # so few blocks are stored when there is nothing else to do


def load(
    sides: Sides, name: str = "reader", hashes: Sequence[bytes] = HASHES
) -> tuple[list[int], Any]:
    """Ask for the four blocks and order their load; returns where to, and the orders."""
    return sides.promise(request_of(name, hashes)), sides.orders()


@pytest.mark.parametrize("computes", [False, True])
def test_only_a_step_without_a_forward_waits_for_a_load(make, monkeypatch, computes):
    monkeypatch.setattr(worker_side, "_IDLE_SECONDS", 60.0)
    sides = make(["layer0"])
    store(sides)
    sides.answer(0)
    _, orders = load(sides)
    (rank,) = sides.ranks
    mover = rank._worker._routes["host", DEVICE]
    poll = mover.poll
    polls: list[list[Receipt]] = []

    def late() -> list[Receipt]:
        polls.append(poll() if len(polls) > 2 else [])
        return polls[-1]

    monkeypatch.setattr(mover, "poll", late)
    rank.begin(replace(orders, computes=computes))
    rank.poll()
    assert rank.finished.take("arrived") == (set() if computes else {"reader"})
    assert len(polls) == 1 if computes else len(polls) > 3


def test_a_pool_that_takes_nothing_back_stops_no_step(make, monkeypatch):
    sides = make()
    store(sides)
    sides.side._trip("test", RuntimeError("a mistake"))

    def refuse(blocks):
        raise RuntimeError("not mine")

    monkeypatch.setattr(sides.pool, "free_blocks", refuse)
    sides.run(sides.orders())
    sides.answer(0, 1)


def test_one_part_that_does_not_close_leaves_no_other_open(make, monkeypatch):
    sides = make()

    def refuse():
        raise RuntimeError("busy")

    monkeypatch.setattr(sides.side.serving.reports, "close", refuse)
    sides.side.close()
    assert sides.side.serving.scheduler._closed


def compute(sides: Any, name: str, hashes: list[bytes], **more: Any) -> Any:
    """A request that runs in two steps, the first of less than a block; none is stored yet."""
    request = request_of(name, hashes)
    for key, value in more.items():
        setattr(request, key, value)
    sides.side.match(request, 0)
    sides.side.allocated(request, sides.allocate(name, len(hashes) + 1), 0)
    held = sides.side.serving.engine.num_held
    for num_tokens in (5, len(hashes) * BLOCK_TOKENS - 4):
        sides.run(sides.orders({name: num_tokens}))
        request.num_computed_tokens += num_tokens
    sides.cache(request)
    assert sides.side.serving.engine.num_held == held
    return request


def test_a_name_used_again_at_once_is_another_request(make):
    """What the first of that name left is stored, and takes nothing from the second."""
    sides = make(["layer0"])
    store(sides)
    sides.answer(0)
    longer = [*HASHES, b"\x09" * 32]
    sides.side.finished(compute(sides, "again", longer))
    sides.run(sides.orders())
    _, orders = load(sides, "again")
    assert orders.loads.keys() == {"again"}
    sides.run(orders)
    assert sides.answer(0).finished_recving == {"again"}
    sides.run(sides.orders())
    assert sides.side.serving.engine.num_held == 0
    assert sides.side.match(request_of("longer", longer), 0) == (5 * BLOCK_TOKENS, True)


def test_a_step_without_requests_is_no_quiet_one(make):
    """It is when what waits is stored. Seen red with quiet steps that may have no request."""
    sides = make(["layer0"])
    request = compute(sides, "writer", HASHES)
    request.num_output_tokens = 1
    for _ in range(3):
        sides.run(sides.orders({"writer": 1}))
        request.num_computed_tokens += 1
    assert sides.orders({"writer": 1}) is sides.side.serving._quiet_orders
    sides.side.finished(request)
    assert not sides.orders({"other": 1}).plan.transfers
    assert sides.orders({"other": 1}) is sides.side.serving._quiet_orders
    orders = sides.orders()
    assert not orders.computes
    assert orders.plan.transfers[0].src_slots.tolist() == sides.tables["writer"][:4]


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("ends_first", [True, False])
def test_what_was_computed_before_a_reset_is_not_stored(make, reads, ends_first):
    """Though the request never asked us for anything, as those that want all their logprobs."""
    sides = make(["layer0"])
    request = compute(sides, "writer", HASHES, skip_reading_prefix_cache=not reads)
    if ends_first:
        sides.side.finished(request)
    sides.side.reset()
    if not ends_first:
        sides.side.finished(request)
    for _ in range(2):
        assert not sides.orders().plan.transfers
    assert sides.side.serving.engine.num_held == 0


def test_a_copy_that_never_ends_is_not_waited_for_again_and_again(make):
    """Its blocks stay held; but what else is copied later is no reason to wait for it."""
    sides = make(["layer0"])
    sides.side.finished(compute(sides, "stuck", HASHES))
    sides.pool.free_blocks([sides.pool.blocks[number] for number in sides.tables["stuck"]])
    sides.orders(), sides.orders()
    assert sides.side.has_work
    assert sides.side.frees_soon()
    for flight in sides.side.serving.scheduler.transfers.in_flight.values():
        flight.deadline = 0.0
    sides.side.serving.scheduler.transfers.next_deadline = 0.0
    sides.side.serving._settle(())
    sides.side.finished(compute(sides, "other", [bytes([n]) * 32 for n in range(20, 24)]))
    for _ in range(2):
        sides.run(sides.orders())
    assert sides.side.has_work
    sides.answer(0)
    assert sides.side.serving.engine.num_held == 4
    assert not sides.side.has_work
    assert not sides.side.frees_soon()


def pause_until(sides, monkeypatch, later):
    """Nobody stepped until then."""
    monkeypatch.setattr("kvferry.connectors.common.session.time.monotonic", lambda: later)
    monkeypatch.setattr(sides.side.serving.scheduler, "_clock", lambda: later)


@pytest.mark.parametrize("hears_old_news", [False, True])
def test_a_store_that_ended_during_a_pause_is_kept(make, monkeypatch, hears_old_news):
    """Though its time is long up: the rank could not say so before this step.

    Nor can what it said before the pause, and is heard only now. Seen red with deadlines looked at
    in the first step after a pause, and behind the first receipts after it.
    """
    sides = make(["layer0"])
    store(sides)
    pause_until(sides, monkeypatch, time.monotonic() + 3600)
    if hears_old_news:
        sides.side.serving.take(StepReceipts())
    sides.run(sides.orders())
    sides.answer(0)
    counts = sides.side.serving.scheduler.transfers.counts
    assert (counts.landed, counts.failed, counts.overdue) == (1, 0, 0)
    assert sides.side.match(request_of("reader", HASHES), 0) == (4 * BLOCK_TOKENS, True)


@pytest.mark.parametrize("between", [0.5, 20.0])
def test_a_store_that_does_not_end_is_late_one_step_after_a_pause(make, monkeypatch, between):
    """Seen red with time given for every pause: steps that are far apart are no end of them."""
    sides = make(["layer0"])
    store(sides)
    counts, later = sides.side.serving.scheduler.transfers.counts, time.monotonic() + 3600
    for seconds, overdue in ((0, 0), (between, 1)):
        pause_until(sides, monkeypatch, later + seconds)
        sides.orders()
        assert counts.overdue == overdue


def test_memory_that_grows_while_others_only_decode_is_told_of(make):
    """Seen red with ranks that had nothing to do in such steps before their memory was whole."""
    rank = make(["layer0"]).ranks[0]
    host = SimpleNamespace(num_slots=8, stats=lambda: SimpleNamespace(pinned_bytes=0))
    memory: Any = SimpleNamespace(host=host, tiers=(), close=lambda: None, activity=Activity())
    rank._memory, rank._is_grown, rank._reported_ready = memory, False, 0
    told = []
    for memory.ready_slots in (3, 3, 8, 8):
        rank.begin(StepOrders(computes=True, is_quiet=True))
        rank.after_forward()
        rank.poll()
        receipts = rank.take_receipts()
        told.append([count for _, count, _ in receipts.ready] if receipts is not None else [])
    assert told == [[3], [], [8], []]
    assert not rank.guard.reason


@pytest.mark.parametrize("moves", [False, True])
def test_kv_tensors_lose_their_memory_for_a_while(make, moves):
    """vLLM sleeps: copies end before, and addresses are read again after."""
    sides = make(["layer0"])
    wanted = sides.converse("a", hashes_of(1))
    (rank,) = sides.ranks
    request = sides.compute("b", hashes_of(2))
    sides.end(request)
    orders = sides.orders()
    rank.begin(orders)
    rank.unregister()
    assert not rank._loads
    assert not rank._later.transfers
    sides.kv[0]["layer0"][:] = np.nan  # whatever comes now reads nothing of before
    if moves:
        tensors = rank._find_cache.args[0]
        tensors["layer0"] = torch.from_numpy(np.zeros_like(sides.kv[0]["layer0"]))
    rank.restore()
    sides.answer(0)
    if moves:
        assert "other addresses" in rank.guard.reason
        return
    again = request_of("again", hashes_of(1))
    places = sides.promise(again)
    sides.step()
    assert_same(sides.bytes_at(places), wanted)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_sleep_keeps_what_fits_the_weights(make, weights, is_changed):
    """Also where layers change that a load does not look at; until a step runs, none is read."""
    sides = make(["layer0"])
    wanted = sides.converse("a", hashes_of(1))
    (rank,) = sides.ranks
    rank.unregister()
    assert sides.side.sleep()
    weights.others += is_changed
    weights.is_mapped = False
    rank.restore()
    weights.is_mapped = True
    again = request_of("again", hashes_of(1))
    places = sides.promise(again)
    told = sides.step()
    if is_changed:
        assert set(told.invalid_block_ids) == set(places)
        assert sides.side.match(request_of("later", hashes_of(1)), 0) == (0, False)
    else:
        assert_same(sides.bytes_at(places), wanted)


def test_a_sleep_forgets_everything_where_weights_cannot_be_seen(make):
    sides = make(["layer0"])
    sides.converse("a", hashes_of(1))
    assert sides.side.sleep()
    assert sides.side.match(request_of("later", hashes_of(1)), 0) == (0, False)


@pytest.mark.parametrize("is_sent", [False, True])
def test_what_is_given_back_before_it_was_copied_is_not_found(make, is_sent):
    """vLLM takes every device block back at once, and another request writes it meanwhile.

    It may do so again before the copy has ended. Seen red: blocks were released twice.
    """
    sides = make()
    request = sides.compute("writer", HASHES)
    sides.end(request)
    engine = sides.side.serving.engine
    orders = sides.orders() if is_sent else None
    assert engine.num_held == (4 if is_sent else 0)
    for _ in range(2):
        sides.side.give_back()
        assert engine.num_held == 0
        assert all(block.ref_cnt >= 0 for block in sides.pool.blocks)
    sides.write(slice(None))
    if orders is not None:
        sides.run(orders)
        sides.answer(0, 1)
    sides.rest()
    assert sides.side.match(request_of("reader", HASHES), 0) == (0, False)
    assert engine.num_held == 0
    sides.side.serving.scheduler.check_integrity()
    wanted = sides.converse("again", hashes_of(3))
    places = sides.promise(request_of("later", hashes_of(3)))
    sides.step()
    assert_same(sides.bytes_at(places), wanted)


def test_a_hold_for_a_load_outlasts_a_store_that_was_given_back_before(make):
    """Seen red: the next reset took the slow store's blocks back again, under the load."""
    sides = make()
    wanted = sides.converse("a", hashes_of(3, 3))
    sides.end(sides.compute("writer", HASHES))
    engine, storing = sides.side.serving.engine, sides.orders()
    sides.side.give_back()
    sides.pool.get_new_blocks(sides.pool.get_num_free_blocks() - 4)  # all but the store's
    reader = request_of("reader", hashes_of(3, 3))
    places, loading = sides.promise(reader), sides.orders()
    sides.side.give_back()
    assert engine.num_held == 3
    sides.free(reader)  # an abort
    assert all(sides.pool.blocks[number].ref_cnt == 1 for number in places)
    sides.run(storing)
    sides.answer(0, 1)
    assert engine.num_held == 3, "the store's landing ends no other hold"
    sides.run(loading)
    assert_same(sides.bytes_at(places), wanted)
    sides.answer(0, 1)
    assert engine.num_held == 0
    assert all(sides.pool.blocks[number].ref_cnt == 0 for number in places)


def test_a_server_keeps_its_first_prompt_while_host_memory_is_still_made_ready(make, monkeypatch):
    """Its first step may store two blocks, for which there are slots; the others wait for more."""
    ready = [2]
    monkeypatch.setattr(RankMemory, "ready_slots", property(lambda memory: ready[0]))
    sides = make(["layer0"])
    sides.side.serving._rests.store_step = BLOCK_TOKENS  # a running request stores in every step
    first = sides.compute("first", hashes_of(1))
    pool = sides.side.serving.scheduler.pool
    assert (pool.num_ready, pool.counts.cached) == (2, 2)
    ready[0] = 3
    sides.step({"first": 1})
    sides.step({"first": 1})
    assert pool.counts.cached == 3
    ready[0] = 1024
    sides.end(first)
    sides.rest()
    assert pool.counts.cached == 4
