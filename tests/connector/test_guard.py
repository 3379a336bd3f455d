"""An exception of ours in a hook: vLLM goes on, waits for nobody, and gets every block back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from tests.fakes.sides import BLOCK_TOKENS, NUM_BLOCKS, Sides, hashes_of, request_of

LATE = 5
"""Whose conversation is stored, and nobody has asked for it yet."""


class Busy(NamedTuple):
    """Two ranks in the midst of it. One runs, one waits for a load no rank has been told of.

    And one has ended while its blocks are being copied.
    """

    sides: Sides
    runs: Any
    waits: Any


@pytest.fixture
def busy(make_sides: Callable[..., Sides]) -> Busy:
    sides = make_sides(["layer0", "layer1"], ["layer2"])
    for tag in (1, LATE):
        sides.end(sides.compute("old", hashes_of(tag)))
        sides.rest()
    runs, ended = sides.compute("runs", hashes_of(2)), sides.compute("ended", hashes_of(3))
    sides.end(ended)
    sides.run(sides.orders())
    waits = request_of("waits", hashes_of(1))
    sides.promise(waits)
    assert sides.side.serving is not None
    assert sides.side.serving.engine.num_held == 8, "those being stored, those to be loaded"
    return Busy(sides, runs, waits)


def match(busy: Busy) -> None:
    assert busy.sides.side.match(request_of("new", hashes_of(4)), 0) == (0, False)


def orders(busy: Busy) -> None:
    # Where this trips, its very answer is what vLLM is to hear: nothing may be lost by looking.
    loads = busy.sides.orders({"runs": 1}).loads
    busy.sides.side._unkept.update(loads)


def take(busy: Busy) -> None:
    busy.sides.answer(0)


def finished(busy: Busy) -> None:
    busy.sides.end(busy.runs)


def reset(busy: Busy) -> None:
    assert busy.sides.side.reset()


def frees_soon(busy: Busy) -> None:
    assert busy.sides.side.frees_soon() is False


def take_stats(busy: Busy) -> None:
    busy.sides.side.serving._num_quiet = 0  # type: ignore[union-attr]
    assert busy.sides.side.take_stats() is None


HOOKS = [
    (match, "kvferry.scheduler.scheduler.Scheduler.open"),
    (orders, "kvferry.scheduler.scheduler.Scheduler.plan"),
    (take, "kvferry.scheduler.scheduler.Scheduler.settle"),
    (finished, "kvferry.scheduler.request.Request.leave"),
    (reset, "kvferry.scheduler.scheduler.Scheduler.reset"),
    (frees_soon, "kvferry.connectors.vllm.engine.VllmEngine.keeps_free_blocks"),
    (take_stats, "kvferry.connectors.common.reports.Reports.take_stats"),
]


def break_it(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def fail(*args: object, **options: object) -> Any:
        raise RuntimeError("a mistake")

    is_property = what.endswith("keeps_free_blocks")
    monkeypatch.setattr(what, property(fail) if is_property else fail)


def assert_all_is_given_back(sides: Sides, *, waiting: dict[str, list[int]]) -> None:
    """Everybody who waits is told that nothing comes, and blocks are free once no rank copies."""
    side = sides.side
    assert side.serving is None
    assert side.guard.reason
    blocks = side.former.engine  # type: ignore[union-attr]
    assert side.has_work, "vLLM must step for those who wait"
    orders = sides.orders()
    assert {name: list(load.lost) for name, load in orders.loads.items()} == waiting
    assert orders.drain
    assert not orders.plan.transfers
    num_held = blocks.num_held
    sides.run(orders)
    told = sides.answer(0)
    assert not told.finished_recving
    assert told.invalid_block_ids == {block for ids in waiting.values() for block in ids}
    assert blocks.num_held == num_held, "the other rank may still copy"
    told = sides.answer(1)
    assert told.finished_recving == set(waiting)
    assert blocks.num_held == 0
    assert not side.has_work
    assert not sides.orders().drain
    for name in list(sides.tables):
        sides.end(request_of(name, hashes_of(1)))
    assert sides.pool.get_num_free_blocks() == NUM_BLOCKS - 1


@pytest.mark.parametrize(("hook", "what"), HOOKS, ids=[hook.__name__ for hook, _ in HOOKS])
def test_a_hook_that_fails(busy, monkeypatch, hook, what):
    break_it(monkeypatch, what)
    hook(busy)
    assert busy.sides.side.guard.reason == f"{hook.__name__}: RuntimeError: a mistake"
    waits = busy.sides.tables["waits"][:4]
    assert_all_is_given_back(busy.sides, waiting={"waits": waits})


def test_an_allocation_that_fails_tells_of_the_blocks_it_was_for(busy, monkeypatch):
    """Those vLLM had itself are not among them: it would compute them again for nothing."""
    sides = busy.sides
    late = request_of("late", hashes_of(LATE))
    assert sides.side.match(late, BLOCK_TOKENS) == (3 * BLOCK_TOKENS, True)
    break_it(monkeypatch, "kvferry.scheduler.request.Request.load")
    sides.side.allocated(late, sides.allocate("late", 5), 3 * BLOCK_TOKENS)
    waiting = {"waits": sides.tables["waits"][:4], "late": sides.tables["late"][1:4]}
    assert_all_is_given_back(sides, waiting=waiting)


def test_what_was_promised_before_and_allocated_after_is_told_of(busy):
    sides = busy.sides
    late = request_of("late", hashes_of(LATE))
    assert sides.side.match(late, BLOCK_TOKENS) == (3 * BLOCK_TOKENS, True)
    sides.side._trip("test", RuntimeError("a mistake"))
    sides.side.allocated(late, sides.allocate("late", 5), 3 * BLOCK_TOKENS)
    waiting = {"waits": sides.tables["waits"][:4], "late": sides.tables["late"][1:4]}
    assert_all_is_given_back(sides, waiting=waiting)


def test_a_load_that_ranks_were_told_of_still_comes(busy):
    sides = busy.sides
    orders = sides.orders()
    assert orders.loads.keys() == {"waits"}
    sides.run(orders)
    sides.side._trip("test", RuntimeError("a mistake"))
    told = sides.answer(0, 1)
    assert told.finished_recving == {"waits"}
    assert not told.invalid_block_ids
    assert_is_out_of_service(sides)


def assert_is_out_of_service(sides: Sides) -> None:
    """It takes no part any more, and says so to whoever asks."""
    side = sides.side
    assert side.match(request_of("new", hashes_of(1)), 0) == (0, False)
    assert not sides.orders({"new": 5}).plan.transfers
    side.finished(request_of("new", hashes_of(1)))
    assert side.reset()
    assert not side.frees_soon()
    assert list(side.take_events()) == []
    assert side.banner() == f"kvferry is idle: {side.guard.reason}"


def test_it_does_not_come_back(busy):
    """Though vLLM binds its pool again, or a rank is heard again."""
    side = busy.sides.side
    side._trip("test", RuntimeError("the first"))
    side._trip("test", RuntimeError("the second"))
    side.bind(side._make_engine)
    side.meet_ranks([rank.shape for rank in busy.sides.ranks])
    assert side.guard.reason == "test: RuntimeError: the first"
    assert_is_out_of_service(busy.sides)


def test_a_start_that_fails_is_no_service(make_sides, monkeypatch):
    break_it(monkeypatch, "tests.fakes.sides.VllmEngine")
    sides = make_sides(["layer0"])
    assert sides.side.guard.reason == "start: RuntimeError: a mistake"
    assert_is_out_of_service(sides)


def test_a_rank_that_fails_ends_every_wait(busy):
    """Its part of the load will not come: so the load has failed, on all."""
    sides = busy.sides

    def fail(plan: Any) -> None:
        raise RuntimeError("a mistake")

    sides.ranks[1]._worker.execute = fail
    told = sides.step()
    assert told.finished_recving == {"waits"}
    assert told.invalid_block_ids == set(sides.tables["waits"][:4])
    assert sides.ranks[1].guard.reason
    assert not sides.side.guard.reason
    for request in (busy.waits, busy.runs):
        sides.end(request)
    sides.rest()
    assert sides.side.serving is not None
    assert sides.side.serving.engine.num_held == 0


def test_ranks_that_cannot_look_what_has_ended(busy, monkeypatch):
    """The copies are waited for instead: whoever waits is told, and the blocks come back."""
    break_it(monkeypatch, "kvferry.worker.Worker.poll")
    sides, waits = busy.sides, busy.sides.tables["waits"][:4]
    sides.run(sides.orders({"runs": 1}))
    told = [sides.answer(0), sides.answer(1)]
    assert told[1].finished_recving == {"waits"}
    assert {block for each in told for block in each.invalid_block_ids} <= set(waits)
    assert sides.side.serving.engine.num_held == 0
    sides.end(busy.runs)
    sides.end(busy.waits)
    assert sides.pool.get_num_free_blocks() == NUM_BLOCKS - 1
