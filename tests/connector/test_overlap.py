"""Loads told of before they have landed: when, to whom, and what is held until they have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.fakes.sides import Sides, request_of

from kvferry.connectors.common.overlap import OverlapDecider
from kvferry.connectors.vllm.connector import KvferryConnector
from kvferry.transfer.engine.cpu import CpuEngine
from kvferry.types import DEVICE, Outcome, Receipt

HASHES = [bytes([number]) * 32 for number in range(1, 5)]
STAGES = (["layer0", "layer1", "layer2"], ["layer3"])
LONG = 60.0


class Gate:
    """Parts of loads go through one by one, as the test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Semaphore(0)
        real = CpuEngine._move

        def gated(engine: Any, part: Any) -> None:
            if part.layout not in engine._jobs.layouts:
                assert self._open.acquire(timeout=LONG)
            real(engine, part)

        monkeypatch.setattr(CpuEngine, "_move", gated)

    def let(self, count: int = 100) -> None:
        self._open.release(count)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def make(make_sides: Callable[..., Sides], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sides]:
    """However short a load is here, it counts as worth the overlap."""
    monkeypatch.setattr(OverlapDecider, "MIN_SECONDS", 0.0)

    def begin(*stages: Any, **options: Any) -> Sides:
        sides = make_sides(*(stages or STAGES), overlap_loads="auto", **options)
        for _ in range(2):  # vLLM has called for every layer of a step before
            forward(sides)
        return sides

    return begin


def forward(sides: Sides, mode: str = "NONE", looks: Callable[[str], None] | None = None) -> None:
    """What vLLM's runners call around a forward pass, on every rank."""
    for rank, arrays in zip(sides.ranks, sides.kv, strict=True):
        early: Any = rank.layerwise
        rank._computes = True
        early.begin_forward(mode)
        for name in arrays:
            if mode and early.listens:
                early.before_layer(name)
            if looks is not None:
                looks(name)
            if mode and early.listens:
                early.after_layer(name)
        rank.after_forward()


def order(
    sides: Sides, name: str = "reader", hashes: Sequence[bytes] = HASHES
) -> tuple[list[int], Any]:
    """Ask for the four blocks and order their load; returns where to, and the orders."""
    return sides.promise(request_of(name, hashes)), sides.orders()


def is_early(orders: Any) -> bool:
    """Whether a request may run before one of these loads has landed."""
    return any(transfer.in_parts for transfer in orders.plan.transfers)


def begin(sides: Sides, orders: Any) -> None:
    for rank in sides.ranks:
        rank.begin(orders)
        rank.after_forward()


def test_a_pass_ends_although_its_step_was_reported_before(make):
    """Where tokens are drafted, vLLM ends a pass last. Seen red: it listened on in later steps."""
    sides = make(["layer0"])
    sides.rest()
    rank: Any = sides.ranks[0]
    connector: Any = SimpleNamespace(_worker=rank)
    while rank.is_busy:
        sides.step({"other": 1})
    rank.begin(sides.orders({"other": 1}))
    rank.layerwise.begin_forward("PIECEWISE")
    rank.take_receipts()
    assert rank.layerwise.listens
    assert not rank.is_busy
    KvferryConnector.wait_for_save(connector)
    assert not rank.layerwise.listens


def test_a_request_runs_while_its_load_lands(make, gate):
    sides = make()
    wanted = sides.converse("writer", HASHES)
    places, orders = order(sides)
    assert is_early(orders)
    begin(sides, orders)
    assert not sides.answer(0).finished_recving  # every rank must have it on its way
    assert sides.answer(1).finished_recving == {"reader"}
    assert np.isnan(sides.bytes_at(places)[0]["layer0"]).all()
    assert sides.side.serving.engine.num_held == 4
    gate.let()
    seen: dict[str, bool] = {}

    def look(name: str) -> None:
        for arrays, found in zip(sides.kv, wanted, strict=True):
            if name in arrays:
                seen[name] = np.array_equal(arrays[name][places], found[name])

    forward(sides, looks=look)
    assert seen == dict.fromkeys(("layer0", "layer1", "layer2", "layer3"), True)
    for rank in sides.ranks:
        rank._drain()
    told = sides.answer(0, 1)
    assert not told.finished_recving
    assert sides.side.serving.engine.num_held == 0


def test_by_default_a_load_lands_first_beside_other_requests(make):
    """One that loads, too, will run soon. Seen red with those alone counted that run already."""
    sides = make(["layer0", "layer1", "layer2"])
    other = [bytes([number]) * 32 for number in range(11, 15)]
    sides.converse("writer", HASHES)
    sides.converse("another", other)
    _, orders = order(sides)
    assert is_early(orders)
    _, orders = order(sides, "second", other)
    assert not is_early(orders)


def test_a_load_that_fails_on_one_rank_is_not_read(make):
    """vLLM waits for the other rank: it says that the blocks are not there."""
    sides = make()
    sides.converse("writer", HASHES)
    places, orders = order(sides)
    mover = sides.ranks[1]._worker._routes["host", DEVICE]
    failed: list[Receipt] = []
    mover.submit = lambda transfer: failed.append(
        Receipt(transfer.id, sides.ranks[1].rank, Outcome.FAILED, "tampered")
    )
    mover.poll = lambda: [failed.pop() for _ in range(len(failed))]
    begin(sides, orders)
    assert not sides.answer(0).finished_recving
    told = sides.answer(1)
    assert told.finished_recving == {"reader"}
    assert told.invalid_block_ids == set(places)


def test_changed_weights_are_seen_before_vllm_is_told(make, monkeypatch):
    sides = make(["layer0", "layer1"])
    sides.converse("writer", HASHES)
    places, orders = order(sides)
    (rank,) = sides.ranks
    begin(sides, orders)
    monkeypatch.setattr(rank._freshness, "is_stale", lambda epoch: True)
    rank._drain()
    told = sides.answer(0)
    assert told.finished_recving == {"reader"}
    assert told.invalid_block_ids == set(places)


def test_blocks_of_an_aborted_request_are_held_until_its_load_has_landed(make, gate):
    sides = make(["layer0", "layer1"])
    sides.converse("writer", HASHES)
    places, orders = order(sides)
    begin(sides, orders)
    assert sides.answer(0).finished_recving == {"reader"}
    sides.end(request_of("reader", HASHES))
    free = {block.block_id for block in sides.pool.get_new_blocks(sides.pool.get_num_free_blocks())}
    assert not free & set(places)
    gate.let()
    sides.ranks[0]._drain()
    sides.answer(0)
    assert sides.side.serving.engine.num_held == 0
    again = {
        block.block_id for block in sides.pool.get_new_blocks(sides.pool.get_num_free_blocks())
    }
    assert again >= set(places)
