"""Several levels: the real scheduler plans every move, and every move has been made at once."""

from __future__ import annotations

import numpy as np

from kvferry.answers import MatchState
from kvferry.config import Config
from kvferry.hints import Hints
from kvferry.keys import Keys
from kvferry.policy import EvictionPolicyMaker, Evidence
from kvferry.pool import Pool
from kvferry.reach import FullAttention
from kvferry.replay import NO_TOKENS, Tokens
from kvferry.scheduler import PlacedLevel, Scheduler, WriteMode
from kvferry.simulate.trials import Capacity
from kvferry.types import FIRST_RANK, Outcome, Receipt, TierName

_MOST_STEPS = 1000
"""A request that waits longer than this for what comes up from below computes it."""


class SchedulerReplay:
    """Host memory and the levels below it. Owns a scheduler, its pools and their clock.

    Blocks go down and come up as in a server, where nothing takes time: what is spilled in a step
    lies below in the next, and a promotion brings as much as the host has room for.
    """

    def __init__(
        self,
        capacity: Capacity,
        policy: EvictionPolicyMaker,
        level_policy: EvictionPolicyMaker,
        *,
        write: str,
        block_tokens: int,
    ) -> None:
        self._now = 0.0
        self._block_tokens = block_tokens

        def clock() -> float:
            return self._now

        self.host = Pool(capacity[0], policy, clock=clock)
        self.levels = [
            PlacedLevel(
                TierName(f"level{at}"),
                Pool(num_places, level_policy, clock=clock),
                WriteMode(write),
            )
            for at, num_places in enumerate(capacity[1:], 1)
        ]
        self.scheduler = Scheduler(
            self.host,
            (FullAttention(block_tokens),),
            config=Config(load_policy="always", memory_curve="off"),
            levels=self.levels,
            clock=clock,
        )

    @property
    def evicted(self) -> int:
        pools = [self.host, *(level.pool for level in self.levels)]
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
    ) -> Capacity:
        self._now = at
        where = self._where(keys)
        hints = None
        if evidence is not None:
            hints = Hints(over=evidence.over, goes_on=evidence.goes_on, within=evidence.within)
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
        found = np.bincount(where[:hit], minlength=len(self.levels) + 1)
        return tuple(found.tolist())

    def _where(self, keys: Keys) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The nearest level that has each block; 0 is the host, and stands for those nowhere."""
        where = np.zeros(len(keys), dtype=np.int64)
        missing = ~self.host.cached(keys)
        for at, level in enumerate(self.levels, 1):
            here = missing & level.pool.cached(keys)
            where[here] = at
            missing &= ~here
        return where

    def _step(self) -> None:
        plan = self.scheduler.plan()
        self.scheduler.settle(
            Receipt(transfer.id, FIRST_RANK, Outcome.OK) for transfer in plan.transfers
        )
