"""The view of a running kvferry: rates between readings, and a short history."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from kvferry.errors import UnreachableError
from kvferry.telemetry import catalog as names
from kvferry.telemetry.catalog import Metric
from kvferry.tools.top.answers import Recent, read_as
from kvferry.tools.top.scrape import Reading, UnexplainedError, explain, read

HISTORY = 60
"""Readings kept for sparklines."""

MOST_TIERS = MOST_ROUTES = 16
"""More than a kvferry has. A hostile endpoint may report more."""

_MOST_RECENT = 20
_MOST_TENANTS = 8

TROUBLES = {
    "failed": names.FAILED,
    "overdue": names.OVERDUE,
    "expired hits": names.EXPIRED_HITS,
    "stale receipts": names.STALE_RECEIPTS,
    "shed stores": names.DEFERRED_STORES,
    "lost blocks": names.LOST_BLOCKS,
}


@dataclass(frozen=True)
class DrivesView:
    """The drives of one tier. ``failed`` counts blocks by reason."""

    read_bytes: int
    written_bytes: int
    read_rate: float
    write_rate: float
    failed: dict[str, int]
    pending: int
    durable_lag: float
    num_away: int
    restarts: int


@dataclass(frozen=True)
class TierView:
    """One tier: its slots by state, and their bytes if the size of a slot is known.

    A tier that finds blocks by their keys has no slots, but blocks ``asked`` for and ``found``. A
    tier that ``is_away`` cannot be used now. ``restored`` blocks are of an earlier process.
    ``held`` slots are pinned.
    """

    name: str
    free: int
    cached: int
    leased: int
    unready: int
    evicted: int
    slot_bytes: int | None
    asked: int | None = None
    found: int | None = None
    is_away: bool = False
    why_away: str = ""
    restored: int | None = None
    drives: DrivesView | None = None
    curve: dict[str, float] = field(default_factory=dict)
    """Hit rate of this tier and the tiers above by multiples of its memory."""
    held: int = 0

    @property
    def total(self) -> int:
        return self.free + self.cached + self.leased + self.unready

    @property
    def used(self) -> int:
        return self.cached + self.leased


@dataclass(frozen=True)
class TenantView:
    """One tenant: its slots by tier, its evicted blocks, its requests and their hit rate."""

    name: str
    slots: dict[str, int]
    evicted: int
    queries: int
    hit_rate: float | None


@dataclass(frozen=True)
class RouteView:
    """Traffic between two tiers, and its bytes by copy path."""

    src: str
    dst: str
    total_bytes: int
    bytes_per_second: float
    copy_speed: float | None
    paths: dict[str, float]
    history: list[float]


@dataclass(frozen=True)
class View:
    """The content of one screen. Rates are over the time since the previous reading."""

    url: str
    at: float
    seconds: float
    version: str
    idle: str
    queries: int
    queries_per_second: float
    hit_rate: float | None
    hit_rate_now: float | None
    hit_history: list[float | None]
    full_hits: int
    misses: dict[str, int]
    decisions: dict[str, int]
    tiers: list[TierView]
    routes: list[RouteView]
    in_flight: int
    queued: int
    bytes_in_flight: int
    leases: int
    troubles: dict[str, int]
    pinned_bytes: int | None
    load_rate: float | None
    prefill_rate: float | None
    recent: list[dict[str, Any]]
    tenants: list[TenantView] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


class Watch:
    """Reads one endpoint repeatedly. Owns the history for rates and sparklines."""

    def __init__(
        self,
        url: str,
        *,
        look: Callable[[str], Reading] = read,
        explain: Callable[[str], dict[str, Any]] = explain,
    ) -> None:
        self.url = url
        self._look = look
        self._explain: Callable[[str], dict[str, Any]] | None = explain
        self._readings: deque[Reading] = deque(maxlen=HISTORY + 1)

    def look(self) -> View:
        """Read the endpoint once more. Raises UnreachableError if it does not answer."""
        reading = self._look(self.url)
        if self._readings and _restarted(self._readings[-1], reading):
            self._readings.clear()
        self._readings.append(reading)
        return self._view(reading, *self._explained())

    def _explained(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The latest requests, and why tiers are away. vLLM's own endpoint is asked once only."""
        recent = Recent()
        try:
            if self._explain is not None:
                recent = read_as(Recent, self._explain(self.url))
        except UnexplainedError:
            self._explain = None
        except (UnreachableError, ValueError):
            pass  # the figures are good without them
        return [asdict(row) for row in recent.requests[:_MOST_RECENT]], dict(recent.tiers_away)

    def _view(self, now: Reading, recent: list[dict[str, Any]], away: dict[str, str]) -> View:
        before = self._readings[-2] if len(self._readings) > 1 else now
        idle = now.by_label(names.IDLE)
        asked = _grown(names.LOOKUP_TOKENS, before, now)
        hit = _grown(names.HIT_TOKENS, before, now)
        routes = sorted({(src, dst) for src, dst, _ in now.by_label(names.MOVED_BYTES)})
        return View(
            url=self.url,
            at=now.at,
            seconds=now.at - before.at,
            version=now.version,
            idle=next((why for (why,), value in idle.items() if value > 0), ""),
            queries=_count(now, names.LOOKUPS),
            queries_per_second=_per_second(_grown(names.LOOKUPS, before, now), before, now),
            hit_rate=_share(now.one(names.HIT_TOKENS), now.one(names.LOOKUP_TOKENS)),
            hit_rate_now=_share(hit, asked),
            hit_history=[
                _share(_grown(names.HIT_TOKENS, a, b), _grown(names.LOOKUP_TOKENS, a, b))
                for a, b in pairwise(self._readings)
            ],
            full_hits=_count(now, names.FULL_HITS),
            misses=_counts(now, names.MISSED),
            decisions=_counts(now, names.DECISIONS),
            tiers=_tiers(before, now, away),
            routes=[self._route(src, dst, before, now) for src, dst in routes[:MOST_ROUTES]],
            in_flight=_count(now, names.IN_FLIGHT),
            queued=_count(now, names.QUEUED),
            bytes_in_flight=_count(now, names.BYTES_IN_FLIGHT),
            leases=int(sum(now.by_label(names.LEASES).values())),
            troubles={word: _count(now, metric) for word, metric in TROUBLES.items()},
            pinned_bytes=_maybe(now.one(names.PINNED_BYTES)),
            load_rate=now.one(names.LOAD_RATE),
            prefill_rate=now.one(names.PREFILL_RATE),
            recent=recent,
            tenants=_tenants(now),
        )

    def _route(self, src: str, dst: str, before: Reading, now: Reading) -> RouteView:
        return RouteView(
            src=src,
            dst=dst,
            total_bytes=int(_moved(now, src, dst)),
            bytes_per_second=_speed(before, now, src, dst),
            copy_speed=_share(
                _moved(now, src, dst), _moved(now, src, dst, metric=names.MOVED_SECONDS)
            ),
            paths={
                path: value
                for (a, b, path), value in now.by_label(names.MOVED_BYTES).items()
                if (a, b) == (src, dst)
            },
            history=[_speed(a, b, src, dst) for a, b in pairwise(self._readings)],
        )


def _restarted(before: Reading, now: Reading) -> bool:
    return any(_value(now, m) < _value(before, m) for m in (names.LOOKUPS, names.COMPLETED))


def _value(reading: Reading, metric: Metric) -> float:
    return reading.one(metric) or 0.0


def _count(reading: Reading, metric: Metric) -> int:
    return int(_value(reading, metric))


def _maybe(value: float | None) -> int | None:
    return None if value is None else int(value)


def _counts(reading: Reading, metric: Metric) -> dict[str, int]:
    """Counts by the only label of a metric, the largest first, without zeros."""
    found = {labels[0]: int(value) for labels, value in reading.by_label(metric).items() if value}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _grown(metric: Metric, before: Reading, now: Reading) -> float:
    return max(0.0, _value(now, metric) - _value(before, metric))


def _per_second(amount: float, before: Reading, now: Reading) -> float:
    seconds = now.at - before.at
    return amount / seconds if seconds > 0 else 0.0


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _moved(reading: Reading, src: str, dst: str, *, metric: Metric = names.MOVED_BYTES) -> float:
    return sum(v for (a, b, _), v in reading.by_label(metric).items() if (a, b) == (src, dst))


def _speed(before: Reading, now: Reading, src: str, dst: str) -> float:
    return _per_second(max(0.0, _moved(now, src, dst) - _moved(before, src, dst)), before, now)


def _drives(tier: str, before: Reading, now: Reading) -> DrivesView | None:
    moved = now.by_label(names.DRIVE_BYTES)
    if (tier, "read") not in moved:
        return None
    was = before.by_label(names.DRIVE_BYTES)
    rates = {
        way: _per_second(
            max(0.0, moved.get((tier, way), 0.0) - was.get((tier, way), 0.0)), before, now
        )
        for way in ("read", "write")
    }
    failed = now.by_label(names.DRIVE_FAILED)

    def one(metric: Metric) -> float:
        return now.by_label(metric).get((tier,), 0.0)

    return DrivesView(
        read_bytes=int(moved[tier, "read"]),
        written_bytes=int(moved.get((tier, "write"), 0)),
        read_rate=rates["read"],
        write_rate=rates["write"],
        failed={
            why: int(failed[tier, why]) for why in names.DRIVE_ERRORS if failed.get((tier, why))
        },
        pending=int(one(names.PENDING_BLOCKS)),
        durable_lag=one(names.DURABLE_LAG),
        num_away=int(one(names.DRIVES_UNAVAILABLE)),
        restarts=int(one(names.DRIVE_RESTARTS)),
    )


def _tenants(reading: Reading) -> list[TenantView]:
    """The tenants with slots or requests, the largest first."""
    queries = reading.by_label(names.TENANT_LOOKUPS)
    evicted: dict[str, int] = {}
    asked, hits = reading.by_label(names.TENANT_TOKENS), reading.by_label(names.TENANT_HITS)
    slots: dict[str, dict[str, int]] = {name: {} for (name,) in queries}
    for (name, tier), count in reading.by_label(names.TENANT_SLOTS).items():
        if count and len(slots.setdefault(name, {})) < MOST_TIERS:
            slots[name][tier] = int(count)
    for (name, _), count in reading.by_label(names.TENANT_EVICTED).items():
        evicted[name] = evicted.get(name, 0) + int(count)
    found = [
        TenantView(
            name,
            each,
            evicted.get(name, 0),
            int(queries.get((name,), 0)),
            _share(hits.get((name,), 0.0), asked.get((name,), 0.0)),
        )
        for name, each in slots.items()
        if each or queries.get((name,))
    ]
    return sorted(found, key=lambda tenant: -sum(tenant.slots.values()))[:_MOST_TENANTS]


def _tiers(before: Reading, reading: Reading, why_away: dict[str, str]) -> list[TierView]:
    slots = reading.by_label(names.SLOTS)
    evicted, sizes = reading.by_label(names.EVICTED), reading.by_label(names.SLOT_BYTES)
    asked, found = reading.by_label(names.LOOKUP_BLOCKS), reading.by_label(names.FOUND_BLOCKS)
    held = reading.by_label(names.PINNED_SLOTS)
    away, restored = (
        reading.by_label(names.TIER_UNAVAILABLE),
        reading.by_label(names.RESTORED_BLOCKS),
    )
    curve = reading.by_label(names.MEMORY_CURVE)
    every = dict.fromkeys([rank_tier for rank_tier, _ in slots] + [tier for (tier,) in away])
    rank_tiers = list(every)[:MOST_TIERS]
    return [
        TierView(
            name=rank_tier,
            **{state: int(slots.get((rank_tier, state), 0)) for state in names.STATES},
            evicted=int(evicted.get((rank_tier,), 0)),
            slot_bytes=_maybe(sizes.get((rank_tier,))),
            asked=_maybe(asked.get((rank_tier,))),
            found=_maybe(found.get((rank_tier,))),
            is_away=bool(away.get((rank_tier,), 0)),
            why_away=why_away.get(rank_tier, ""),
            restored=_maybe(restored.get((rank_tier,))),
            drives=_drives(rank_tier, before, reading),
            curve={
                times: min(1.0, max(0.0, curve[rank_tier, times]))
                for times in names.MEMORIES
                if (rank_tier, times) in curve
            },
            held=int(held.get((rank_tier,), 0)),
        )
        for rank_tier in rank_tiers
    ]
