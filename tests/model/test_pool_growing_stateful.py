"""The pool's random sequences again, while its memory becomes ready bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.model.test_pool_stateful import PLACINGS, PoolMachine

from kvferry.cache.pool import Pool
from kvferry.errors import InputError


class GrowingPoolMachine(PoolMachine):
    """A slot that is not ready is never given out, and is used like any other from then on."""

    @initialize(num_slots=st.integers(1, 12), placing=PLACINGS, ready=st.integers(0, 12))
    def start(self, num_slots: int, placing: dict[str, Any], ready: int = 0) -> None:
        super().start(num_slots, placing)
        self.pool = Pool(num_slots, num_ready=min(ready, num_slots), **placing)
        self.model.total = self.pool.num_ready

    @rule(ready=st.integers(0, 12))
    def grow(self, ready: int) -> None:
        if ready > self.pool.num_slots:
            with pytest.raises(InputError, match=f"cannot have {ready} ready"):
                self.pool.grow(ready)
            return
        free = self.pool.num_free
        grown = max(0, ready - self.pool.num_ready)
        self.pool.grow(ready)
        assert self.pool.num_free == free + grown
        self.model.total = max(self.model.total, ready)

    @invariant()
    def only_ready_slots_are_used(self) -> None:
        if not hasattr(self, "pool"):
            return
        counts = self.pool.counts
        assert counts.unready == self.pool.num_slots - self.model.total
        assert counts.free + counts.cached + counts.leased + counts.unready == counts.total
        for claim in self.model.claims:
            assert all(slot < self.model.total for slot in claim.lease.slots.tolist())

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.grow(self.pool.num_slots)
            self.model.total = self.pool.num_slots
        super().teardown()


TestGrowingPool = GrowingPoolMachine.TestCase
TestGrowingPool.settings = settings(stateful_step_count=50)
