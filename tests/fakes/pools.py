"""Emptying a pool by what it offers its users: room is made by asking for it."""

from __future__ import annotations

from itertools import count

import numpy as np
from tests.fakes.crafted_keys import keys

from kvferry.cache.pool import Pool
from kvferry.cache.slots import Purpose
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOT, SlotArray

_new = count(1 << 40)


def evict(pool: Pool, num_slots: int) -> int:
    """Have up to so many blocks evicted by a store that is then called off; returns how many."""
    if num_slots <= 0:
        return 0
    evicted, reserved = pool.counts.evicted, pool.num_reserved
    lease = pool.reserve(keys(next(_new) for _ in range(pool.num_free + num_slots)), chained=False)
    if lease is not None:
        lease.abort()
    pool.num_reserved = reserved  # nobody wanted these
    return pool.counts.evicted - evicted


def forget(pool: Pool, gone: Keys) -> None:
    """These blocks, where they are cached, turn out to be unreadable."""
    for each in gone:
        lease = pool.lease(Keys.from_bytes([each]), Purpose.COPY)
        if lease is not None:
            lease.spoil()


def cached_slots(pool: Pool, blocks: Keys) -> SlotArray:
    """The slot of each key whose block can be read now, ``NO_SLOT`` for the others."""
    return np.where(pool.cached(blocks), pool.find(blocks), NO_SLOT)
