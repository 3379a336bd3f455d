"""Hints and actions of the library: what is said with a request, and what is done without one."""

from __future__ import annotations

import numpy as np
import pytest

import kvferry
from kvferry.errors import InputError

TOKENS, SLOT = 4, 3 * 2 * 4 * 8


@pytest.fixture
def ferry():
    rng = np.random.default_rng(11)
    kv = [rng.integers(0, 255, (64, 2, TOKENS, 8), np.uint8) for _ in range(3)]
    with kvferry.attach(
        kv,
        model="m",
        block_tokens=TOKENS,
        host=f"{16 * SLOT}B",
        policy="lru",
        tiers="memory:1MiB",
        tier_write="through",
    ) as ferry:
        ferry.kv = kv  # type: ignore[attr-defined]
        yield ferry


def chat(ferry: kvferry.Ferry, number: int, num_blocks: int = 4) -> kvferry.Keys:
    return ferry.keys(range(1000 * number, 1000 * number + num_blocks * TOKENS))


def keep(ferry: kvferry.Ferry, number: int, num_blocks: int = 4, **options) -> kvferry.Keys:
    keys = chat(ferry, number, num_blocks)
    blocks = list(range(number % 10 * 4, number % 10 * 4 + num_blocks))
    ferry.wait(ferry.store(keys, blocks, **options))
    settle(ferry)
    return keys


def settle(ferry: kvferry.Ferry) -> None:
    for _ in range(2000):
        ferry.poll()
        stats = ferry.stats()
        if not stats.in_flight and not stats.queued:
            return


def test_hints_come_with_a_store_or_a_match(ferry):
    keys = keep(ferry, 1, hints={"pin_seconds": "1h"})
    assert ferry.stats().pool.pinned == 4
    nothing = keep(ferry, 2, hints=kvferry.Hints(max_store_tokens=0))
    assert ferry.lookup(nothing).host_tokens == 0
    hit = ferry.match(keys, hints={"do_not_load": True})
    assert len(hit) == 0
    why = ferry.explain(hit)
    assert why is not None
    assert why.reason.value == "hint"
    with pytest.raises(InputError, match="did you mean 'pin_seconds'"):
        ferry.match(keys, hints={"pin_second": 3})


@pytest.mark.parametrize(
    ("hints", "first", "reason"),
    [
        ({"do_not_store": True}, 0, "a hint lets nothing be stored from block 0 on"),
        ({"max_store_tokens": 3 * TOKENS + 1}, 0, "a hint lets nothing be stored from block 3 on"),
        ({"max_store_tokens": TOKENS}, 2, "a hint lets nothing be stored from block 1 on"),
        ({"max_store_tokens": 3 * TOKENS}, 2, "block 0 is not stored, so the blocks from 2 on"),
        ({"max_store_tokens": 4 * TOKENS}, 0, ""),
    ],
)
def test_a_store_that_a_hint_cut_short_names_the_hint(ferry, hints, first, reason):
    """Seen red: it said that host memory was full, which was empty."""
    keep(ferry, 2)
    keys = chat(ferry, 1)
    done = ferry.wait(ferry.store(keys, list(range(first, 4)), first=first, hints=hints))
    assert done.ok
    assert done.reason.startswith(reason)
    assert bool(done.reason) == bool(reason)


def test_a_prefetch_brings_the_right_bytes_up_before_the_match(ferry):
    keys = keep(ferry, 1)
    wanted = b"".join(tensor[4:8].tobytes() for tensor in ferry.kv)
    for number in range(2, 8):
        keep(ferry, number)
    assert ferry.lookup(keys).lower_tokens == 16
    assert ferry.prefetch(keys, keep="1min").is_under_way
    settle(ferry)
    told = ferry.lookup(keys)
    assert (told.host_tokens, told.held_blocks) == (16, 4)
    hit = ferry.match(keys)
    assert (len(hit), hit.is_pending) == (4, False)
    for tensor in ferry.kv:
        tensor[40:44] = 0xEE
    assert ferry.wait(ferry.load(hit, [40, 41, 42, 43])).ok
    assert b"".join(tensor[40:44].tobytes() for tensor in ferry.kv) == wanted


def test_a_drop_right_after_a_store_is_a_drop(ferry):
    """And a store of the same blocks after it is found, with the bytes that it was given."""
    keys = chat(ferry, 1)
    first = ferry.store(keys, [0, 1, 2, 3])
    assert ferry.drop(keys).blocks == 4
    second = ferry.store(keys, [4, 5, 6, 7])
    wanted = b"".join(tensor[4:8].tobytes() for tensor in ferry.kv)
    ferry.wait(first)
    ferry.wait(second)
    settle(ferry)
    assert ferry.lookup(keys).host_tokens == 16
    hit = ferry.match(keys)
    assert ferry.wait(ferry.load(hit, [40, 41, 42, 43])).ok
    assert b"".join(tensor[40:44].tobytes() for tensor in ferry.kv) == wanted
    third = ferry.store(chat(ferry, 2), [8, 9, 10, 11])
    ferry.drop(chat(ferry, 2))
    ferry.wait(third)
    settle(ferry)
    told = ferry.lookup(chat(ferry, 2))
    assert (told.host_tokens, told.lower_tokens) == (0, 0)
