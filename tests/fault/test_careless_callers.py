"""Callers and policies that raise in the midst of a call: no request, lease or ticket is left over.

Seen to fail: 1,000 of 1,000 matches refused for a repeated key left a request behind; with two
groups the first group's lease as well; a policy that raised while blocks were spilled kept a load
from being sent off, whose caller had no ticket. A policy that raised when it was told of a request
made the ferry say that an interrupt tore it; the slots it lost were never free again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.cache.policies.contract import EvictionPolicy, Residents
from kvferry.cache.policies.lru import Lru
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


class CarelessError(RuntimeError):
    """What the policy below raises."""


VERBS = ("insert", "use", "keep", "put_back", "take", "peek", "holds", "discard")


def careless(residents: Residents) -> EvictionPolicy:
    """An LRU that raises now and then, before or after its work, whatever it is asked."""
    policy = Lru(residents)

    def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            fails = RANDOM.random() < RATE[0]
            done = verb(*given) if not fails or RANDOM.random() < 0.5 else None
            if fails:
                raise CarelessError
            return done

        return call

    for name in VERBS:
        setattr(policy, name, guarded(getattr(policy, name)))
    for name in ("asked", "hint"):
        setattr(policy, name, guarded(lambda *_: None))
    return policy


RANDOM, RATE = random.Random(), [0.0]


def any_verb(ferry: kvferry.Ferry, keys: Keys) -> set[kvferry.Ticket]:
    """A store, a hit loaded or released, or an action on blocks by their keys; its ticket."""
    verb = RANDOM.randrange(6)
    blocks = range(len(keys))
    if verb < 2:
        return {ferry.store(keys, blocks, hints={"ended": True} if verb else None)}
    if verb < 4:
        hit = ferry.match(keys)
        if verb == 2 and not hit.is_pending:
            return {ferry.load(hit, blocks[: len(hit)])}
        ferry.release(hit)
    elif verb == 4:
        getattr(ferry, RANDOM.choice(("pin", "unpin", "drop", "lookup")))(keys)
    else:
        ferry.hint(keys, {"continues": True})
    return set()


@pytest.mark.parametrize("rate", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("tiers", ["none", "memory:64KiB"])
def test_a_policy_that_raises_at_any_verb_harms_the_calls_that_learn_of_it_only(
    tiers: str, rate: float
) -> None:
    seed = random.randrange(1 << 32)
    RANDOM.seed(seed)
    RATE[0] = 0.0
    with attached(policy=f"{__name__}:careless", tiers=tiers, match_deadline=0.1) as ferry:
        RATE[0] = rate
        tickets, ended = set[kvferry.Ticket](), set[kvferry.Ticket]()
        for _ in range(300):
            first = 1000 * RANDOM.randrange(30)
            keys = ferry.keys(range(first, first + RANDOM.randint(1, BLOCKS) * TOKENS))
            with suppress(CarelessError):
                tickets |= any_verb(ferry, keys)
            ended |= set(ferry.poll())
        RATE[0] = 0.0
        give_up = time.monotonic() + 5
        while ended != tickets and time.monotonic() < give_up:
            ended |= set(ferry.poll(0.01))
        assert ended == tickets, seed
        for _ in range(3):  # what was not told yet: of either pool's policy, and of the journal
            with suppress(CarelessError):
                ferry.release(ferry.match(keys))
        scheduler = ferry._scheduler
        for number in range(100, 110):  # all slots are given out again
            while (scheduler.num_queued or scheduler.num_in_flight) and time.monotonic() < give_up:
                ferry.poll()
            keys = ferry.keys(range(1000 * number, 1000 * number + BLOCKS * TOKENS))
            done = ferry.wait(ferry.store(keys, range(BLOCKS)), 5)
            assert done.num_blocks == BLOCKS, (seed, done)
        hit = ferry.match(keys)
        assert len(hit) == BLOCKS
        ferry.release(hit)
        assert not scheduler.pool.eviction.feed.has_failed, seed
        scheduler.check_integrity()
