"""Requests that were loaded and have not run never hold so many blocks that none of them can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sides import BLOCK_TOKENS, Sides, hashes_of, request_of

from kvferry.cache.reach import FullAttention, SlidingWindow
from kvferry.connectors.common.serving import LoadingBlocks


@pytest.fixture
def sides(make_sides: Callable[..., Sides]) -> Sides:
    """With three stored conversations, of which the device has room for two."""
    made = make_sides(["layer0"])
    for tag in (1, 2, 3):
        made.end(made.compute(f"first{tag}", hashes_of(tag, 10), num_blocks=11))
        made.rest()
    return made


def load(sides: Sides, tag: int) -> None:
    sides.promise(request_of(f"again{tag}", hashes_of(tag, 10)))
    sides.rest()


def test_a_third_waits_until_one_of_two_loaded_requests_runs(sides):
    """Seen red: vLLM gave out all blocks, and no loaded request could get the one it needs."""
    load(sides, 1)
    load(sides, 2)
    third = request_of("again3", hashes_of(3, 10))
    assert sides.side.match(third, 0) == (None, False)
    sides.step({"again1": 1}, new=["again1"])
    assert sides.side.match(third, 0) == (10 * BLOCK_TOKENS, True)


def test_a_request_without_a_hit_waits_too(sides):
    """An engine that cannot give it blocks looks at no request behind it."""
    load(sides, 1)
    load(sides, 2)
    stranger = request_of("stranger", hashes_of(9, 10))
    assert sides.side.match(stranger, 0) == (None, False)
    short = request_of("short", hashes_of(8, 2))
    assert sides.side.match(short, 0) == (0, False)
    sides.side.finished(request_of("again1", hashes_of(1, 10)))
    assert sides.side.match(stranger, 0) == (0, False)


def test_no_load_overtakes_the_request_that_waits():
    blocks = LoadingBlocks([FullAttention(block_tokens=16)], 32)
    blocks.began("a", 160, 160)
    assert not blocks.may_begin("large", 320, 160, is_hit=True)
    assert not blocks.may_begin("small", 32, 16, is_hit=True)
    blocks.ended("a")
    blocks.began("b", 32, 16)
    assert blocks.may_begin("large", 320, 160, is_hit=True)
    assert blocks.may_begin("small", 32, 16, is_hit=True)


def test_a_request_whose_load_failed_may_ask_again_beside_itself(make_sides):
    """Seen red: vLLM frees its blocks and asks again; half of the device was still counted."""
    sides = make_sides(["layer0"])
    sides.end(sides.compute("first", hashes_of(1, 20), num_blocks=21))
    sides.rest()
    again = request_of("again", hashes_of(1, 20))
    sides.promise(again)
    sides.ranks[0].guard.trip("test", RuntimeError("a mistake of ours"))
    sides.run(sides.orders())
    assert sides.answer(0).finished_recving == {"again"}
    sides.free(again)
    assert sides.side.match(again, 0) == (0, False)


GROUPS = [FullAttention(block_tokens=16), SlidingWindow(block_tokens=16, window=64)]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 600), st.integers(0, 37)), min_size=1, max_size=12),
    num_blocks=st.integers(80, 160),
)
def test_all_that_are_let_in_can_run_together(sizes, num_blocks):
    """Whatever they hold when loaded, each can be given what it lacks, the others untouched."""
    blocks, held, lacking = LoadingBlocks(GROUPS, num_blocks), 0, 0
    for at, (num_tokens, hit_blocks) in enumerate(sizes):
        hit_tokens = min(hit_blocks * 16, (num_tokens - 1) // 16 * 16)
        if blocks.may_begin(str(at), num_tokens, hit_tokens, is_hit=hit_tokens > 0):
            blocks.began(str(at), num_tokens, hit_tokens)
            in_window = hit_tokens // 16 - max(0, hit_tokens - 63) // 16
            held += hit_tokens // 16 + in_window
            lacking += 2 * (-(-num_tokens // 16) - hit_tokens // 16)
    if len(blocks._needs) > 1:  # one alone gets the whole device
        assert held + lacking < num_blocks
