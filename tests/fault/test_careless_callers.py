"""Callers and policies that raise in the midst of a call: no request, lease or ticket is left over.

Seen to fail: 1,000 of 1,000 matches refused for a repeated key left a request behind; with two
groups the first group's lease as well; a policy that raised while blocks were spilled kept a load
from being sent off, whose caller had no ticket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.core.keys import Keys
from kvferry.errors import InputError

TOKENS, BLOCKS, SLOTS = 4, 4, 16


@pytest.fixture(params=[1, 2], ids=["one-group", "two-groups"])
def ferry(request: pytest.FixtureRequest) -> Iterator[kvferry.Ferry]:
    with attached(num_groups=request.param) as ferry:
        yield ferry


def attached(*, num_groups: int = 1, **more: Any) -> kvferry.Ferry:
    kv: Any = [np.zeros((2 * BLOCKS, 2, TOKENS, 8), np.uint8) for _ in range(num_groups)]
    settings: dict[str, Any] = {"load_policy": "always", "policy": "lru", **more}
    host = f"{SLOTS * num_groups * kv[0][0].nbytes}B"
    if num_groups > 1:
        settings["groups"] = [kvferry.FullAttention(TOKENS)] * num_groups
        kv = [[tensor] for tensor in kv]
    return kvferry.attach(kv, model="m", block_tokens=TOKENS, host=host, **settings)


def tables(ferry: kvferry.Ferry, blocks: list[int]) -> Any:
    num_groups = len(ferry._scheduler.groups)
    return blocks if num_groups == 1 else [blocks] * num_groups


def test_a_match_refused_for_a_repeated_key_leaves_nothing(ferry: kvferry.Ferry) -> None:
    keys = ferry.keys(range(BLOCKS * TOKENS))
    ferry.wait(ferry.store(keys, tables(ferry, list(range(BLOCKS)))), 5)
    double = Keys(np.concatenate((keys.array, keys.array)))
    for _ in range(20):
        with pytest.raises(InputError):
            ferry.match(double)
    assert not ferry._scheduler.requests
    assert ferry._scheduler.pool.num_leases == 0
    ferry._scheduler.check_integrity()
    assert len(ferry.match(keys)) == BLOCKS


def test_a_policy_that_raises_while_blocks_are_spilled_loses_no_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with attached(tiers="memory:1MiB") as ferry:
        for number in range(SLOTS // BLOCKS):
            keys = ferry.keys(range(100 * number, 100 * number + BLOCKS * TOKENS))
            ferry.wait(ferry.store(keys, range(BLOCKS)), 5)
        pool = ferry._scheduler.pool
        hit = ferry.match(keys)

        def raises(count: int) -> Any:
            raise RuntimeError("cannot say")

        with monkeypatch.context() as patched:
            patched.setattr(pool.eviction.feed.policy, "peek", raises)
            patched.setattr(ferry._scheduler.writeback, "_clean_until", 0.0)
            done = ferry.wait(ferry.load(hit, range(BLOCKS)), 5)
        assert done.ok
        assert done.num_blocks == BLOCKS
        with pytest.raises(RuntimeError, match="cannot say"):
            ferry.match(keys)
        assert len(ferry.match(keys)) == BLOCKS


def test_a_policy_that_raises_when_asked_to_make_room_fails_that_store_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with attached() as ferry:
        several = [ferry.keys(range(100 * n, 100 * n + BLOCKS * TOKENS)) for n in range(6)]
        for keys in several[:4]:
            ferry.wait(ferry.store(keys, range(BLOCKS)), 5)
        pool = ferry._scheduler.pool
        for answer in (RuntimeError("no"), np.array([0, 0]), np.array([10**6]), None):

            def take(*_: object, answer: Any = answer) -> Any:
                if isinstance(answer, Exception):
                    raise answer
                return answer

            with monkeypatch.context() as patched:
                patched.setattr(pool.eviction.feed.policy, "take", take)
                with suppress(Exception):
                    ferry.wait(ferry.store(several[4], range(BLOCKS)), 5)
            ferry._scheduler.check_integrity()
            assert pool.num_leases == 0
            assert not ferry._scheduler.requests
            assert len(ferry.match(several[3])) == BLOCKS
            for request in ferry._scheduler.requests:
                request.end()
        assert ferry.wait(ferry.store(several[5], range(BLOCKS)), 5).num_blocks == BLOCKS
