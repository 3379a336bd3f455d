"""A server that comes back over tiers that outlived it: what all ranks still have is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.connector.test_tiers import (
    CHAT_BLOCKS,
    HOST_BLOCKS,
    ask,
    chat,
    hashes,
    loaded,
    scheduler_of,
    settle,
    step,
)
from tests.connector.test_tiers import make as make  # a fixture
from tests.fakes import lasting
from tests.fakes.sides import BLOCK_TOKENS, Sides, assert_same, request_of

from kvferry.core.identity import adopt
from kvferry.core.keys import Key

SHELF = "shelf=tests.fakes.lasting:open_shelf:there/200"
Make = Callable[..., Sides]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    lasting.shelves.clear()
    yield
    lasting.shelves.clear()


def end(sides: Sides) -> None:
    settle(sides)
    for rank in sides.ranks:
        rank.close()
    sides.side.close()


def live(make: Make, num_ranks: int, **options: Any) -> tuple[Sides, list[Any]]:
    """One life; its conversations are on the shelves afterwards."""
    sides = make(num_ranks, tiers=SHELF, tier_write="through", **options)
    wanted = [chat(sides, number) for number in range(8)]
    return sides, wanted


def check_loaded(sides: Sides, wanted: list[Any], first: int = 0) -> None:
    """Every conversation from the first on comes back whole."""
    for number, bytes_then in enumerate(wanted, first):
        num_blocks, found = loaded(sides, number)
        assert num_blocks == CHAT_BLOCKS
        assert_same(found, bytes_then)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_server_that_comes_back_is_warm(make: Make, num_ranks: int) -> None:
    sides, wanted = live(make, num_ranks)
    end(sides)
    sides = make(num_ranks, tiers=SHELF, tier_write="through")
    check_loaded(sides, wanted)
    scheduler_of(sides).check_integrity()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_at_rest_what_only_the_host_holds_goes_down(make: Make, num_ranks: int) -> None:
    """vLLM steps while we say so: then nothing is lost with the process, however it ends."""
    sides = make(num_ranks, tiers=SHELF)
    wanted = [chat(sides, number) for number in range(8)]
    assert not sides.side.has_work
    assert all(len(lasting.shelves["there", rank]) == 8 * CHAT_BLOCKS for rank in range(num_ranks))
    sides = make(num_ranks, tiers=SHELF)
    check_loaded(sides, wanted)
    scheduler_of(sides).check_integrity()


def test_a_producer_hands_its_prompts_to_a_consumer(make: Make) -> None:
    """By a store that outlives both: the one never loads, the other never stores."""
    sides, wanted = live(make, 2, role="kv_producer")
    assert loaded(sides, 0)[0] == 0
    assert scheduler_of(sides).stats().hit_tokens == 0
    end(sides)
    sides = make(2, tiers=SHELF, tier_write="through", role="kv_consumer")
    check_loaded(sides, wanted)
    chat(sides, 50)
    end(sides)
    assert all(len(lasting.shelves["there", rank]) == 8 * CHAT_BLOCKS for rank in range(2))


def test_what_a_rank_has_lost_no_rank_is_asked_for(make: Make) -> None:
    sides, wanted = live(make, 2)
    end(sides)
    rng = np.random.default_rng(11)
    for rank in range(2):
        lasting.lose(lasting.shelves["there", rank], 0.2, rng)
    there = [set(lasting.shelves["there", rank]) for rank in range(2)]
    sides = make(2, tiers=SHELF, tier_write="through")
    assert scheduler_of(sides).stats().tiers["shelf"].cached == len(there[0] & there[1])
    for number in range(8):
        num_blocks, found = loaded(sides, number)
        if num_blocks:
            assert_same(found, wanted[number])
    assert scheduler_of(sides).stats().lost_blocks == 0, "nobody was asked for what it has not"
    # What not all had is written again, elsewhere or in place, and the third life finds it once.
    again = [chat(sides, number) for number in range(20, 24)]
    end(sides)
    sides = make(2, tiers=SHELF, tier_write="through")
    check_loaded(sides, again, first=20)


def test_a_reset_is_not_undone_by_a_restart(make: Make) -> None:
    sides, _ = live(make, 2)
    sides.side.reset()
    settle(sides)
    assert not any(lasting.shelves.values())
    chat(sides, 30)
    end(sides)
    sides = make(2, tiers=SHELF, tier_write="through")
    assert [loaded(sides, number)[0] for number in (*range(8), 30)] == [0] * 9


def test_what_is_recovered_is_told_once_and_not_kept(make: Make) -> None:
    sides, _ = live(make, 2)
    end(sides)
    sides = make(2, tiers=SHELF)
    shapes = [*(rank.shape for rank in sides.ranks), *sides.side._shapes.values()]
    assert all(tier.opened is None for shape in shapes for tier in shape.tiers)
    step(sides)  # the shapes come again with the first step, without them
    assert scheduler_of(sides).stats().tiers["shelf"].cached == 8 * CHAT_BLOCKS


class StubWeights:
    """Weights whose sums are what a test says."""

    now = 1
    others = 0
    """Of the weights that only digests of all of them cover."""
    is_mapped = True

    def mark(self) -> None:
        """Nothing is queued."""

    def begin(self) -> Any:
        assert self.is_mapped, "a card would fault"
        sums = (self.now,)
        return SimpleNamespace(result=lambda: sums, is_done=True)

    def digests_of_all(self) -> tuple[int, ...]:
        assert self.is_mapped, "a card would fault"
        return (self.now, self.others)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> StubWeights:
    stub = StubWeights()
    monkeypatch.setattr("tests.fakes.sides.weights_of_caller", lambda device: stub)
    return stub


def test_weights_that_stay_are_no_hindrance(make: Make, weights: StubWeights) -> None:
    test_a_server_that_comes_back_is_warm(make, 2)


def names(sides: Sides, number: int) -> set[Key]:
    """What the next life of a server will call this conversation's blocks."""
    assert sides.side.serving is not None
    engine: Any = sides.side.serving.engine
    return set(adopt(engine._namespace, hashes(number)))


@pytest.mark.parametrize("is_reset", [True, False])
def test_blocks_of_other_weights_never_outlive_the_server(
    make: Make, weights: StubWeights, is_reset: bool
) -> None:
    sides, _ = live(make, 2)
    settle(sides)
    before = [dict(lasting.shelves["there", rank]) for rank in range(2)]
    weights.now = 2
    if is_reset:
        sides.side.reset()
    for number in range(40, 44):
        chat(sides, number)
    after = [lasting.shelves["there", rank] for rank in range(2)]
    assert scheduler_of(sides).epoch, "all was forgotten"
    for then, now in zip(before, after, strict=True):
        assert then
        assert names(sides, 1) <= {key for key, _ in then.values()}
        written = {key for key, _ in now.values()}
        for number in range(40, 44):
            assert not written & names(sides, number), "the next life would ask for them"
    end(sides)
    weights.now = 1
    sides = make(2, tiers=SHELF, tier_write="through")
    assert [loaded(sides, number)[0] for number in range(40, 44)] == [0] * 4


def test_weights_that_came_after_the_store_was_named_are_noticed(
    make: Make, weights: StubWeights
) -> None:
    """As where a server begins with random weights and is given its own before it serves."""
    sides, _ = live(make, 2)
    end(sides)
    sides = make(2, tiers=SHELF, tier_write="through")
    weights.now = 2
    with pytest.raises(AssertionError, match="invalid_block_ids"):
        loaded(sides, 0)  # vLLM is told that nothing came
    assert [loaded(sides, number)[0] for number in range(1, 8)] == [0] * 7
    assert scheduler_of(sides).epoch
    step(sides)
    assert not any(
        names(sides, 1) & {key for key, _ in shelf.values()} for shelf in lasting.shelves.values()
    )


def test_a_request_in_the_queue_has_its_blocks_when_its_turn_comes(make: Make) -> None:
    sides, wanted = live(make, 2)
    end(sides)
    sides = make(2, tiers=SHELF, tier_write="through")
    request = request_of("reader", hashes(3))
    sides.side.expect(request)
    give_up = time.monotonic() + 30
    # The host is small: an eighth of it is for those who wait, the rest comes when it asks.
    while scheduler_of(sides).pool.counts.cached < HOST_BLOCKS // 8:
        assert time.monotonic() < give_up, scheduler_of(sides).pool.counts
        step(sides)
    for _ in range(20):
        step(sides)
    assert scheduler_of(sides).pool.counts.cached == HOST_BLOCKS // 8
    num_tokens, _ = ask(sides, request)
    assert num_tokens == CHAT_BLOCKS * BLOCK_TOKENS
    sides.side.finished(request)
    settle(sides)
    assert not scheduler_of(sides).control.has_prefetches
    assert wanted
