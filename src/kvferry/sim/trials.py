"""The trials of a simulation and their scores. A trial is a policy at a capacity."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.settings.policies import DEFAULT_TIER_POLICY

Capacity = tuple[int, ...]
"""Blocks of each tier, host memory first."""

ALL_KNOWING = "all-knowing"
"""The policy name of the bound."""

HALVES = ("first half", "second half")


@dataclass(frozen=True)
class Trial:
    """One policy at one capacity. ``write`` is how blocks reach the tiers below the host."""

    policy: str
    capacity: Capacity
    write: str = "spill"
    tier_policy: str = DEFAULT_TIER_POLICY


@dataclass(frozen=True)
class TracePart:
    """The part of a trace to simulate, in shares of its requests or in seconds."""

    start_share: float = 0.0
    end_share: float = 1.0
    start_seconds: float = 0.0
    end_seconds: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The trials, their trace and the rules. Plain data, so that it travels to other processes.

    Partial last blocks are looked up, and stored only with ``keep_partial``. For a ``hints`` share
    of the conversations the policy learns from the trace's future whether they continue. ``halves``
    also counts each half of the requests.
    """

    paths: tuple[Path, ...]
    trials: tuple[Trial, ...]
    block_tokens: int | None = None
    strict: bool = False
    keep_partial: bool = False
    hints: float = 0.0
    seed: int = 0
    span: TracePart = field(default_factory=TracePart)
    halves: bool = False
    bound: bool = True
    jobs: int = 0


@dataclass(eq=False)
class Tally:
    """Counts over some requests.

    ``hits`` are the blocks found on each tier, nearest first. A block counts if all blocks before
    it in its request were found too.
    """

    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    hits: list[int] = field(default_factory=list)

    def add(self, blocks: int, tokens: int, hits: Capacity, hit_tokens: int) -> None:
        """Count one request."""
        self.requests += 1
        self.blocks += blocks
        self.tokens += tokens
        self.hit_tokens += hit_tokens
        self.hits += [0] * (len(hits) - len(self.hits))
        for tier, count in enumerate(hits):
            self.hits[tier] += count

    @property
    def hit_ratio(self) -> float:
        """Blocks found of all blocks looked up."""
        return sum(self.hits) / self.blocks if self.blocks else 0.0

    @property
    def token_ratio(self) -> float:
        """Share of the prompt tokens that need no compute."""
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
    """The figures of one trial: of all requests, and of each half of them if asked for."""

    trial: Trial
    whole: Tally = field(default_factory=Tally)
    parts: dict[str, Tally] = field(default_factory=dict)
    stored: int = 0
    evicted: int = 0
    seconds: float = 0.0

    def add(
        self, share: float, blocks: int, tokens: int, hits: Capacity, block_tokens: int
    ) -> None:
        """Count one request at this share of the trace."""
        saved = min(sum(hits) * block_tokens, tokens)
        self.whole.add(blocks, tokens, hits, saved)
        if self.parts:
            self.parts[HALVES[share >= 0.5]].add(blocks, tokens, hits, saved)

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
