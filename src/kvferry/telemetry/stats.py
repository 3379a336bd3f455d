"""The scheduler's counts: counters that only the scheduler changes, and immutable snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.cache.slots import PoolCounts
from kvferry.cache.tenants import TenantCounts
from kvferry.types import HOST

TrafficKey = tuple[str, str, str]
"""Source tier, destination tier, copy path."""


class Traffic(NamedTuple):
    """Copies that succeeded between two tiers by one copy path. Each rank's copy counts."""

    num_copies: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass
class MatchCounts:
    """The scheduler's running counts of lookups and hits."""

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
    """A snapshot of the scheduler's counts.

    - ``asked_tokens`` were not on the device at a request's first lookup. ``hit_tokens`` of them
      were loaded from the host, ``promoted_tokens`` were promoted to the host first.
    - ``tier_hit_tokens``: tokens found, by tier, device included. A promoted block counts for its
      lower tier at its first request, then for the host.
    - ``verdicts``: load-or-compute decisions. ``bandwidth`` (loaded bytes per second) and
      ``prefill_rate`` (tokens per second) are their measurements, None while unknown.
    - ``missed``: requests by miss reason. ``traffic``: copies that succeeded, by route and path.
    - ``queued`` copies wait for the next plan. ``landed`` transfers are complete on all ranks.
    - ``lost_blocks`` failed in transfers with lower tiers that succeeded for other blocks.
    - ``ailments``: why each lower tier is unavailable, empty while it is available. ``asked``: keys
      looked up and found in each tier without slots. ``refused``: blocks such a tier did not take.
    - ``restored``: blocks that each lower tier with slots found at its start.
    - ``unheeded_hints``: requests with hints that could not be followed.
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
        """Slot counts of the host and of every lower tier with slots."""
        return {HOST: self.pool, **self.tiers}

    @property
    def bytes_moved(self) -> dict[tuple[str, str], int]:
        """Bytes of copies that succeeded, by source and destination tier."""
        return {
            route: sum(t.num_bytes for key, t in self.traffic.items() if key[:2] == route)
            for route in {(src, dst) for src, dst, _ in self.traffic}
        }
