"""The proof that everything a pool has written down about its slots agrees."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.cache.chains import Chains
from kvferry.cache.index import Index
from kvferry.cache.leases import Lease, PoolCounts, Purpose, SlotState
from kvferry.cache.policies.contract import EvictionPolicy
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOTS, SlotArray

Flags = npt.NDArray[np.bool_]

_FREE, _WRITING, _CACHED, _DOOMED, _UNREADY = (state.value for state in SlotState)
_WRITE = Purpose.WRITE  # looked up once: before Python 3.12 an enum finds its members slowly


@dataclass(frozen=True)
class PoolCheck:
    """Everything a pool keeps, as it is at this moment. Not a copy: read it and let it go."""

    state: npt.NDArray[np.int8]
    readers: npt.NDArray[np.int32]
    free: SlotArray
    num_ready: int
    index: Index
    chains: Chains
    policy: EvictionPolicy
    leases: AbstractSet[Lease]
    held: SlotArray
    counts: PoolCounts
    num_doomed: int

    def check(self) -> None:
        """Prove them from scratch; raises IntegrityError with what is wrong.

        free + cached + leased + unready == total; every index entry names a slot that owns its key;
        the reader counts are those of the open leases; parents outlive their children.
        """
        self._check_free()
        cached = self.state == _CACHED
        owned = cached | (self.state == _WRITING)
        self._check_index(owned.nonzero()[0])
        self._check_claims(cached)
        self.chains.check(owned)
        evictable = (cached & (self.readers == 0)).nonzero()[0]
        _require(_all(self.policy.holds(evictable)), "the policy lost a cached slot")

    def _check_free(self) -> None:
        unready, is_free = self.state == _UNREADY, self.state == _FREE
        _require(
            _all(unready[self.num_ready :]) and not _any(unready[: self.num_ready]),
            "a slot is used before it is ready, or the other way round",
        )
        listed = self._marked(self.free)
        _require(_num(listed) == len(self.free), "a slot is on the free list twice")
        _require(not _any(listed & ~is_free), "a slot in use is on the free list")
        _require(_num(is_free) == len(self.free), "a free slot is not listed")

    def _check_index(self, owned: SlotArray) -> None:
        indexed = self.index.slots()
        _require(_same(indexed, owned), "index and slot states disagree")
        _require(len(self.index) == len(indexed), "the index miscounts itself")
        again = self.index.find(self.index.keys_of(indexed))
        _require(_same(again, indexed), "an index entry points at a slot of another key")

    def _check_claims(self, cached: Flags) -> None:
        readers = np.zeros_like(self.readers)
        writing: list[SlotArray] = [NO_SLOTS]
        for lease in self.leases:
            _require(lease.ended is None, "an ended lease is still open in the pool")
            if lease.purpose is _WRITE:
                writing.append(lease.slots)
            else:
                readers[lease.slots] += 1
        readers[self.held] += 1
        counts = self.counts
        _require(counts.held == len(self.held), "held slots are miscounted")
        _require(_all(cached[self.held]), "a slot is held and not cached")
        _require(_same(readers, self.readers), "reader counts and leases disagree")
        written = np.concatenate(writing)
        claimed = self._marked(written)
        _require(_num(claimed) == len(written), "two leases write one slot")
        claimed |= readers > 0
        at_rest = cached | (self.state == _FREE) | (self.state == _UNREADY)
        _require(
            _all(at_rest | claimed), "a slot is neither free nor cached though nobody claims it"
        )
        _require(counts.cached == _num(cached & ~claimed), "cached slots are miscounted")
        _require(counts.leased == _num(claimed), "leased slots and leases disagree")
        doomed = _num(self.state == _DOOMED)
        _require(self.num_doomed == doomed, "doomed slots are miscounted")
        _require(
            counts.free + counts.cached + counts.leased + counts.unready == counts.total,
            "free + cached + leased + unready != total",
        )

    def _marked(self, slots: SlotArray) -> Flags:
        marks = np.zeros(len(self.state), dtype=bool)
        marks[slots] = True
        return marks


# Each is one call of numpy: tests prove small pools hundreds of thousands of times.
_num = np.count_nonzero


def _any(flags: Flags) -> bool:
    return bool(_num(flags))


def _all(flags: Flags) -> bool:
    return _num(flags) == len(flags)


def _same(some: npt.NDArray[np.integer], others: npt.NDArray[np.integer]) -> bool:
    return len(some) == len(others) and not _any(some != others)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise IntegrityError(f"pool: {what}")
