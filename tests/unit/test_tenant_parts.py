"""How large each tenant's part is, and how many slots it gives up: checked for all small cases."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.crafted_keys import keys

from kvferry.cache.policies.lru import Lru
from kvferry.cache.policies.quotas import QuotaShares, given_up
from kvferry.cache.pool import Pool


def in_slots(shares, there, num_slots=100, at_most=None) -> list[float]:
    parts = QuotaShares(shares, at_most or [1.0] * len(shares))
    return parts.in_slots(np.array(there, dtype=bool), num_slots).tolist()


def test_what_shares_leave_over_is_divided_evenly_among_the_others():
    shares = (None, 0.8, None, None)
    assert in_slots(shares, (1, 1, 0, 0)) == pytest.approx([20, 80, 20, 20])
    assert in_slots(shares, (1, 0, 1, 0)) == pytest.approx([10, 80, 10, 10]), "its share is kept"
    assert in_slots((None, 1.0), (1, 1)) == [0, 100]
    assert in_slots((None, None), (1, 1)) == [50, 50]


def test_a_share_for_other_tenants_bounds_an_even_part():
    few = in_slots((0.8, None, None), (1, 1, 0), at_most=(1.0, 0.05, 0.05))
    assert few == pytest.approx([80, 5, 5])
    many = in_slots((0.8, *[None] * 10), [1] * 11, at_most=(1.0, *[0.05] * 10))
    assert many == pytest.approx([80, *[2] * 10])


def test_a_promised_part_is_whole_slots():
    assert in_slots((0.29, None), (1, 1))[0] == 29, "and not 28 by the rounding of floats"
    assert in_slots((0.5, None), (1, 1), num_slots=7)[0] == 3


share = st.one_of(st.none(), st.integers(0, 40).map(lambda percent: percent / 100))


@given(
    shares=st.lists(share, min_size=1, max_size=8),
    there=st.lists(st.booleans(), min_size=8, max_size=8),
    most=st.floats(0, 1),
    num_slots=st.integers(1, 10_000),
)
def test_all_parts_together_are_no_more_than_the_whole(shares, there, most, num_slots):
    if sum(share or 0.0 for share in shares) > 1:
        shares = [None if share is None else share / 4 for share in shares]
    here = there[: len(shares)]
    parts = in_slots(shares, here, num_slots, [most] * len(shares))
    counted = [
        part
        for part, share, is_here in zip(parts, shares, here, strict=True)
        if share is not None or is_here
    ]
    assert sum(counted) <= num_slots + 1e-6


def one_by_one(count: int, above: dict[int, float], keeps: set[int]) -> dict[int, int]:
    """A plain version: each time the tenant most above its part loses one slot."""
    above, gone = dict(above), dict.fromkeys(above, 0)
    for _ in range(count):
        can = [tenant for tenant in above if tenant not in keeps or above[tenant] > 0]
        if not can:
            break
        most = max(can, key=lambda tenant: above[tenant])
        above[most] -= 1
        gone[most] += 1
    return gone


def test_it_is_as_one_at_a_time_for_all_small_cases():
    """Ties may fall either way, so what is compared is how far above each ends, in order.

    A tenant that keeps its part is above it by whole slots; others by any fraction.
    """
    everybody = (0, 1, 2)
    tried = 0
    for num_keeping in range(4):
        for keeps in map(set, combinations(everybody, num_keeping)):
            choices = [
                (-2.0, 0.0, 1.0, 3.0) if tenant in keeps else (-1.75, -0.5, 0.25, 1.0, 2.5)
                for tenant in everybody
            ]
            for surplus in product(*choices):
                above = dict(enumerate(surplus))
                for count in range(9):
                    found = dict(given_up(count, above, keeps))
                    plain = one_by_one(count, above, keeps)
                    ends = sorted(above[t] - found.get(t, 0) for t in above)
                    assert ends == sorted(above[t] - plain[t] for t in above)
                    assert all(above[t] - n >= 0 for t, n in found.items() if t in keeps)
                    tried += 1
    assert tried > 5000


def stored(pool: Pool, numbers, tenant: int, parent: int | None = None) -> int:
    above = keys([parent])[0] if parent is not None else None
    lease = pool.reserve(keys(numbers), parent=above, tenant=tenant)
    if lease is None:
        return 0
    lease.commit()
    return len(lease.slots)


def test_what_another_tenants_blocks_follow_goes_once_those_have_gone():
    """All that tenant 1 has is followed by what tenant 2 has; one store needs of both."""
    pool = Pool(12)
    pool.eviction.divide([0.5, None, None], [1.0] * 3, 0)
    stored(pool, range(6), 1)
    stored(pool, range(20, 26), 2, parent=5)
    assert stored(pool, range(40, 46), 0) == 6
    assert stored(pool, range(50, 54), 0) == 4
    pool.check_integrity()


class Refusing(Lru):
    """Rather keeps what is there, where it is told to."""

    refuses = False

    def take(self, count, arriving):
        return super().take(0 if self.refuses else count, arriving)


def test_a_tenant_that_refuses_to_evict_takes_no_slot_of_a_tenant_within_its_part():
    """A policy that refuses newcomers was passed over, and the next tenant lost its blocks."""
    pool = Pool(16, Refusing)
    pool.eviction.divide([None, None], [1.0] * 2, 0)
    stored(pool, range(6), 0)
    stored(pool, range(50, 60), 1)
    fair = pool.eviction.quotas
    assert fair is not None
    its = fair.of(1)
    assert isinstance(its, Refusing)
    its.refuses = True
    assert stored(pool, range(100, 104), 1) == 0
    assert [pool.eviction.slots_of_tenant(t) for t in range(2)] == [6, 10]
    assert stored(pool, range(20, 24), 0) == 4, "at the cost of its own"
    assert [pool.eviction.slots_of_tenant(t) for t in range(2)] == [6, 10]
    its.refuses = False
    assert stored(pool, range(30, 34), 0) == 4
    assert [pool.eviction.slots_of_tenant(t) for t in range(2)] == [8, 8]
    pool.check_integrity()


def test_a_tenant_asked_twice_evicts_the_parents_of_its_first_victims():
    """They had not gone yet, so what they followed seemed to stay, and another lost a block."""
    pool = Pool(9)
    pool.eviction.divide([None, 0.5, 0.2], [1.0] * 3, 0)
    stored(pool, range(2), 0)
    stored(pool, [50], 1)
    stored(pool, range(100, 104), 2)
    reads = pool.lease(keys([50]))
    assert reads is not None
    assert stored(pool, range(60, 65), 1) == 5
    assert [pool.eviction.slots_of_tenant(t) for t in range(3)] == [2, 6, 1]
    reads.release()


def test_parts_are_of_what_can_be_used_as_yet():
    """Else a share of memory that is not there yet keeps all others out of what is."""
    pool = Pool(40, num_ready=20)
    pool.eviction.divide([None, 0.5], [1.0] * 2, 0)
    stored(pool, range(20), 1)
    assert pool.eviction.slots_of_tenant(1) == 20
    assert stored(pool, range(100, 110), 0) == 10
    assert pool.eviction.slots_of_tenant(1) == 10
