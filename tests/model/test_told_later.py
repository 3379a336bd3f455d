"""A policy that hears late chooses as one that heard at once: random lives of two pools.

One-line breaks that were tried; each made one of these tests fail.

- ``PoolRoom._catch_up`` does not tell what is owed
- ``PoolWishes._tell_request`` tells at once, ahead of what is owed
- ``Pool._write_down`` does not tell what is owed first
- ``PoolRoom._tell_policy`` tells as of now
- ``ToldLater.owe`` never tells by itself, or ``catch_up`` tells the last first
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests.fakes.crafted_keys import key, keys
from tests.model.pool_lives import Event, Pin, Reserve, life
from tests.model.test_written_later import Twins

from kvferry.cache.deferred import _MOST_OWED
from kvferry.cache.policies.contract import EvictionPolicyMaker, policy_named
from kvferry.cache.pool import Pool

NUM_SLOTS = (5, 12, 24, 60, 2000)


class LateTwins(Twins):
    """The second pool's policy hears late. Looking at it would tell it: that is done seldom."""

    def __init__(self, num_slots: int, make: EvictionPolicyMaker, seed: int) -> None:
        super().__init__(num_slots, make)
        self.pools[1].told_later.is_on = True
        self._rng = Random(seed)
        self.most_owed = 0

    def tell(self, event: Event) -> None:
        if isinstance(event, Pin | Reserve) and self._rng.random() < 0.5:
            for pool in self.pools:
                pool.asked(event.keys, 16 * len(event.keys), pool.leading(event.keys))
                pool.answered(event.keys, 7)
        super().tell(event)

    def compare(self) -> None:
        one, other = self.pools
        self.most_owed = max(self.most_owed, len(other.told_later._owed))
        assert self.gone[0] == self.gone[1]
        assert one.counts == other.counts
        if self._rng.random() < 0.1:
            super().compare()


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("policy", ["lru", "returns", "arc", "s3fifo", "slru"])
def test_late_is_the_same(policy: str, seed: int) -> None:
    num_slots = NUM_SLOTS[seed % 5]
    twins = LateTwins(num_slots, policy_named(policy), seed)
    for event in life(seed, min(num_slots, 60), 200):
        twins.tell(event)
    Twins.compare(twins)
    assert twins.gone[0] or num_slots > 1000
    assert twins.most_owed


def test_no_more_is_owed_than_the_next_who_comes_can_bear() -> None:
    pool = Pool(64)
    pool.told_later.is_on = True
    for number in range(40):
        lease = pool.reserve(keys([number]), chained=False)
        assert lease is not None
        lease.commit()
        assert len(pool.told_later._owed) <= _MOST_OWED
    for number in range(40):
        read = pool.pin(keys([number]))
        assert read is not None
        read.release()
        assert len(pool.told_later._owed) <= _MOST_OWED
    assert pool.told_later.is_owing


def test_where_slots_are_tenants_it_hears_at_once() -> None:
    pool = Pool(16)
    pool.told_later.is_on = True
    lease = pool.reserve(keys([1, 2]))
    assert lease is not None
    lease.commit()
    assert pool.told_later.is_owing
    pool.divide([None, 0.5], [1.0, 1.0], 0)
    assert not pool.told_later.is_owing
    lease = pool.reserve(keys([3, 4]), tenant=1)
    assert lease is not None
    lease.commit()
    assert not pool.told_later.is_owing
    pool.check_integrity()
    assert len(pool._policy.peek(16)) == 4
    assert np.count_nonzero(pool.cached(keys([1, 2, 3, 4]))) == 4


def test_who_follows_is_told_as_it_was() -> None:
    """Where a second conversation goes on from a block, what came before is not a branch yet."""
    counts = []
    for is_late in (False, True):
        pool = Pool(64, policy_named("returns"))
        pool.told_later.is_on = is_late
        for own, parent in (((1,), None), ((2,), 1), ((3,), 1)):
            lease = pool.reserve(keys(own), parent=key(parent) if parent else None)
            assert lease is not None
            lease.commit()
        pool.check_integrity()
        counts.append(pool._policy._segments.count)  # type: ignore[attr-defined]
    assert counts[0] == counts[1]
