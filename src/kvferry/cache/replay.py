"""What a request does to a pool, without bytes: look, use what is there, store the rest."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvferry.cache.policies.contract import EvictionPolicyMaker, Evidence
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOTS

TierHits = tuple[int, ...]
"""Blocks found, by tier, host memory first."""


class Tokens(NamedTuple):
    """How long a request and its answer are."""

    prompt: int = 0
    answer: int = 0


NO_TOKENS = Tokens()


class Replay(Protocol):
    """What serves the requests of a trace, one after another, without bytes."""

    @property
    def evicted(self) -> int:
        """Blocks that made room for others so far, on all tiers."""

    @property
    def stored(self) -> int:
        """Blocks that were given a place in host memory so far."""

    def serve(
        self,
        keys: Keys,
        num_storable: int,
        at: float,
        evidence: Evidence | None,
        tokens: Tokens = NO_TOKENS,
    ) -> TierHits:
        """A request with these blocks came ``at`` so many seconds; returns what it found.

        Leading blocks, by the tier that has them. The first ``num_storable`` of its blocks are
        stored; ``evidence`` is told once they are. Policies that hear of requests are told the
        ``tokens`` of this one.
        """


class PoolReplay:
    """Host memory alone: a pool, and nothing that takes time. Owns the pool and its clock."""

    def __init__(self, num_slots: int, policy: EvictionPolicyMaker) -> None:
        self._now = 0.0
        self.pool = Pool(num_slots, policy, clock=lambda: self._now)

    @property
    def evicted(self) -> int:
        return self.pool.counts.evicted

    @property
    def stored(self) -> int:
        return self.pool.num_reserved

    def serve(
        self,
        keys: Keys,
        num_storable: int,
        at: float,
        evidence: Evidence | None,
        tokens: Tokens = NO_TOKENS,
    ) -> TierHits:
        self._now = at
        reading = self.pool.pin(keys)
        found = reading.slots if reading is not None else NO_SLOTS
        hit = len(found)
        # It is stored when it is over, so its answer is known by then.
        whole = keys[:num_storable]
        self.pool.asked(whole, tokens.prompt, found[:num_storable])
        self.pool.answered(whole, tokens.answer)
        if reading is not None:
            reading.release()
        if hit < num_storable:
            parent = keys[hit - 1] if hit else None
            writing = self.pool.reserve(keys[hit:num_storable], parent=parent)
            if writing is not None:
                writing.commit()
        if evidence is not None:
            self.pool.hint(whole, evidence)
        self.pool.catch_up()
        self.pool.raise_failure()
        return (hit,)
