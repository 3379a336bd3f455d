"""What a pool of many slots costs in bytes: a level may have ten million."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry import types
from kvferry.pool import Pool
from kvferry.scheduler.level import PlacedLevel
from kvferry.types import TierName, as_slots

NUM_SLOTS = 200_000
MOST_BYTES = 125
"""Per slot, all of it; 98 at ten million, where sizes that are powers of two fit better."""


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "MANY_SLOTS", 1)


def resident() -> int:
    """Bytes of memory this process really has: arrays of zeros that nobody touches take none."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.usefixtures("_large")
def test_a_large_pool_takes_few_bytes_a_slot() -> None:
    some, places = keys(range(NUM_SLOTS)), np.random.default_rng(3).permutation(NUM_SLOTS)
    PlacedLevel(TierName("warm"), Pool(8)).restore([(some[:4], as_slots(range(4)))])
    gc.collect()
    before = resident()
    level = PlacedLevel(TierName("disk"), Pool(NUM_SLOTS))
    level.restore([(some, places)])
    gc.collect()
    assert (resident() - before) / NUM_SLOTS < MOST_BYTES
    level.check_integrity()


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
