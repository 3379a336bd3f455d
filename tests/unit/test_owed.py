"""What a request was answered is counted and told once, after its bytes were sent for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys
from tests.unit.test_hearing import Listener, made, settle

import kvferry
from kvferry.scheduler.request import Request
from kvferry.scheduler.scheduler import Scheduler
from kvferry.types import FIRST_RANK, Outcome, Plan, Receipt


@pytest.fixture
def served() -> tuple[Scheduler, Listener]:
    """A scheduler that has the first eight blocks of a chain, and what its policy hears."""
    scheduler, (listener,) = made()
    request = scheduler.open("first", keys(range(8)))
    request.store([list(range(8))], 128)
    settle(scheduler)
    request.end()
    scheduler.pool.catch_up()
    listener.heard.clear()
    return scheduler, listener


def words(scheduler: Scheduler, listener: Listener) -> list[str]:
    scheduler.pool.catch_up()
    return [each[0] for each in listener.heard]


def land(scheduler: Scheduler, plan: Plan) -> None:
    scheduler.settle(Receipt(each.id, FIRST_RANK, Outcome.OK) for each in plan.transfers)


def loading(scheduler: Scheduler) -> tuple[Request, Plan]:
    request = scheduler.open("r", keys(range(8)))
    assert request.match().num_tokens == 128
    request.load([list(range(8))])
    return request, scheduler.plan(counts=False)


def test_a_hit_is_answered_and_sent_for_before_anybody_is_told(
    served: tuple[Scheduler, Listener],
) -> None:
    scheduler, listener = served
    request, plan = loading(scheduler)
    assert len(plan.transfers) == 1
    assert list(scheduler.owing) == [request]
    assert words(scheduler, listener) == []
    scheduler.count_answered()
    assert words(scheduler, listener) == ["asked"]
    assert len(listener.heard[0][3]) == 8, "what it found"
    assert not scheduler.owing
    land(scheduler, plan)
    request.end()
    assert words(scheduler, listener) == ["asked", "answered"]


def test_of_a_chain_that_is_whole_all_is_told_while_it_loads(
    served: tuple[Scheduler, Listener],
) -> None:
    scheduler, listener = served
    request, plan = loading(scheduler)
    scheduler.count_answered(are_whole=True)
    assert words(scheduler, listener) == ["asked", "answered"]
    land(scheduler, plan)
    request.end()
    assert words(scheduler, listener) == ["asked", "answered"], "and only once"


def test_one_that_is_not_loaded_yet_may_still_be_heard_of(
    served: tuple[Scheduler, Listener],
) -> None:
    scheduler, listener = served
    request = scheduler.open("r", keys(range(8)))
    request.match()
    scheduler.count_answered(are_whole=True)
    assert words(scheduler, listener) == ["asked"]
    request.end()
    assert words(scheduler, listener) == ["asked", "answered"]


@pytest.mark.parametrize("end", ["end", "preempt", "reset", "expire", "stats", "explain", "plan"])
def test_whoever_comes_first_has_it_told(served: tuple[Scheduler, Listener], end: str) -> None:
    scheduler, listener = served
    request = scheduler.open("r", keys(range(8)))
    request.match()
    assert words(scheduler, listener) == []
    ways: dict[str, Any] = {
        "end": request.end,
        "preempt": request.preempt,
        "reset": scheduler.reset,
        "expire": lambda: request.expire(float("inf")),
        "stats": scheduler.stats,
        "explain": lambda: scheduler.explain("r"),
        "plan": scheduler.plan,
    }
    ways[end]()
    assert words(scheduler, listener)[:1] == ["asked"]
    assert not scheduler.owing
    found = scheduler.explain("r")
    assert found is not None
    assert found.host_tokens == 128
    assert scheduler.stats().queries == 1


def test_what_was_copied_is_remembered_though_it_landed_before_it_was_told(
    served: tuple[Scheduler, Listener],
) -> None:
    scheduler, _ = served
    _, plan = loading(scheduler)
    land(scheduler, plan)
    entry = scheduler.journal("r")
    assert entry is not None
    assert entry.explanation is not None
    assert [copy.num_blocks for copy in entry.copies] == [8]


def test_a_miss_that_ends_at_once_is_heard_to_its_end() -> None:
    scheduler, (listener,) = made()
    request = scheduler.open("r", keys(range(4)))
    request.match()
    request.end()
    assert words(scheduler, listener) == ["asked", "answered"]
    hearing = scheduler._parts.accounts._hearing
    assert hearing is not None
    assert not hearing._open, "nobody keeps it"


@pytest.fixture
def ferry() -> Iterator[kvferry.Ferry]:
    kv = [np.zeros((16, 64), dtype=np.uint8) for _ in range(2)]
    with kvferry.attach(
        kv, model="m", block_tokens=16, host="64KiB", load_policy="always", memory_curve="off"
    ) as ferry:
        yield ferry


def test_a_ferry_copies_first_and_counts_while_it_waits(ferry: kvferry.Ferry) -> None:
    tokens = np.arange(8 * 16)
    blocks = np.arange(8)
    assert ferry.wait(ferry.store(ferry.keys(tokens), blocks)).num_blocks == 8
    order: list[str] = []
    engine: Any = ferry._rank.engine
    accounts: Any = ferry._scheduler._parts.accounts
    for owner, name in ((engine, "submit"), (accounts, "found")):
        _note(order, owner, name)
    hit = ferry.match(ferry.keys(tokens))
    ticket = ferry.load(hit, blocks)
    assert order == ["submit"]
    assert ferry.wait(ticket).num_blocks == 8
    assert order == ["submit", "found"]
    assert not ferry._scheduler.requests
    assert not accounts._hearing._open
    assert ferry._scheduler.stats().hit_tokens == 128


def _note(order: list[str], owner: Any, name: str) -> None:
    call = getattr(owner, name)

    def noted(*arguments: Any) -> Any:
        order.append(name)
        return call(*arguments)

    setattr(owner, name, noted)
