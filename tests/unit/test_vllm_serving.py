"""kvferry in vLLM's scheduler, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.fakes.vllm_side import BLOCK_TOKENS, FakeVllm

from kvferry.reach import FullAttention, SlidingWindow
from kvferry.vllm.events import EventLog

HASHES = [bytes([number]) * 32 for number in range(1, 9)]


def words() -> Any:
    def told(**facts: Any) -> Any:
        return SimpleNamespace(**facts)

    return SimpleNamespace(stored=told, removed=told, medium="CPU", name=lambda name: name)


def listen(vllm: FakeVllm) -> EventLog:
    scheduler = vllm.serving.scheduler
    log = EventLog(scheduler.pool, scheduler.groups, BLOCK_TOKENS, words())
    vllm.serving.reports.events = log
    return log


def test_routers_hear_of_blocks_that_are_stored_when_a_request_ends() -> None:
    """Seen red: what windows store at the end was stored, and no router ever told."""
    vllm = FakeVllm(FullAttention(BLOCK_TOKENS), SlidingWindow(BLOCK_TOKENS, window=64))
    events = listen(vllm)
    request = vllm.request("a", HASHES[:3])
    assert vllm.side.match(request, 0) == (0, False)
    vllm.allocate(request)
    request.num_tokens -= 1
    vllm.answer(vllm.orders({"a": 1}, new=["a"]))  # nothing is whole yet
    request.num_computed_tokens = 3 * BLOCK_TOKENS
    vllm.free(request)
    orders = vllm.orders()
    assert sum(len(transfer) for transfer in orders.plan.transfers) == 6
    vllm.answer(orders)
    assert vllm.num_held == 0
    told = list(events.take())
    assert sorted((each.group_idx, each.block_hashes[0]) for each in told) == [
        (group, name) for group in (0, 1) for name in HASHES[:3]
    ]


def test_whoever_asks_from_another_thread_changes_nothing() -> None:
    """Seen red: a scrape counted misses, and went on with rests, beside the engine's thread."""
    vllm = FakeVllm()
    serving = vllm.serving
    serving.reports._serve("127.0.0.1", 0)
    request = vllm.request("a", HASHES[:3])
    assert vllm.side.match(request, 0) == (0, False)
    ferried = serving._tracked["a"].ferried
    assert ferried in serving.scheduler.owing
    try:
        source = serving.reports._endpoint._source  # the engine does not come by: it looks itself
        assert source.snapshot().stats.queries == 0
        assert source.recent() == []
        assert source.explain("a") is None
        assert ferried in serving.scheduler.owing
        vllm.allocate(request)
        vllm.orders({"a": 49}, new=["a"])
    finally:
        vllm.side.close()
    assert ferried not in serving.scheduler.owing
    assert serving.scheduler.onlooker.stats().queries == 1
