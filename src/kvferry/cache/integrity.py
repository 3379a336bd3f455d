"""Integrity check of a pool: states, index, chains, leases and counts must agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import EvictionPolicy
from kvferry.cache.slots import CACHED, DOOMED, FREE, UNREADY, WRITING, Index, PoolCounts, SlotTable
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOTS, SlotArray

Flags = npt.NDArray[np.bool_]


def check_pool(
    table: SlotTable,
    policy: EvictionPolicy | None,
    *,
    pinned: SlotArray,
    written: Sequence[SlotArray],
    read: Sequence[SlotArray],
    counts: PoolCounts,
    num_ready: int,
) -> None:
    """Check a pool's bookkeeping from scratch; raise IntegrityError with the first contradiction.

    ``written`` and ``read`` are the slots of each open lease. ``policy`` is None after it raised an
    exception: it lacks slots until room is next made.

    free + cached + leased + unready == total. Every index entry names a slot that owns its key.
    The reader counts are those of the open leases and pins. Parents outlive their children.
    """
    state = table.state[:-1]
    cached = state == CACHED
    owned = cached | (state == WRITING)
    _check_free(state, table.free.slots, num_ready)
    _check_index(table.index, owned.nonzero()[0])
    _check_claims(table, written, (*read, pinned), counts)
    _require(counts.pinned == len(pinned), "pinned slots are miscounted")
    _require(_all(cached[pinned]), "a slot is pinned and not cached")
    table.chains.check(owned)
    evictable = (cached & (table.readers == 0)).nonzero()[0]
    if policy is not None:
        _require(_all(policy.holds(evictable)), "the policy lost a cached slot")


def _check_free(state: npt.NDArray[np.int8], free: SlotArray, num_ready: int) -> None:
    unready, is_free = state == UNREADY, state == FREE
    _require(
        _all(unready[num_ready:]) and not _any(unready[:num_ready]),
        "a slot is used before it is ready, or the other way round",
    )
    listed = _marked(free, len(state))
    _require(_num(listed) == len(free), "a slot is on the free list twice")
    _require(not _any(listed & ~is_free), "a slot in use is on the free list")
    _require(_num(is_free) == len(free), "a free slot is not listed")


def _check_index(index: Index, owned: SlotArray) -> None:
    indexed = index.slots()
    _require(_same(indexed, owned), "index and slot states disagree")
    _require(len(index) == len(indexed), "the index miscounts itself")
    again = index.find(index.keys_of(indexed))
    _require(_same(again, indexed), "an index entry points at a slot of another key")


def _check_claims(
    table: SlotTable,
    writing: Sequence[SlotArray],
    reading: Sequence[SlotArray],
    counts: PoolCounts,
) -> None:
    state = table.state[:-1]
    cached = state == CACHED
    readers = np.zeros_like(table.readers)
    for slots in reading:
        readers[slots] += 1
    _require(_same(readers, table.readers), "reader counts and leases disagree")
    written = np.concatenate((NO_SLOTS, *writing))
    claimed = _marked(written, len(state))
    _require(_num(claimed) == len(written), "two leases write one slot")
    claimed |= readers > 0
    at_rest = cached | (state == FREE) | (state == UNREADY)
    _require(_all(at_rest | claimed), "a slot is neither free nor cached, and nothing claims it")
    _require(counts.cached == _num(cached & ~claimed), "cached slots are miscounted")
    _require(counts.leased == _num(claimed), "leased slots and leases disagree")
    _require(table.num_doomed == _num(state == DOOMED), "doomed slots are miscounted")
    _require(
        counts.free + counts.cached + counts.leased + counts.unready == counts.total,
        "free + cached + leased + unready != total",
    )


# One call of numpy each: tests check small pools hundreds of thousands of times.
_num = np.count_nonzero


def _marked(slots: SlotArray, num_slots: int) -> Flags:
    marks = np.zeros(num_slots, dtype=bool)
    marks[slots] = True
    return marks


def _any(flags: Flags) -> bool:
    return bool(_num(flags))


def _all(flags: Flags) -> bool:
    return _num(flags) == len(flags)


def _same(some: npt.NDArray[np.integer], others: npt.NDArray[np.integer]) -> bool:
    return len(some) == len(others) and not _any(some != others)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise IntegrityError(f"pool: {what}")
