"""What was counted: running counters for one owner, immutable snapshots for everyone else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.cache.slots import PoolCounts
from kvferry.cache.tenants import TenantCounts
from kvferry.types import HOST

TrafficKey = tuple[str, str, str]
"""From which tier, to which, by which path."""


class Traffic(NamedTuple):
    """What moved between two tiers by one path: the copies that succeeded, rank by rank."""

    num_copies: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass
class MatchCounts:
    """What the scheduler counts about hits while it runs."""

    queries: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    expired_hits: int = 0
    unheeded_hints: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    tier_hit_tokens: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of the scheduler half.

    ``asked_tokens`` are those requests still lacked when first looked up, ``hit_tokens`` those of
    them ordered from the host, ``promoted_tokens`` those fetched from below it first;
    ``tier_hit_tokens`` has what was found instead of computed by the tier that had it, the device
    included: a block that came up counts there for its first request, then as the host's.
    ``verdicts`` count load-or-compute decisions, ``missed`` why requests got no more than they did.
    ``traffic`` sums copies that succeeded over ranks, by route and path. ``queued`` copies wait for
    the next plan. ``bandwidth`` (bytes per second of loads) and ``prefill_rate`` (tokens per
    second) are what load-or-compute goes by; None while unknown. Below the host, ``lost_blocks``
    failed alone in transfers that otherwise succeeded; ``ailments`` has a word for every tier,
    empty while it can be used; ``asked`` says of tiers that know keys themselves how many keys
    they were asked for and how many of them were there, ``refused`` how many they did not take;
    ``restored`` says of tiers with places how many blocks of an earlier life they began with.
    ``unheeded_hints`` are requests with hints that could not be followed.
    """

    pool: PoolCounts
    tiers: Mapping[str, PoolCounts]
    queries: int
    asked_tokens: int
    hit_tokens: int
    promoted_tokens: int
    expired_hits: int
    shed_stores: int
    verdicts: Mapping[str, int]
    missed: Mapping[str, int]
    in_flight: int
    landed: int
    failed: int
    overdue: int
    stale_receipts: int
    traffic: Mapping[TrafficKey, Traffic] = field(default_factory=dict)
    queued: int = 0
    bytes_in_flight: int = 0
    leases: Mapping[str, int] = field(default_factory=dict)
    resets: int = 0
    bandwidth: float | None = None
    prefill_rate: float | None = None
    lost_blocks: int = 0
    ailments: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    tenants: Mapping[str, TenantCounts] = field(default_factory=dict)
    restored: Mapping[str, int] = field(default_factory=dict)
    unheeded_hints: int = 0
    tier_hit_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def pools(self) -> dict[str, PoolCounts]:
        """The counts of the host and of every tier with places."""
        return {HOST: self.pool, **self.tiers}

    @property
    def bytes_moved(self) -> dict[tuple[str, str], int]:
        """Bytes of copies that succeeded, by route."""
        return {
            route: sum(t.num_bytes for key, t in self.traffic.items() if key[:2] == route)
            for route in {(src, dst) for src, dst, _ in self.traffic}
        }
