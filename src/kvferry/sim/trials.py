"""What is tried and what came of it: a policy at a capacity is a trial, its figures a score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.settings.policies import DEFAULT_TIER_POLICY

Capacity = tuple[int, ...]
"""Blocks of each tier, host memory first."""


@dataclass(frozen=True)
class Trial:
    """One policy at one capacity.

    ``write`` is how blocks reach the tiers below the host, which have a policy of their own.
    """

    policy: str
    capacity: Capacity
    write: str = "spill"
    tier_policy: str = DEFAULT_TIER_POLICY


@dataclass(eq=False)
class Tally:
    """What was counted over some requests. Owns only sums.

    ``hits`` are blocks found, by the tier they were found on, nearest first: found, and all blocks
    before them in their request as well.
    """

    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    hits: list[int] = field(default_factory=list)

    def add(self, blocks: int, tokens: int, hits: Capacity, hit_tokens: int) -> None:
        """One request: what it asked for, and what was found of it on each tier."""
        self.requests += 1
        self.blocks += blocks
        self.tokens += tokens
        self.hit_tokens += hit_tokens
        for tier, count in enumerate(hits):
            if tier == len(self.hits):
                self.hits.append(0)
            self.hits[tier] += count

    @property
    def hit_ratio(self) -> float:
        """Blocks found of all blocks that were asked for."""
        return sum(self.hits) / self.blocks if self.blocks else 0.0

    @property
    def token_ratio(self) -> float:
        """Prompt tokens that need not be computed, of all of them."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    def as_data(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "hit_blocks": sum(self.hits),
            "hit_blocks_by_tier": list(self.hits),
            "hit_ratio": round(self.hit_ratio, 5),
            "tokens": self.tokens,
            "tokens_saved": self.hit_tokens,
            "token_ratio": round(self.token_ratio, 5),
        }


@dataclass(eq=False)
class Score:
    """The figures of one trial: of all requests, and of each part of the trace by itself."""

    trial: Trial
    whole: Tally
    parts: dict[str, Tally]
    stored: int = 0
    evicted: int = 0
    seconds: float = 0.0

    def as_data(self) -> dict[str, Any]:
        return {
            "policy": self.trial.policy,
            "tier_policy": self.trial.tier_policy if len(self.trial.capacity) > 1 else None,
            "capacity_blocks": list(self.trial.capacity),
            **self.whole.as_data(),
            "stored": self.stored,
            "evicted": self.evicted,
            "seconds": round(self.seconds, 3),
            "parts": {name: tally.as_data() for name, tally in self.parts.items()},
        }
