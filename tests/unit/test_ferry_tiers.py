"""A ferry with tiers below its host memory: hits may be pending, and come back whole or not."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.fakes import tiers as fakes

import kvferry
from kvferry.errors import ConfigError
from kvferry.scheduler.journal import Reason
from kvferry.tiers.movers import SharedMover
from kvferry.types import Rank

BLOCKS, TOKENS, LAYERS = 80, 4, 3
SLOT = LAYERS * 2 * TOKENS * 8
HOST_BLOCKS, CHAT_BLOCKS, CHATS = 24, 6, 10
MINE = "tests.fakes.tiers:open_mine:999"
Open = Callable[..., kvferry.Ferry]


@pytest.fixture
def attach() -> Iterator[Open]:
    ferries: list[kvferry.Ferry] = []
    fakes.opened.clear()

    def begin(tiers: Any = MINE, **more: Any) -> kvferry.Ferry:
        rng = np.random.default_rng(7)
        kv = [rng.integers(0, 255, (BLOCKS, 2, TOKENS, 8), np.uint8) for _ in range(LAYERS)]
        settings = {"host": f"{HOST_BLOCKS * SLOT}B", "load_policy": "always", **more}
        ferry = kvferry.attach(kv, model="m", block_tokens=TOKENS, tiers=tiers, **settings)
        ferries.append(ferry)
        ferry.kv = kv  # type: ignore[attr-defined]
        return ferry

    yield begin
    for ferry in ferries:
        ferry.close()
    fakes.opened.clear()


def tier() -> Any:
    return fakes.opened[-1][1]


def chat(ferry: kvferry.Ferry, number: int) -> kvferry.Keys:
    return ferry.keys(range(1000 * number, 1000 * number + CHAT_BLOCKS * TOKENS))


def content(ferry: Any, blocks: list[int]) -> bytes:
    return b"".join(tensor[blocks].tobytes() for tensor in ferry.kv)


def settle(ferry: kvferry.Ferry) -> None:
    """Poll until nothing moves."""
    give_up = time.monotonic() + 20
    while ferry._scheduler.num_queued or ferry._scheduler.num_in_flight:
        ferry.poll()
        assert time.monotonic() < give_up
        time.sleep(0.0005)


def fill(ferry: kvferry.Ferry) -> list[bytes]:
    """Store more conversations than the host holds; returns their bytes."""
    wanted = []
    for number in range(CHATS):
        blocks = list(range(number * CHAT_BLOCKS, (number + 1) * CHAT_BLOCKS))
        done = ferry.wait(ferry.store(chat(ferry, number), blocks))
        assert done.ok
        assert done.num_blocks == CHAT_BLOCKS
        wanted.append(content(ferry, blocks))
        settle(ferry)
    return wanted


def bring(ferry: kvferry.Ferry, number: int) -> tuple[int, bytes]:
    hit = ferry.await_hit(ferry.match(chat(ferry, number)), 20)
    assert not hit.is_pending
    places = list(range(70, 70 + len(hit)))
    done = ferry.wait(ferry.load(hit, places))
    assert done.ok, done.reason
    assert done.num_blocks == len(hit)
    return len(hit), content(ferry, places)


def assert_nothing_left(ferry: kvferry.Ferry) -> None:
    settle(ferry)
    assert ferry._scheduler.requests == ()
    assert not len(ferry._pending)
    assert set(ferry.stats().leases.values()) == {0}
    ferry._scheduler.check_integrity()


def test_a_hit_is_pending_until_its_blocks_are_up(attach):
    ferry = attach()
    wanted = fill(ferry)
    gate = threading.Event()
    tier().fault = lambda way, key: gate.wait(20)
    hit = ferry.match(chat(ferry, 0))
    assert hit.is_pending
    assert len(hit) == 0
    assert ferry.poll() == []  # it is nobody's ticket
    assert ferry.await_hit(hit, 0).is_pending
    gate.set()
    again = ferry.await_hit(hit, 20)
    assert len(again) == CHAT_BLOCKS
    assert ferry.await_hit(again) is again
    places = list(range(70, 76))
    assert ferry.wait(ferry.load(again, places)).num_blocks == CHAT_BLOCKS
    assert content(ferry, places) == wanted[0]
    assert_nothing_left(ferry)


# -- hits that nobody takes -----------------------------------------------------------------------


def pending(ferry: kvferry.Ferry) -> tuple[kvferry.Hit, threading.Event]:
    fill(ferry)
    gate = threading.Event()
    tier().fault = lambda way, key: gate.wait(20)
    hit = ferry.match(chat(ferry, 0))
    assert hit.is_pending
    return hit, gate


@pytest.mark.parametrize("sent", [False, True])
def test_a_pending_hit_that_is_released_leaves_nothing(attach, sent):
    ferry = attach()
    hit, gate = pending(ferry)
    if sent:
        ferry.poll()
    ferry.release(hit)
    assert ferry._scheduler.requests == ()
    gate.set()
    assert len(ferry.await_hit(hit, 20)) == 0
    assert_nothing_left(ferry)


def test_a_pending_hit_that_is_dropped_is_let_go_in_time(attach):
    ferry = attach(match_deadline="50ms")
    hit, gate = pending(ferry)
    del hit
    gc.collect()
    gate.set()
    settle(ferry)
    time.sleep(0.06)
    ferry.poll()
    assert_nothing_left(ferry)


def test_a_reset_ends_pending_hits_and_reaches_the_tier(attach):
    ferry = attach()
    hit, gate = pending(ferry)
    ferry.poll()
    ferry.reset()
    gate.set()
    assert not tier()._blocks  # told at once: it may outlive us
    assert not ferry.await_hit(hit, 20).is_pending
    assert_nothing_left(ferry)
    assert bring(ferry, 0) == (0, b"")


# -- tiers on a bad day --------------------------------------------------------------------------


def test_a_tier_that_hangs_is_a_miss_by_its_deadline(attach, monkeypatch):
    kept: list[np.ndarray[Any, Any]] = []
    monkeypatch.setattr("kvferry.tiers.movers._abandoned_memory", kept)
    ferry = attach(promote_deadline="50ms", tier_flush="50ms")
    _, gate = pending(ferry)
    ferry._rank.tiers["tiers"]._close_seconds = 0.05
    assert bring(ferry, 0) == (0, b"")
    rows = ferry._rank.host.tier.rows
    ferry.close()  # returns, and leaves the memory that the medium may still write to
    mover = ferry._rank.tiers["tiers"]
    assert mover.is_stuck
    assert any(np.shares_memory(rows, each) for each in kept)
    assert SharedMover(mover, rank=Rank(0), num_ranks=2).is_stuck
    rows[0] = 1
    gate.set()
    for thread in tier()._threads:  # they touch the memory, which this test gives back
        thread.join(10)


@pytest.mark.parametrize(
    ("factory", "reason"),
    [("open_mine:999", Reason.TIER_UNAVAILABLE), ("open_keyed", Reason.EVICTED)],
)
def test_a_tier_that_is_away_is_a_miss_that_says_so_and_comes_back(attach, factory, reason):
    ferry = attach(f"tests.fakes.tiers:{factory}")
    wanted = fill(ferry)
    tier().go_away("its cable was pulled")
    ferry.poll()
    hit = ferry.match(chat(ferry, 0))
    assert not hit.is_pending
    assert not len(hit)
    why = ferry.explain(hit)
    assert why is not None
    assert why.reason is reason
    assert why.tiers_away == ("tiers: rank 0: its cable was pulled",)
    assert ferry.stats().ailments == {"tiers": "rank 0: its cable was pulled"}
    tier().come_back()
    ferry.poll()
    assert bring(ferry, 0) == (CHAT_BLOCKS, wanted[0])


def test_a_tier_that_cannot_be_opened_leaves_nothing_behind(attach):
    before = threading.active_count()
    with pytest.raises(ConfigError, match="the cupboard is locked"):
        attach("tests.fakes.tiers:open_never")
    with pytest.raises(ConfigError, match=f"hold no block of {SLOT} bytes"):
        attach("memory:100B")
    assert threading.active_count() == before
