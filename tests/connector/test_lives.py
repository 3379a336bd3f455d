"""Requests' lives through vLLM's hooks, by example: every byte compared, nothing left over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.fakes.sides import (
    BLOCK_TOKENS,
    NUM_BLOCKS,
    Sides,
    assert_same,
    hashes_of,
    request_of,
)

STAGES = (["layer0", "layer1"], ["layer2"], ["layer3", "layer4", "layer5"])
PROMPT = 4 * BLOCK_TOKENS


@pytest.fixture
def sides(make_sides: Callable[..., Sides]) -> Sides:
    return make_sides(*STAGES[:2])


def assert_nothing_is_left(sides: Sides) -> None:
    sides.rest()
    sides.step()  # what was given back is freed in a step
    serving = sides.side.serving
    assert serving is not None, sides.side.idle_reason
    assert serving.engine.num_held == 0
    assert serving.scheduler.pool.num_leases == 0
    assert not serving.scheduler.requests
    assert sides.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    serving.scheduler.check_integrity()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_was_stored_comes_back(make_sides, num_ranks):
    sides = make_sides(*STAGES[:num_ranks])
    wanted = sides.converse("writer", hashes_of(1))
    reader = request_of("reader", hashes_of(1))
    places = sides.promise(reader)
    orders = sides.orders()
    assert orders.loads.keys() == {"reader"}
    sides.run(orders)
    for rank in range(num_ranks - 1):
        assert not sides.answer(rank).finished_recving, "not every rank has its part"
    told = sides.answer(num_ranks - 1)
    assert told.finished_recving == {"reader"}
    assert not told.invalid_block_ids
    assert_same(sides.bytes_at(places), wanted)
    sides.end(reader)
    assert_nothing_is_left(sides)


def test_one_that_is_preempted_and_resumed_before_we_hear_of_it_is_known_by_its_count(sides):
    """vLLM may do both in one step. What it has from now on is not from before the reset."""
    request = sides.compute("r", hashes_of(1))
    sides.side.reset()
    sides.pool.evict_blocks(set(range(1, NUM_BLOCKS)))
    sides.free(request)
    sides.end(sides.compute("other", hashes_of(1)[:1], 2))
    sides.rest()
    request.num_preemptions, request.num_computed_tokens = 1, BLOCK_TOKENS
    assert sides.side.match(request, BLOCK_TOKENS) == (0, False)
    sides.side.allocated(request, sides.allocate("r", 5), 0)
    sides.step({"r": 3 * BLOCK_TOKENS + 1})
    request.num_computed_tokens = request.num_tokens
    sides.cache(request)
    sides.end(request)
    sides.rest()
    reader = request_of("reader", hashes_of(1))
    sides.promise(reader)
    assert sides.step().finished_recving == {"reader"}
    sides.end(reader)
    assert_nothing_is_left(sides)


def test_one_that_is_aborted_while_it_loads_leaves_its_blocks_to_the_copy(sides):
    """Or vLLM would give away what a rank still writes."""
    sides.converse("writer", hashes_of(1))
    request = request_of("r", hashes_of(1))
    places = sides.promise(request)
    sides.run(sides.orders())
    sides.end(request)
    free = sides.pool.get_new_blocks(sides.pool.get_num_free_blocks())
    assert not {block.block_id for block in free} & set(places)
    sides.pool.free_blocks(free)
    sides.answer(0)
    assert sides.side.serving.engine.num_held == 4
    sides.answer(1)
    assert_nothing_is_left(sides)
