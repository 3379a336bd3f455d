"""ARC, S3-FIFO and W-TinyLFU against the published algorithms, request by request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fakes.crafted_keys import keys
from tests.fakes.published_policies import (
    Published,
    PublishedArc,
    PublishedS3Fifo,
    PublishedWTinyLfu,
)

from kvferry.cache.policies import policy_named
from kvferry.cache.policies.arc import Arc
from kvferry.cache.policies.s3fifo import S3Fifo
from kvferry.cache.policies.wtinylfu import WTinyLfu
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys

PAIRS: list[tuple[type, type[Published]]] = [
    (Arc, PublishedArc),
    (S3Fifo, PublishedS3Fifo),
    (WTinyLfu, PublishedWTinyLfu),
]
every = pytest.mark.parametrize(("make", "published"), PAIRS, ids=["arc", "s3fifo", "wtinylfu"])


class Cache:
    """A pool of blocks that stand alone, so that no rule of ours keeps one from going."""

    def __init__(self, make: type, num_slots: int) -> None:
        self.now = 0.0
        self.pool = Pool(num_slots, make, clock=lambda: self.now)

    def resident(self, numbers: Keys) -> set[int]:
        """Which of so many numbers are there."""
        return set(np.flatnonzero(self.pool.cached(numbers)).tolist())

    def serve(self, numbers: list[int]) -> None:
        self.now += 10
        asked = keys(numbers)
        found = self.pool.find(asked)
        self.pool.asked(asked, len(numbers), found[:0])
        self.pool.touch(asked)
        new = [number for number, slot in zip(numbers, found.tolist(), strict=True) if slot < 0]
        if new:
            lease = self.pool.reserve(keys(new), chained=False)
            if lease is not None:
                lease.commit()
        self.pool.check_integrity()


ALL = keys(range(41))


@every
@example(numbers=[*range(9), 0], capacity=8)
@given(
    numbers=st.lists(st.integers(0, 40), min_size=1, max_size=150),
    capacity=st.sampled_from((8, 11, 20)),
)
def test_it_does_what_was_published(
    make: type, published: type[Published], numbers: list[int], capacity: int
) -> None:
    cache, oracle = Cache(make, capacity), published(capacity)
    for number in numbers:
        cache.serve([number])
        oracle.serve([number])
        assert cache.resident(ALL) == oracle.resident
    policy = cache.pool.eviction.policy
    if isinstance(policy, Arc) and isinstance(oracle, PublishedArc):
        assert policy.target == oracle.p


@every
def test_many_blocks_at_once_fare_as_one_after_another(
    make: type, published: type[Published]
) -> None:
    """Not the same: a newcomer that would go again at once is refused, from the request's end."""
    rng = np.random.default_rng(4)
    cache, oracle = Cache(make, 60), published(60)
    hits = [0, 0]
    for _ in range(800):
        numbers = np.unique(np.minimum(rng.zipf(1.2, 6) - 1, 400)).tolist()
        hits[0] += int(np.count_nonzero(cache.pool.find(keys(numbers)) >= 0))
        hits[1] += len(oracle.resident.intersection(numbers))
        cache.serve(numbers)
        oracle.serve(numbers)
    assert hits[0] == pytest.approx(hits[1], rel=0.02)


@every
def test_what_one_request_does_in_a_moment_is_one_use(
    make: type, published: type[Published]
) -> None:
    """It looks up, loads, and stores block by block: no other request uses the blocks."""
    cache = Cache(make, 20)
    cache.serve([0, 1, 2, 3])
    before = cache.pool.eviction.policy.peek(20).tolist()
    cache.now += 0.3
    cache.pool.touch(keys([0, 1]))
    assert cache.pool.eviction.policy.peek(20).tolist() == before


@pytest.mark.parametrize("name", ["arc", "s3fifo", "wtinylfu"])
def test_a_scan_leaves_what_was_used_again(name: str) -> None:
    """What LRU cannot do: a chain used three times outlives a flood of chains used once."""
    now = [0.0]
    pool = Pool(100, policy_named(name), clock=lambda: now[0])

    def serve(numbers: list[int]) -> int:
        now[0] += 30
        asked = keys(numbers)
        pool.asked(asked, len(numbers), pool.lookup(asked))
        pin = pool.lease(asked)
        if pin is not None:
            pin.release()
        lease = pool.reserve(asked)
        if lease is not None:
            lease.commit()
        pool.check_integrity()
        return len(pin) if pin is not None else 0

    hot = list(range(20))
    for flood in range(40):
        if flood % 2 == 0:
            serve(hot)
        start = 1000 + 30 * flood
        serve(list(range(start, start + 30)))
    assert serve(hot) == 20
    for flood in range(100, 106):
        serve(list(range(1000 + 30 * flood, 1030 + 30 * flood)))
    assert serve(hot) == 20
