"""Replays a request on a pool without moving bytes: lookup, hit, store."""

from __future__ import annotations

from kvferry.cache.policies.contract import EvictionPolicyMaker, Evidence
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOTS

TierHits = tuple[int, ...]
"""Hit blocks found on each tier, host memory first."""


class PoolReplay:
    """Replays requests on host memory alone. Owns a pool and its clock; stores take no time."""

    def __init__(self, num_slots: int, policy: EvictionPolicyMaker) -> None:
        self._now = 0.0
        self.pool = Pool(num_slots, policy, clock=lambda: self._now)

    @property
    def evicted(self) -> int:
        """Blocks evicted so far."""
        return self.pool.counts.evicted

    @property
    def stored(self) -> int:
        """Blocks stored in host memory so far."""
        return self.pool.num_reserved

    def serve(
        self,
        keys: Keys,
        num_storable: int,
        at: float,
        evidence: Evidence | None = None,
        num_tokens: int = 0,
    ) -> TierHits:
        """Serve one request as the scheduler does: lookup, load, store.

        Args:
            keys: The keys of its blocks.
            num_storable: How many of its leading blocks to store.
            at: When it came, in seconds.
            evidence: Its hint.
            num_tokens: Its length.

        Returns:
            The number of leading blocks that were found, by tier.
        """
        self._now = at
        pool = self.pool
        reading = pool.lease(keys)
        found = reading.slots if reading is not None else NO_SLOTS
        hit = len(found)
        whole = keys[:num_storable]
        pool.asked(whole, num_tokens, found[:num_storable], evidence)
        if reading is not None:
            reading.release()
        if hit < num_storable:
            parent = keys[hit - 1] if hit else None
            writing = pool.reserve(keys[hit:num_storable], parent=parent)
            if writing is not None:
                writing.commit()
        if evidence is not None:  # the request has ended
            pool.hint(whole, evidence)
        pool.catch_up()
        pool.raise_failure()
        return (hit,)
