"""What was counted: running counters for one owner, immutable snapshots for everyone else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.pool import PoolCounts


@dataclass
class MatchCounts:
    """What the scheduler counts about hits while it runs."""

    queries: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    promoted_tokens: int = 0
    expired_hits: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of the scheduler half.

    ``asked_tokens`` are those requests still lacked when first looked up, ``hit_tokens`` those of
    them ordered from the host, ``promoted_tokens`` those fetched from below it first. ``verdicts``
    count load-or-compute decisions, ``missed`` why requests got no more than they did.
    ``bytes_moved`` and ``seconds_moved`` are sums over ranks, by route.
    """

    pool: PoolCounts
    levels: Mapping[str, PoolCounts]
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
    bytes_moved: Mapping[tuple[str, str], int]
    seconds_moved: Mapping[tuple[str, str], float]
