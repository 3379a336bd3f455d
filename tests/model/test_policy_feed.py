"""A policy that is told late chooses as one that is told at once: random lives of two pools.

One-line breaks that were tried; each made one of these tests fail.

- ``Pool.reserve`` does not drain the feed before chains grow
- ``PoolRoom._policy`` does not drain it before victims are selected
- ``PolicyFeed.drain`` tells as of now, or tells the last first
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests.fakes.crafted_keys import key, keys
from tests.fakes.pool_events import Evictions
from tests.model.pool_lives import Disown, End, Event, Grow, Pin, Reserve, Reset, Touch, life

from kvferry.cache.events import MANY_EVENTS
from kvferry.cache.policies import policy_named
from kvferry.cache.policies.contract import EvictionPolicyMaker
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease, Purpose

NUM_SLOTS = (5, 12, 24, 60, 2000)


class Twins:
    """A pool that is drained after every event, and one that is drained only where it must be."""

    def __init__(
        self, num_slots: int, make: EvictionPolicyMaker, seed: int, *, divided: bool
    ) -> None:
        self.time = 0.0
        self.pools = [Pool(num_slots, make, clock=lambda: self.time) for _ in "ab"]
        if divided:
            for pool in self.pools:
                pool.eviction.divide([None, 0.4, None], 0)
        self.divided = divided
        self.evicted = [Evictions(pool) for pool in self.pools]
        self.open: list[list[Lease]] = []
        self.rng = Random(seed)
        self.most_waiting = 0

    def tell(self, event: Event) -> None:
        self.time += 0.3
        if isinstance(event, Pin | Reserve) and self.rng.random() < 0.5:
            for pool in self.pools:
                pool.asked(event.keys, 16 * len(event.keys), pool.lookup(event.keys))
        tenant = self.rng.randrange(3) if self.divided else 0
        match event:
            case Reserve(_, _, chained):
                keys, parent = event.keys, event.parent_key
                self._claim(
                    [
                        pool.reserve(keys, parent=parent, chained=chained, tenant=tenant)
                        for pool in self.pools
                    ]
                )
            case Pin(_, purpose):
                self._claim([pool.lease(event.keys, purpose) for pool in self.pools])
            case End(at) | Disown(at):
                if at < len(self.open):
                    self._end(event)
            case _:
                for pool in self.pools:
                    _tell_one(pool, event)
        self.most_waiting = max(self.most_waiting, len(self.pools[1].eviction.feed.events))
        self.pools[0].catch_up()
        self.compare()

    def _claim(self, leases: list[Lease | None]) -> None:
        found = [lease for lease in leases if lease is not None]
        if found:
            one, other = found
            assert one.slots.tolist() == other.slots.tolist()
            assert one.positions.tolist() == other.positions.tolist()
            self.open.append(found)

    def _end(self, event: End | Disown) -> None:
        leases = self.open[event.at] if isinstance(event, Disown) else self.open.pop(event.at)
        if isinstance(event, Disown) or not event.well:  # chains are cut where bytes are lost, and
            self.pools[1].catch_up()  # what was stored before is told with the chains as they are
        for lease in leases:
            if isinstance(event, Disown):
                lease.disown()
            elif lease.purpose is Purpose.WRITE:
                lease.commit() if event.well else lease.abort()
            else:
                lease.release() if event.well else lease.spoil()

    def compare(self, *, whole: bool = False) -> None:
        one, other = self.pools
        assert self.evicted[0].read() == self.evicted[1].read()
        assert one.counts == other.counts
        if whole or self.rng.random() < 0.1:
            first, second = (pool.eviction.policy.peek(pool.num_slots) for pool in self.pools)
            assert np.array_equal(first, second)
            other.check_integrity()


def _tell_one(pool: Pool, event: Event) -> None:
    match event:
        case Touch():
            pool.touch(event.keys)
        case Reset():
            pool.reset()
        case Grow(num_ready):
            pool.grow(num_ready)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("policy", ["lru", "returns", "arc", "s3fifo", "wtinylfu"])
def test_late_is_the_same(policy: str, seed: int, divided: bool) -> None:
    num_slots = NUM_SLOTS[seed % 5]
    twins = Twins(num_slots, policy_named(policy), seed, divided=divided)
    for event in life(seed, min(num_slots, 60), 200):
        twins.tell(event)
    twins.compare(whole=True)
    assert twins.evicted[0].keys or num_slots > 1000
    assert twins.most_waiting


def test_the_backlog_is_bounded() -> None:
    pool = Pool(64)
    for number in range(40):
        lease = pool.reserve(keys([number]), chained=False)
        assert lease is not None
        lease.commit()
    for number in range(100):
        read = pool.lease(keys([number % 40]))
        assert read is not None
        read.release()
        assert len(pool.eviction.feed.events) <= MANY_EVENTS
    assert len(pool.eviction.feed.events)


def test_the_end_of_a_lease_runs_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(16, policy_named("returns"))
    one, two, three = (pool.reserve(keys([n, n + 1])) for n in (10, 20, 30))
    assert one is not None
    assert two is not None
    assert three is not None
    pool.catch_up()
    monkeypatch.setattr(pool.eviction.feed, "_tell", None)
    one.commit()
    two.commit(failed=[1])
    three.abort()
    for purpose in Purpose.READ, Purpose.COPY:
        read = pool.lease(keys([10, 11]), purpose)
        assert read is not None
        read.release()
    read = pool.lease(keys([10, 11]))
    assert read is not None
    read.disown()
    read.spoil()
    monkeypatch.undo()
    pool.check_integrity()
    assert pool.counts.cached == 1


def test_chains_are_told_as_they_were() -> None:
    """Where a second conversation goes on from a block, what came before is not a branch yet."""
    counts = []
    for is_late in (False, True):
        pool = Pool(64, policy_named("returns"))
        for own, parent in (((1,), None), ((2,), 1), ((3,), 1)):
            lease = pool.reserve(keys(own), parent=key(parent) if parent else None)
            assert lease is not None
            lease.commit()
            if not is_late:
                pool.catch_up()
        pool.check_integrity()
        counts.append(len(pool.eviction.policy._tree.holding))  # type: ignore[attr-defined]
    assert counts[0] == counts[1]
