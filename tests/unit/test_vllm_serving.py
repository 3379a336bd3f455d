"""kvferry in vLLM's scheduler, without vLLM: what is told, held and given back, and when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.ports import free_port
from tests.fakes.vllm_side import BLOCK_TOKENS, FakeVllm

from kvferry.cache.reach import FullAttention, Group, SlidingWindow
from kvferry.connectors.common.events import BlockEvents
from kvferry.connectors.vllm import events as events_form
from kvferry.connectors.vllm.events import VllmEvents
from kvferry.scheduler import stores
from kvferry.telemetry import DEFAULT_PORT
from kvferry.tools.top.scrape import fetch

Serve = Callable[..., FakeVllm]

HASHES = [bytes([number]) * 32 for number in range(1, 9)]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes vLLMs that end with the test."""
    with ExitStack() as ends:

        def made(*groups: Group, **settings: Any) -> FakeVllm:
            vllm = FakeVllm(*groups, **settings)
            ends.callback(vllm.side.close)
            return vllm

        yield made


def listen(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> BlockEvents:
    kinds = SimpleNamespace(
        BlockStored=SimpleNamespace, BlockRemoved=SimpleNamespace, MEDIUM_CPU="CPU"
    )
    monkeypatch.setattr(events_form, "vllm_events", lambda: (kinds, lambda name: name))
    scheduler = vllm.serving.scheduler
    log = BlockEvents(scheduler.pool, scheduler.groups, VllmEvents((0, 1), BLOCK_TOKENS))
    vllm.serving.reports.events = log
    return log


def test_routers_hear_of_blocks_that_are_stored_when_a_request_ends(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: what windows store at the end was stored, and no router ever told."""
    vllm = serve(FullAttention(BLOCK_TOKENS), SlidingWindow(BLOCK_TOKENS, window=64))
    events = listen(vllm, monkeypatch)
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


def test_a_question_from_another_thread_changes_nothing(serve: Serve) -> None:
    """Seen red: a scrape counted misses, and went on with rests, beside the engine's thread."""
    vllm = serve(metrics_port=free_port())
    serving = vllm.serving
    request = vllm.request("a", HASHES[:3])
    assert vllm.side.match(request, 0) == (0, False)
    waiting = len(serving.scheduler.book.events)
    assert waiting
    try:
        source = serving.reports._endpoint._source  # the engine does not come by: it looks itself
        assert source.snapshot().stats.queries == 0
        assert source.recent() == []
        assert source.explain("a") is None
        assert len(serving.scheduler.book.events) == waiting
        vllm.allocate(request)
        vllm.orders({"a": 49}, new=["a"])
    finally:
        vllm.side.close()
    assert not len(serving.scheduler.book.events)
    assert serving.scheduler.onlooker.stats().queries == 1


@pytest.mark.parametrize("port", ["auto", None])
def test_a_server_serves_its_metrics_on_a_free_port_unless_told_not_to(
    serve: Serve, caplog: pytest.LogCaptureFixture, port: str | None
) -> None:
    with caplog.at_level(logging.INFO, logger="kvferry"):
        first, second = serve(metrics_port=port), serve(metrics_port=port)
    ends = [vllm.serving.reports._endpoint for vllm in (first, second)]
    if port is None:
        assert ends == [None, None]
        return
    assert DEFAULT_PORT <= ends[0].port < ends[1].port
    assert f"serves its metrics at {ends[1].url}, because port {DEFAULT_PORT} is taken" in (
        caplog.text
    )
    assert b"kvferry_lookups_total 0" in fetch(f"{ends[1].url}metrics")


def decoding(vllm: FakeVllm, name: str) -> Any:
    """A request that only decodes: the next step is a quiet one."""
    request = vllm.request(name, HASHES[:1])
    vllm.side.match(request, 0)
    vllm.allocate(request)
    vllm.answer(vllm.orders({name: 1}, new=[name]))
    request.num_computed_tokens, request.num_output_tokens = 2, 1
    for _ in range(4):
        vllm.orders({name: 1})
    assert vllm.orders({name: 1}).is_quiet
    return request


def test_a_reset_is_told_with_the_next_step_and_quiet_ones_stay_with_it(serve: Serve) -> None:
    vllm = serve()
    decoding(vllm, "a")
    vllm.side.reset()
    orders = vllm.orders({"a": 1})
    assert not orders.is_quiet
    assert vllm.side.serving is not None
    epoch = vllm.side.serving.scheduler.epoch
    assert orders.epoch == epoch != 0
    quiet = [vllm.orders({"a": 1}) for _ in range(3)]
    assert quiet[-1].is_quiet
    assert {each.epoch for each in quiet} == {epoch}


def test_what_is_held_on_the_device_is_not_forgotten_in_quiet_steps(serve: Serve) -> None:
    vllm = serve(num_blocks=200)
    request = vllm.request("a", HASHES)
    vllm.side.match(request, 0)
    vllm.allocate(request)
    vllm.answer(vllm.orders({"a": request.num_tokens}, new=["a"]))
    request.num_computed_tokens = request.num_tokens
    decoding(vllm, "b")
    for block in vllm.pool.blocks[1:]:  # vLLM evicts from now on: nothing may wait for a next turn
        block.block_hash = block.block_hash or b"%d" % block.block_id
    vllm.orders({"b": 1})
    vllm.serving.engine.begin_step()
    vllm.free(request)
    assert vllm.num_held == len(HASHES)
    orders = vllm.orders({"b": 1})
    if not orders.plan.transfers:  # it may wait this long, for others to be on their way
        time.sleep(2 * stores.SOON_SECONDS)
        orders = vllm.orders({"b": 1})
    assert [len(transfer) for transfer in orders.plan.transfers] == [len(HASHES)]
    vllm.answer(orders)
    assert vllm.num_held == 0
