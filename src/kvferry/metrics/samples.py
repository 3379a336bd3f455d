"""From one snapshot to the values of every metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvferry.metrics import catalog as names
from kvferry.metrics.catalog import Metric
from kvferry.scheduler.why import Reason
from kvferry.slot_states import PoolCounts
from kvferry.stats import Distribution, SchedulerStats
from kvferry.types import HOST

if TYPE_CHECKING:
    from kvferry.tiers.disk.status import DiskFigures


@dataclass(frozen=True)
class Snapshot:
    """All that one process can say of itself: what the scheduler counted, and its memory.

    None is what this process does not know: in a server the workers pin memory, not the scheduler.
    ``idle`` is one of the catalog's reasons, empty while it serves. ``disks`` has what drives did,
    by level, of all ranks together.
    """

    stats: SchedulerStats
    version: str
    slot_bytes: Mapping[str, int] = field(default_factory=dict)
    pinned_bytes: int | None = None
    held_blocks: int | None = None
    idle: str | None = None
    disks: Mapping[str, DiskFigures] = field(default_factory=dict)


class Sample(NamedTuple):
    """One value of one metric; ``labels`` are in the order the metric has them."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Distribution


def samples(snapshot: Snapshot) -> Iterator[Sample]:
    """Every metric's values. Known labels are there from the start, at zero."""
    stats = snapshot.stats
    yield Sample(names.INFO, (snapshot.version,), 1)
    for metric, value in _plain(snapshot):
        if value is not None:
            yield Sample(metric, (), value)
    if snapshot.idle is not None:
        yield from idle(snapshot.idle)
    for reason in names.MISSES:
        yield Sample(names.MISSED, (reason,), stats.missed.get(reason, 0))
    for verdict in names.VERDICTS:
        yield Sample(names.DECISIONS, (verdict,), stats.verdicts.get(verdict, 0))
    for overlap in names.OVERLAPS:
        yield Sample(names.OVERLAPPED, (overlap,), stats.overlaps.get(overlap, 0))
    for key, traffic in stats.traffic.items():
        yield Sample(names.MOVED_BYTES, key, traffic.sizes.total)
        yield Sample(names.MOVED_SECONDS, key, traffic.seconds.total)
        yield Sample(names.TRANSFER_BYTES, key, traffic.sizes)
        yield Sample(names.TRANSFER_SECONDS, key, traffic.seconds)
    for tier, counts in ((HOST, stats.pool), *stats.levels.items()):
        yield from _tier(tier, counts)
    for tier, points in stats.memory_curve.items():
        for times, ratio in points.items():
            yield Sample(names.MEMORY_CURVE, (tier, f"{times:g}"), ratio)
    for tier, num_leases in stats.leases.items():
        yield Sample(names.LEASES, (tier,), num_leases)
    for level, ailment in stats.ailments.items():
        yield Sample(names.LEVEL_AWAY, (level,), int(bool(ailment)))
    for level, (num_asked, num_found) in stats.asked.items():
        yield Sample(names.ASKED_BLOCKS, (level,), num_asked)
        yield Sample(names.FOUND_BLOCKS, (level,), num_found)
    for level, num_restored in stats.restored.items():
        yield Sample(names.RESTORED_BLOCKS, (level,), num_restored)
    for level, rate in stats.level_bandwidth.items():
        if rate is not None:
            yield Sample(names.LEVEL_RATE, (level,), rate)
    for level, disk in snapshot.disks.items():
        yield from _disk(level, disk)
    for name, tenant in stats.tenants.items():
        yield Sample(names.TENANT_QUERIES, (name,), tenant.queries)
        yield Sample(names.TENANT_ASKED, (name,), tenant.asked_tokens)
        yield Sample(names.TENANT_HITS, (name,), tenant.hit_tokens)
        for tier, count in tenant.slots.items():
            yield Sample(names.TENANT_SLOTS, (name, tier), count)
        for tier, count in tenant.evicted.items():
            yield Sample(names.TENANT_EVICTED, (name, tier), count)
    for tier, num_bytes in snapshot.slot_bytes.items():
        yield Sample(names.SLOT_BYTES, (tier,), num_bytes)


def _disk(level: str, disk: DiskFigures) -> Iterator[Sample]:
    yield Sample(names.DRIVE_BYTES, (level, "read"), disk.read_bytes)
    yield Sample(names.DRIVE_BYTES, (level, "write"), disk.written_bytes)
    yield Sample(names.DRIVE_SECONDS, (level, "read"), disk.read_seconds)
    yield Sample(names.DRIVE_SECONDS, (level, "write"), disk.write_seconds)
    for reason in names.FAILED_WHY:
        yield Sample(names.DRIVE_FAILED, (level, reason), disk.failed.get(reason, 0))
    yield Sample(names.DRIVE_RESTARTS, (level,), disk.restarts)
    yield Sample(names.DRIVES_AWAY, (level,), disk.drives_away)
    yield Sample(names.PENDING_BLOCKS, (level,), disk.pending)
    yield Sample(names.DURABLE_LAG, (level,), disk.durable_lag)


def idle(why: str) -> Iterator[Sample]:
    """Whether nothing is served, and why."""
    for reason in names.IDLE_REASONS:
        yield Sample(names.IDLE, (reason,), float(reason == why))


def _plain(snapshot: Snapshot) -> tuple[tuple[Metric, float | None], ...]:
    """Those without labels; None where it is not known."""
    stats = snapshot.stats
    return (
        (names.QUERIES, stats.queries),
        (names.ASKED_TOKENS, stats.asked_tokens),
        (names.HIT_TOKENS, stats.hit_tokens),
        (names.PROMOTED_TOKENS, stats.promoted_tokens),
        (names.FULL_HITS, stats.missed.get(Reason.NOTHING_MISSED.value, 0)),
        (names.LANDED, stats.landed),
        (names.FAILED, stats.failed),
        (names.OVERDUE, stats.overdue),
        (names.EXPIRED_HITS, stats.expired_hits),
        (names.EARLY_LOADS, stats.early_loads),
        (names.STALE_RECEIPTS, stats.stale_receipts),
        (names.SHED_STORES, stats.shed_stores),
        (names.LOST_BLOCKS, stats.lost_blocks),
        (names.RESETS, stats.resets),
        (names.PINNED_BYTES, snapshot.pinned_bytes),
        (names.HELD_BLOCKS, snapshot.held_blocks),
        (names.IN_FLIGHT, stats.in_flight),
        (names.QUEUED, stats.queued),
        (names.BYTES_IN_FLIGHT, stats.bytes_in_flight),
        (names.LOAD_RATE, stats.bandwidth),
        (names.PREFILL_RATE, stats.prefill_rate),
    )


def _tier(tier: str, counts: PoolCounts) -> Iterator[Sample]:
    yield Sample(names.EVICTED, (tier,), counts.evicted)
    yield Sample(names.HELD_SLOTS, (tier,), counts.held)
    yield Sample(names.REFUSED_HOLDS, (tier,), counts.refused_holds)
    for state in names.STATES:
        yield Sample(names.SLOTS, (tier, state), getattr(counts, state))
