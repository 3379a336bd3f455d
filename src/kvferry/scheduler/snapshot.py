"""Everything the scheduler half has counted, from the parts that count it."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from kvferry.observed.curve import Points
from kvferry.pool import Pool
from kvferry.scheduler.flight import Flights
from kvferry.scheduler.hit import Hits
from kvferry.scheduler.journal import Entry, Journal
from kvferry.scheduler.level import KeyedLevel, PlacedLevel
from kvferry.scheduler.levels import LowerLevels
from kvferry.scheduler.outbox import Outbox
from kvferry.scheduler.storing import Stores
from kvferry.scheduler.transit import Transit
from kvferry.stats import MatchCounts, SchedulerStats
from kvferry.tenants import Tenants
from kvferry.types import HOST, RequestId


def snapshot(
    pool: Pool,
    lower: LowerLevels,
    flights: Flights,
    outbox: Outbox,
    transit: Transit,
    storing: Stores,
    hits: Hits,
    matches: MatchCounts,
    *,
    resets: int,
    tenants: Tenants | None = None,
    memory_curve: Points,
) -> SchedulerStats:
    """As of now; nothing in it changes afterwards."""
    moved = flights.counts
    below = {level.name: level.pool for level in lower.levels if level.pool is not None}
    return SchedulerStats(
        pool=pool.counts,
        levels=MappingProxyType({name: each.counts for name, each in below.items()}),
        queries=matches.queries,
        asked_tokens=matches.asked_tokens,
        hit_tokens=matches.hit_tokens,
        promoted_tokens=matches.promoted_tokens,
        expired_hits=matches.expired_hits,
        early_loads=matches.early_loads,
        shed_stores=storing.num_shed,
        verdicts=MappingProxyType(dict(matches.verdicts)),
        missed=MappingProxyType(dict(matches.missed)),
        overlaps=MappingProxyType(dict(matches.overlaps)),
        in_flight=len(flights),
        landed=moved.landed,
        failed=moved.failed,
        overdue=moved.overdue,
        stale_receipts=moved.stale_receipts,
        bytes_moved=MappingProxyType(dict(moved.bytes_moved)),
        seconds_moved=MappingProxyType(dict(moved.seconds_moved)),
        traffic=moved.traffic.snapshot(),
        queued=len(outbox),
        bytes_in_flight=transit.num_bytes,
        leases=MappingProxyType(
            {HOST: pool.num_leases, **{name: each.num_leases for name, each in below.items()}}
        ),
        resets=resets,
        tenants=MappingProxyType(tenants.snapshot() if tenants is not None else {}),
        memory_curve=memory_curve,
        lost_blocks=moved.lost_blocks,
        ailments=MappingProxyType({level.name: level.ailment for level in lower.levels}),
        asked=MappingProxyType(
            {
                level.name: (level.num_asked, level.num_found)
                for level in lower.levels
                if isinstance(level, KeyedLevel)
            }
        ),
        restored=MappingProxyType(
            {
                level.name: level.num_restored
                for level in lower.levels
                if isinstance(level, PlacedLevel)
            }
        ),
        bandwidth=hits.worth.bandwidth,
        prefill_rate=hits.worth.prefill_rate,
        level_bandwidth=MappingProxyType(
            {level.name: hits.worth.bandwidth_of(level.name) for level in lower.levels}
        ),
    )


class Onlooker:
    """What any thread may see of a scheduler: the counts and the journal. Owns neither; only reads.

    So a miss that was answered at once, and that nobody has counted yet, is not in it.
    """

    def __init__(self, count: Callable[[], SchedulerStats], journal: Journal) -> None:
        self._count = count
        self._journal = journal

    def stats(self) -> SchedulerStats:
        return self._count()

    def journal(self, request_id: RequestId) -> Entry | None:
        return self._journal.entry(request_id)

    def recent(self) -> tuple[RequestId, ...]:
        return self._journal.request_ids()
