"""What is written down later is the same: random lives of two pools, one of them in a hurry.

One-line breaks that were tried; each made one of these tests fail.

- ``Pool.reserve`` does not catch up first
- ``Pool.end`` does not catch up first
- ``WrittenLater.__exit__`` does not catch up
- ``WrittenLater.write`` writes at once
- ``Pool._write_down`` does not link what follows blocks that were here before
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.crafted_keys import key, keys
from tests.model.pool_lives import Disown, End, Event, Grow, Pin, Reserve, Reset, Touch, life

from kvferry.cache.leases import Lease, Purpose
from kvferry.cache.policies.contract import EvictionPolicyMaker, policy_named
from kvferry.cache.pool import Pool
from kvferry.types import Key


class Twins:
    """A pool that writes down at once and one that does so later, told the same."""

    def __init__(self, num_slots: int, make: EvictionPolicyMaker) -> None:
        self.time = 0.0
        self.pools = [Pool(num_slots, make, together=True, clock=lambda: self.time) for _ in "ab"]
        self.gone: list[list[Key]] = [[], []]
        self.open: list[list[Lease]] = []
        for pool, gone in zip(self.pools, self.gone, strict=True):
            pool.listeners.append(gone.extend)

    def tell(self, event: Event) -> None:
        self.time += 0.3
        if isinstance(event, Reserve):
            with self.pools[1].later:
                self._claim([self._reserve(pool, event) for pool in self.pools])
        elif isinstance(event, Pin):
            self._claim([pool.pin(event.keys, event.purpose) for pool in self.pools])
        elif isinstance(event, End | Disown):
            if event.at < len(self.open):
                self._end(event)
        else:
            for pool in self.pools:
                match event:
                    case Touch():
                        pool.touch(event.keys)
                    case Reset():
                        pool.reset()
                    case Grow(num_ready):
                        pool.grow(num_ready)
        self.compare()

    def _reserve(self, pool: Pool, event: Reserve) -> Lease | None:
        return pool.reserve(event.keys, parent=event.parent_key, chained=event.chained)

    def _claim(self, leases: list[Lease | None]) -> None:
        found = [lease for lease in leases if lease is not None]
        if found:
            one, other = found
            assert one.slots.tolist() == other.slots.tolist()
            assert one.positions.tolist() == other.positions.tolist()
            self.open.append(found)

    def _end(self, event: End | Disown) -> None:
        leases = self.open[event.at] if isinstance(event, Disown) else self.open.pop(event.at)
        for lease in leases:
            if isinstance(event, Disown):
                lease.disown()
            elif lease.purpose is Purpose.WRITE:
                lease.commit() if event.well else lease.abort()
            else:
                lease.release() if event.well else lease.spoil()

    def compare(self) -> None:
        one, other = self.pools
        assert self.gone[0] == self.gone[1]
        assert one.counts == other.counts
        assert np.array_equal(one._chains._parent, other._chains._parent)
        assert np.array_equal(one._policy.peek(one.num_slots), other._policy.peek(one.num_slots))
        other.check_integrity()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["lru", "returns"])
def test_later_is_the_same(policy: str, seed: int) -> None:
    num_slots = (5, 12, 24, 60)[seed]
    twins = Twins(num_slots, policy_named(policy))
    for event in life(seed, num_slots, 150):
        twins.tell(event)
    assert twins.gone[0]


def test_nothing_is_known_of_it_before_the_end() -> None:
    pool = Pool(4)
    with pool.later:
        assert pool.reserve(keys([1, 2])) is not None
        assert not pool.known(keys([1, 2])).any()
    assert pool.known(keys([1, 2])).all()


def test_the_next_that_is_reserved_or_ended_finds_it_written() -> None:
    pool = Pool(8)
    with pool.later:
        first = pool.reserve(keys([1, 2]))
        second = pool.reserve(keys([1, 2, 3]))
        assert first is not None
        assert second is not None
        assert second.positions.tolist() == [2]
        first.commit()
        second.commit()
        third = pool.reserve(keys([4, 5]))
        assert third is not None
        third.abort()
    pool.check_integrity()
    assert pool.known(keys([1, 2, 3, 4, 5])).tolist() == [True, True, True, False, False]
    assert pool.line(key(3), 8) == keys([1, 2, 3])


def test_it_is_written_whatever_ends_the_block() -> None:
    pool = Pool(4)

    def reserve_and_fail() -> None:
        with pool.later:
            assert pool.reserve(keys([1, 2])) is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reserve_and_fail()
    assert pool.known(keys([1, 2])).all()
    pool.check_integrity()
