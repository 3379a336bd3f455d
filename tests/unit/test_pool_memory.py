"""What a pool of many slots costs in bytes: a tier may have ten million."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry import types
from kvferry.cache.pins import Pins
from kvferry.cache.pool import Pool
from kvferry.scheduler.tier import SlotTier
from kvferry.types import TierName

NUM_SLOTS = 200_000
MOST_BYTES = 105
"""Per slot, all of it; 98 were measured at ten million (``bench/large_tier.py``)."""


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "MANY_SLOTS", 1)


def array_bytes(part: Any, seen: set[int]) -> int:
    """The bytes of all arrays that a part has, and the parts it has; each memory once."""
    if isinstance(part, np.ndarray):
        memory = part if part.base is None else part.base
        if not isinstance(memory, np.ndarray) or id(memory) in seen:
            return 0
        seen.add(id(memory))
        return memory.nbytes
    # Pins are arrays of zeros that take no memory before their first use.
    if isinstance(part, Pins) or id(part) in seen or not hasattr(part, "__module__"):
        return 0
    seen.add(id(part))
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*vars(part)] if hasattr(part, "__dict__") else slots
    return sum(array_bytes(getattr(part, name), seen) for name in names if hasattr(part, name))


@pytest.mark.usefixtures("_large")
def test_a_large_pool_takes_few_bytes_a_slot() -> None:
    tier = SlotTier(TierName("disk"), Pool(NUM_SLOTS))
    places = np.random.default_rng(3).permutation(NUM_SLOTS)
    tier.restore([(keys(range(NUM_SLOTS)), places)])
    num_bytes = array_bytes(tier.pool, set())
    assert 80 < num_bytes / NUM_SLOTS < MOST_BYTES
    tier.pool.check_integrity()


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
