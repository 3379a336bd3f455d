"""Everything the scheduler half has counted, from the parts that count it."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from kvferry.scheduler.journal import Entry, Journal
from kvferry.scheduler.level import KeyedLevel, PlacedLevel
from kvferry.scheduler.parts import Parts
from kvferry.stats import SchedulerStats
from kvferry.types import HOST, RequestId


def snapshot(parts: Parts, *, resets: int) -> SchedulerStats:
    """As of now; nothing in it changes afterwards."""
    pool, levels, worth, tenants = parts.pool, parts.lower.levels, parts.hits.worth, parts.tenants
    matches, moved = parts.accounts.counts, parts.flights.counts
    below = {level.name: level.pool for level in levels if level.pool is not None}
    keyed = [level for level in levels if isinstance(level, KeyedLevel)]
    placed = [level for level in levels if isinstance(level, PlacedLevel)]
    return SchedulerStats(
        pool=pool.counts,
        levels=MappingProxyType({name: each.counts for name, each in below.items()}),
        queries=matches.queries,
        asked_tokens=matches.asked_tokens,
        hit_tokens=matches.hit_tokens,
        promoted_tokens=matches.promoted_tokens,
        expired_hits=matches.expired_hits,
        early_loads=matches.early_loads,
        shed_stores=parts.stores.num_shed,
        verdicts=MappingProxyType(dict(matches.verdicts)),
        missed=MappingProxyType(dict(matches.missed)),
        overlaps=MappingProxyType(dict(matches.overlaps)),
        in_flight=len(parts.flights),
        landed=moved.landed,
        failed=moved.failed,
        overdue=moved.overdue,
        stale_receipts=moved.stale_receipts,
        bytes_moved=MappingProxyType(dict(moved.bytes_moved)),
        seconds_moved=MappingProxyType(dict(moved.seconds_moved)),
        traffic=moved.traffic.snapshot(),
        queued=len(parts.outbox),
        bytes_in_flight=parts.transit.num_bytes,
        leases=MappingProxyType(
            {HOST: pool.num_leases, **{name: each.num_leases for name, each in below.items()}}
        ),
        resets=resets,
        tenants=MappingProxyType(tenants.snapshot() if tenants is not None else {}),
        memory_curve=parts.accounts.memory_curve,
        lost_blocks=moved.lost_blocks,
        ailments=MappingProxyType({level.name: level.ailment for level in levels}),
        asked=MappingProxyType({level.name: (level.num_asked, level.num_found) for level in keyed}),
        restored=MappingProxyType({level.name: level.num_restored for level in placed}),
        bandwidth=worth.bandwidth,
        prefill_rate=worth.prefill_rate,
        level_bandwidth=MappingProxyType(
            {level.name: worth.bandwidth_of(level.name) for level in levels}
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
