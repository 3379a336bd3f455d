"""What more memory would buy: small pools that stand for larger ones, fed with sampled blocks.

A block is looked at if its key says so, one in so many, wherever it comes up: the sampled blocks of
a request are a chain of their own. A pool of as small a share of the real one, with the real
policy, then hits as the real one does (a miniature simulation); pools for half, twice and four
times the memory say what those would hit. A block that all requests share counts for much and is
either sampled or not: so what is missing of the sample (or is too much) counts as hits (or does
not), as in SHARDS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvferry.cache.policies.contract import EvictionPolicyMaker, Evidence
from kvferry.cache.replay import PoolReplay, Tokens
from kvferry.telemetry.recorder import ObservedRequest

TIMES = (0.5, 1.0, 2.0, 4.0)
"""How many times the memory there is."""

_BLOCKS = 1024
"""Of the pool that stands for the memory there is. Fewer, and chance says more than the traffic."""
_LEAST_BLOCKS = 64
_FADE_BLOCKS = 1 << 16
"""Sampled blocks after which what was counted before counts half."""
_TELL_EVERY = 64
_LEAST_TOLD = 256
"""Blocks that must have come before anything is said."""

Points = Mapping[str, Mapping[float, float]]
"""By tier, by how many times its memory: the share of prompt tokens found."""


@dataclass(frozen=True)
class TierSizes:
    """One tier: how many blocks it and all above it hold, for each of ``TIMES`` its own memory.

    ``policy`` is what it has instead of the host's; one that ``feeds_below`` lets go otherwise.
    """

    name: str
    blocks: tuple[float, ...]
    policy: EvictionPolicyMaker | None = None
    feeds_below: bool = False


class MemoryCurve:
    """Owns the small pools of every tier, and the points of the curve as of the last look."""

    needs_all = False

    def __init__(
        self, tiers: Sequence[TierSizes], policy: EvictionPolicyMaker, *, block_tokens: int
    ) -> None:
        self.points: Points = MappingProxyType({})
        """Replaced as a whole: any thread may read it."""
        self._tiers = [TierCurve(tier, policy, block_tokens) for tier in tiers]
        self._num_news = 0

    def learn(self, request: ObservedRequest) -> None:
        for tier in self._tiers:
            tier.learn(request)
        self._num_news += 1
        if self._num_news >= _TELL_EVERY:
            self.idle()

    def idle(self) -> None:
        if self._num_news:
            points = {tier.name: MappingProxyType(tier.points()) for tier in self._tiers}
            self.points = MappingProxyType({name: each for name, each in points.items() if each})
            self._num_news = 0

    def hurry(self) -> None:
        for tier in self._tiers:
            tier.halve()

    def close(self) -> None:
        self._tiers.clear()


class TierCurve:
    """One tier's small pools. Owns them, and what was counted."""

    def __init__(self, tier: TierSizes, policy: EvictionPolicyMaker, block_tokens: int) -> None:
        self.name = tier.name
        self._blocks = tier.blocks
        self._policy = tier.policy or policy
        self._feeds_below = tier.feeds_below
        self._block_tokens = block_tokens
        self._begin(min(1.0, _BLOCKS / tier.blocks[TIMES.index(1.0)]))

    def _begin(self, share: float) -> None:
        self.share = share
        self._below = np.uint64(min(math.ceil(share * 2**32), 2**32))
        self._pools = [
            PoolReplay(max(1, round(blocks * share)), self._policy) for blocks in self._blocks
        ]
        for replay in self._pools:
            replay.pool.eviction.feeds_below = self._feeds_below
        self._hits = [0.0] * len(TIMES)
        self._sampled = self._asked = self._tokens = 0.0

    def halve(self) -> None:
        """Look at half as many blocks from now on; what was learned so far goes."""
        if self.share * self._blocks[TIMES.index(1.0)] >= 2 * _LEAST_BLOCKS:
            self._begin(self.share / 2)

    def learn(self, request: ObservedRequest) -> None:
        keys = request.keys
        self._asked += len(keys)
        self._tokens += max(request.tokens, len(keys) * self._block_tokens)
        if self.share < 1:
            chosen = (keys.array[:, 2] >> np.uint64(32)) < self._below
            keys = keys.take(np.flatnonzero(chosen))
        if not len(keys):
            return
        tokens = Tokens(request.tokens, request.answer_tokens or 0)
        evidence = _evidence(request)
        self._sampled += len(keys)
        for at, pool in enumerate(self._pools):
            self._hits[at] += sum(pool.serve(keys, len(keys), request.at, evidence, tokens))
        if self._sampled > _FADE_BLOCKS:
            self._hits = [hits / 2 for hits in self._hits]
            self._sampled, self._asked = self._sampled / 2, self._asked / 2
            self._tokens /= 2

    def points(self) -> dict[float, float]:
        """The share of prompt tokens found, by how many times the memory; empty if too little."""
        expected = self._asked * self.share
        if self._sampled < _LEAST_TOLD or expected <= 0:
            return {}
        whole = self._asked * self._block_tokens / self._tokens
        found = [(hits + expected - self._sampled) / expected * whole for hits in self._hits]
        # More memory never hurts here as much as chance does.
        rising = np.maximum.accumulate(np.clip(found, 0.0, 1.0)).tolist()
        return dict(zip(TIMES, rising, strict=True))


def _evidence(request: ObservedRequest) -> Evidence | None:
    said = request.hints
    if said is None or not (said.ended or said.continues):
        return None
    return Evidence(ended=said.ended, continues=said.continues, within=said.within)
