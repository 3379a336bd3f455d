"""The effect of a request on host memory and the tiers below it, without bytes."""

from __future__ import annotations

import numpy as np

from kvferry.cache.policies.contract import EvictionPolicyMaker, Evidence
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.cache.replay import NO_TOKENS, TierHits, Tokens
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.hints import Hints
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.types import FIRST_RANK, MatchState, Outcome, Receipt, TierName

_MOST_STEPS = 1000
"""A request computes its blocks if their promotion takes more steps."""


class SchedulerReplay:
    """Host memory and the tiers below it. Owns a scheduler, its pools and their clock.

    Transfers take no time: a block spilled in one step is on its tier in the next, and a promotion
    brings as many blocks as the host has room for.
    """

    def __init__(
        self,
        capacity: TierHits,
        policy: EvictionPolicyMaker,
        tier_policy: EvictionPolicyMaker,
        *,
        write: str,
        block_tokens: int,
    ) -> None:
        self._now = 0.0
        self._block_tokens = block_tokens

        def clock() -> float:
            return self._now

        self.host = Pool(capacity[0], policy, clock=clock)
        self.tiers = [
            SlotTier(
                TierName(f"tier{at}"),
                Pool(num_places, tier_policy, clock=clock),
                WriteMode(write),
            )
            for at, num_places in enumerate(capacity[1:], 1)
        ]
        self.scheduler = Scheduler(
            self.host,
            (FullAttention(block_tokens),),
            config=Config(load_policy="always", memory_curve="off"),
            tiers=self.tiers,
            clock=clock,
        )

    @property
    def evicted(self) -> int:
        pools = [self.host, *(tier.pool for tier in self.tiers)]
        return sum(pool.counts.evicted for pool in pools)

    @property
    def stored(self) -> int:
        return self.host.num_reserved

    def serve(
        self,
        keys: Keys,
        num_storable: int,
        at: float,
        evidence: Evidence | None,
        tokens: Tokens = NO_TOKENS,
    ) -> TierHits:
        self._now = at
        where = self._where(keys)
        hints = None
        if evidence is not None:
            hints = Hints(
                ended=evidence.ended, continues=evidence.continues, within=evidence.within
            )
        request = self.scheduler.open("", keys, hints)
        match = request.match()
        for _ in range(_MOST_STEPS):
            if match.state is not MatchState.WAIT:
                break
            self._step()
            match = request.match()
        hit = match.num_tokens // self._block_tokens if match.state is MatchState.HIT else 0
        table = np.arange(len(keys))
        if hit:
            request.load([table])
            self._step()
        request.store([table], num_storable * self._block_tokens)
        request.end()
        self._step()
        found = np.bincount(where[:hit], minlength=len(self.tiers) + 1)
        return tuple(found.tolist())

    def _where(self, keys: Keys) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The nearest tier of each block. 0 is the host, and stands for missing blocks too."""
        where = np.zeros(len(keys), dtype=np.int64)
        missing = ~self.host.cached(keys)
        for at, tier in enumerate(self.tiers, 1):
            here = missing & tier.pool.cached(keys)
            where[here] = at
            missing &= ~here
        return where

    def _step(self) -> None:
        plan = self.scheduler.plan()
        self.scheduler.settle(
            Receipt(transfer.id, FIRST_RANK, Outcome.OK) for transfer in plan.transfers
        )
