"""SLRU, ARC and S3-FIFO against the published algorithms, in batches and in pools."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.crafted_keys import keys
from tests.fakes.published_policies import Published, PublishedArc, PublishedS3Fifo, PublishedSlru
from tests.fakes.published_trace import PUBLISHED, needs_published

from kvferry.cache.leases import as_slots
from kvferry.cache.policies import policy_named
from kvferry.cache.policies.arc import Arc
from kvferry.cache.policies.contract import (
    Arriving,
    EvictionPolicyMaker,
    Residents,
)
from kvferry.cache.policies.s3fifo import S3Fifo
from kvferry.cache.policies.slru import Slru
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.sim.simulation import Simulation, Trial, simulate
from kvferry.types import NO_SLOT, SlotArray

PAIRS: list[tuple[type, type[Published]]] = [
    (Slru, PublishedSlru),
    (Arc, PublishedArc),
    (S3Fifo, PublishedS3Fifo),
]
both = pytest.mark.parametrize(("make", "published"), PAIRS, ids=["slru", "arc", "s3fifo"])
ARRIVING = Arriving(Keys.empty(), as_slots(()), NO_SLOT, True)


class Cache:
    """A policy with slots and nothing that could keep a block from going."""

    def __init__(self, make: EvictionPolicyMaker, num_slots: int) -> None:
        self.now = 0.0
        self.in_slot = [-1] * num_slots
        self.policy = make(
            Residents(
                num_slots=num_slots,
                now=lambda: self.now,
                keys_of=lambda slots: keys([self.in_slot[slot] for slot in slots.tolist()]),
                positions_of=lambda slots: slots,
                conversations_of=np.zeros_like,
                parents_of=lambda slots: np.full(len(slots), NO_SLOT),
                num_followers_of=lambda slots: np.zeros(len(slots), dtype=np.int32),
                is_idle=lambda slots: np.ones(len(slots), dtype=bool),
                can_go=lambda slot: True,
            )
        )

    @property
    def resident(self) -> set[int]:
        return {key for key in self.in_slot if key != -1}

    def slots_of(self, numbers: list[int]) -> SlotArray:
        return as_slots([self.in_slot.index(number) for number in numbers])

    def serve(self, numbers: list[int]) -> list[int]:
        self.now += 10
        there = [number for number in numbers if number in self.resident]
        new = [number for number in numbers if number not in self.resident]
        self.policy.use(self.slots_of(there))
        gone: list[int] = []
        wanted = len(new) - self.in_slot.count(-1)
        if wanted > 0:
            expected = self.policy.peek(wanted).tolist()
            taken = self.policy.take(wanted, ARRIVING).tolist()
            assert taken == expected, "peek names the next victims"
            assert len(taken) == wanted
            gone = [self.in_slot[slot] for slot in taken]
            for slot in taken:
                self.in_slot[slot] = -1
        for number in new:
            self.in_slot[self.in_slot.index(-1)] = number
        self.policy.insert(self.slots_of(new))
        return gone


batches = st.lists(
    st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=8), min_size=1, max_size=60
)


@both
@settings(max_examples=100, deadline=None)
@given(batches=batches, capacity=st.sampled_from((8, 11, 20)))
def test_it_does_what_was_published(
    make: type, published: type[Published], batches: list[list[int]], capacity: int
) -> None:
    cache, oracle = Cache(make, capacity), published(capacity)
    for batch in batches:
        assert cache.serve(batch) == oracle.serve(batch)
        assert cache.resident == oracle.resident
    if isinstance(cache.policy, Arc) and isinstance(oracle, PublishedArc):
        assert cache.policy.target == oracle.p


@both
def test_over_a_long_skewed_life(make: type, published: type[Published]) -> None:
    """Long enough for ghosts, laps and targets to matter: both find the same, again and again."""
    rng = np.random.default_rng(4)
    cache, oracle = Cache(make, 60), published(60)
    for _ in range(1500):
        numbers = np.unique(np.minimum(rng.zipf(1.2, 6) - 1, 400)).tolist()
        assert cache.serve(numbers) == oracle.serve(numbers)


@both
def test_what_one_request_does_in_a_moment_is_one_use(
    make: type, published: type[Published]
) -> None:
    """It looks up, loads, and stores block by block: no other request uses the blocks."""
    cache = Cache(make, 20)
    cache.serve([0, 1, 2, 3])
    slots = cache.slots_of([0, 1, 2, 3])

    def standing() -> tuple[list[int], list[int]]:
        uses = getattr(cache.policy, "_num_uses", np.zeros(20))
        return cache.policy._lists.homes(slots).tolist(), uses[slots].tolist()  # type: ignore[attr-defined]

    before = standing()
    for _ in range(3):
        cache.now += 0.3
        cache.policy.use(slots)
        assert standing() == before
    cache.now += 0.3
    cache.policy.use(slots)
    assert standing() != before


@pytest.mark.parametrize("make", [Arc, S3Fifo])
def test_what_was_taken_and_stays_is_no_ghost(make: type) -> None:
    cache = Cache(make, 6)
    cache.serve([0, 1, 2, 3, 4, 5])
    policy = cache.policy
    taken = policy.take(6, ARRIVING)
    policy.keep(taken[:2])
    policy.put_back(taken[2:4])
    policy.use(taken[4:5])
    lost = cache.in_slot[int(taken[5])]
    ghosts = getattr(policy, "_gone_once" if make is Arc else "_ghosts")
    assert len(ghosts) == 1
    assert keys([lost]).array[:, 0].tolist()[0] in ghosts
    assert set(policy.peek(6).tolist()) == set(taken[:5].tolist())
    assert policy.peek(2).tolist() == taken[2:4].tolist()


@pytest.mark.parametrize("name", ["slru", "arc", "s3fifo"])
def test_a_scan_leaves_what_was_used_again(name: str) -> None:
    """What LRU cannot do: a chain used three times outlives a flood of chains used once."""
    now = [0.0]
    pool = Pool(100, policy_named(name), clock=lambda: now[0])

    def serve(numbers: list[int]) -> int:
        now[0] += 30
        pin = pool.lease(keys(numbers))
        if pin is not None:
            pin.release()
        lease = pool.reserve(keys(numbers))
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


@needs_published
def test_hit_ratios_on_the_published_trace() -> None:
    """Within 0.003 of what others have computed with a simulation of their own.

    All sizes and policies stand in docs/simulate.md.
    """
    wanted = {("arc", 3000): 0.086}
    trials = tuple(Trial(policy, (capacity,)) for policy, capacity in wanted)
    asked = Simulation(paths=(PUBLISHED,), trials=trials, keep_partial=True, bound=False, jobs=1)
    for score in simulate(asked).scores:
        expected = wanted[score.trial.policy, score.trial.capacity[0]]
        assert abs(score.whole.hit_ratio - expected) < 0.003
