"""The proof that everything a pool has written down about its slots agrees."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.chains import Chains
from kvferry.errors import IntegrityError
from kvferry.index import Index
from kvferry.lease import Lease, Purpose
from kvferry.policy import EvictionPolicy
from kvferry.slot_states import PoolCounts, SlotState
from kvferry.types import SlotArray


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
        owned = (self.state == SlotState.WRITING) | (self.state == SlotState.CACHED)
        self._check_index(np.flatnonzero(owned))
        self._check_claims()
        self.chains.check(owned)
        evictable = np.flatnonzero((self.state == SlotState.CACHED) & (self.readers == 0))
        _require(bool(self.policy.holds(evictable).all()), "the policy lost a cached slot")

    def _check_free(self) -> None:
        state, free = self.state, self.free
        _require(
            np.array_equal(
                np.flatnonzero(state == SlotState.UNREADY), np.arange(self.num_ready, len(state))
            ),
            "a slot is used before it is ready, or the other way round",
        )
        _require(len(np.unique(free)) == len(free), "a slot is on the free list twice")
        _require(bool((state[free] == SlotState.FREE).all()), "a slot in use is on the free list")
        _require(int((state == SlotState.FREE).sum()) == len(free), "a free slot is not listed")

    def _check_index(self, owned: SlotArray) -> None:
        indexed = np.sort(self.index.slots())
        _require(np.array_equal(indexed, owned), "index and slot states disagree")
        _require(len(self.index) == len(indexed), "the index miscounts itself")
        again = self.index.find(self.index.keys_of(indexed))
        _require(np.array_equal(again, indexed), "an index entry points at a slot of another key")

    def _check_claims(self) -> None:
        readers = np.zeros_like(self.readers)
        writing: list[SlotArray] = [np.empty(0, dtype=np.int64)]
        for lease in self.leases:
            _require(lease.ended is None, "an ended lease is still open in the pool")
            if lease.purpose is Purpose.WRITE:
                writing.append(lease.slots)
            else:
                readers[lease.slots] += 1
        readers[self.held] += 1
        _require(self.counts.held == len(self.held), "held slots are miscounted")
        _require(
            bool((self.state[self.held] == SlotState.CACHED).all()), "a slot is held and not cached"
        )
        written = np.concatenate(writing)
        _require(np.array_equal(readers, self.readers), "reader counts and leases disagree")
        _require(len(np.unique(written)) == len(written), "two leases write one slot")
        claimed = readers > 0
        claimed[written] = True
        unclaimed = self.state[~claimed]
        _require(
            bool(np.isin(unclaimed, (SlotState.FREE, SlotState.CACHED, SlotState.UNREADY)).all()),
            "a slot is neither free nor cached though nobody claims it",
        )
        counts = self.counts
        cached = (self.state == SlotState.CACHED) & ~claimed
        _require(counts.cached == int(cached.sum()), "cached slots are miscounted")
        _require(counts.leased == int(claimed.sum()), "leased slots and leases disagree")
        doomed = int((self.state == SlotState.DOOMED).sum())
        _require(self.num_doomed == doomed, "doomed slots are miscounted")
        _require(
            counts.free + counts.cached + counts.leased + counts.unready == counts.total,
            "free + cached + leased + unready != total",
        )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise IntegrityError(f"pool: {what}")
