"""What a pool of many slots costs in bytes: a level may have ten million."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry import types
from kvferry.pool import Pool
from kvferry.scheduler.level import PlacedLevel
from kvferry.types import TierName

NUM_SLOTS = 200_000
MOST_BYTES = 112
"""Per slot, all of it. With 16 bytes of the tier's and 10 million slots: 1.2 GiB."""


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "MANY_SLOTS", 1)


@pytest.mark.usefixtures("_large")
def test_a_large_pool_takes_few_bytes_a_slot() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        level = PlacedLevel(TierName("disk"), Pool(NUM_SLOTS))
        some = keys(range(NUM_SLOTS))
        made = tracemalloc.get_traced_memory()[0] - before - some.array.nbytes
        tracemalloc.reset_peak()
        level.restore([(some, np.random.default_rng(3).permutation(NUM_SLOTS))])
        peak = tracemalloc.get_traced_memory()[1] - before - some.array.nbytes
    finally:
        tracemalloc.stop()
    level.check_integrity()
    # Conversations are arrays of zeros that nobody touches: no memory, but counted here.
    untouched = 16
    assert made / NUM_SLOTS < MOST_BYTES + untouched
    assert peak / NUM_SLOTS < MOST_BYTES + untouched + 64, "restoring takes little more for a while"


@pytest.mark.usefixtures("_large")
def test_it_works_as_any_other() -> None:
    pool = Pool(64)
    for start in range(0, 400, 20):
        lease = pool.reserve(keys(range(start, start + 20)))
        assert lease is not None
        lease.commit()
        pool.check_integrity()
    assert pool.match(keys(range(380, 400))) == 20
    pool.reset()
    pool.check_integrity()
