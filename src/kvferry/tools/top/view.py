"""The view of a running kvferry: its figures, and rates between two readings.

``FormattedView`` is the view as text: cards, notes and tables, for the terminal and the live page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvferry.errors import UnreachableError
from kvferry.telemetry import catalog as names
from kvferry.telemetry.catalog import Metric
from kvferry.tools.top.scrape import NoExplanationsError, Reading, explain, read, read_recent
from kvferry.tools.words import clip, counted, show_bytes, show_share
from kvferry.types import DEVICE

MOST_TIERS = MOST_ROUTES = 16
"""Most tiers and routes shown. kvferry has fewer, but a hostile endpoint may report more."""

_MOST_RECENT = 20
_MOST_WHY = 300
_MOST_TENANTS = 8

_IDLE = {
    "refused": "kvferry cannot serve this model or these settings; vLLM's log has the reason",
    "failed": "an internal error; vLLM continues without kvferry, and its log has the error",
}
_STATES = ("cached", "leased", "unready")

_name = partial(clip, most=40)

PROBLEMS = {
    "failed copies": names.FAILED,
    "overdue copies": names.OVERDUE,
    "expired hits": names.EXPIRED_HITS,
    "late answers": names.STALE_RECEIPTS,
    "lost blocks": names.LOST_BLOCKS,
}


@dataclass(frozen=True)
class TierView:
    """One tier: its slots by state, and their bytes if the size of a slot is known.

    A tier that finds blocks by key has no slots: it has the blocks looked up (``asked``) and
    ``found``. ``is_away``: the tier is unavailable. ``restored`` blocks were found at start.
    ``held`` slots are pinned. ``pending`` blocks are not durable yet. ``failed`` is by reason.
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
    held: int = 0
    pending: int = 0
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.free + self.cached + self.leased + self.unready

    @property
    def used(self) -> int:
        return self.cached + self.leased


@dataclass(frozen=True)
class TenantView:
    """One tenant. ``loaded_share`` is the loaded share of the tokens not found on the device."""

    name: str
    slots: dict[str, int]
    evicted: int
    queries: int
    loaded_share: float | None


@dataclass(frozen=True)
class RouteView:
    """Traffic between two tiers, and its bytes by copy path."""

    src: str
    dst: str
    total_bytes: int
    bytes_per_second: float
    copy_speed: float | None
    paths: dict[str, float]


@dataclass(frozen=True)
class View:
    """The content of one screen. Rates are over the time since the previous reading.

    A hit rate is the share of prompt tokens that were found on any tier, the device included.
    ``tokens`` has the prompt tokens by the tier where they were found, and the ``computed`` ones.
    """

    url: str
    at: float
    version: str
    idle: str
    queries: int
    queries_per_second: float
    hit_rate: float | None
    hit_rate_now: float | None
    tokens: dict[str, int]
    full_hits: int
    misses: dict[str, int]
    decisions: dict[str, int]
    tiers: list[TierView]
    routes: list[RouteView]
    in_flight: int
    queued: int
    bytes_in_flight: int
    leases: int
    deferred_stores: int
    problems: dict[str, int]
    pinned_bytes: int | None
    load_rate: float | None
    prefill_rate: float | None
    recent: list[list[str]]
    tenants: list[TenantView] = field(default_factory=list)


class Watch:
    """Reads one endpoint repeatedly. Owns the previous reading, for rates."""

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
        self._before: Reading | None = None

    def look(self) -> View:
        """Read the endpoint once more. Raises UnreachableError if it does not answer."""
        now = self._look(self.url)
        before = self._before or now
        if any(now.total(m) < before.total(m) for m in (names.LOOKUPS, names.COMPLETED)):
            before = now  # the engine has restarted
        self._before = now
        return self._view(_Span(before, now), *self._explained())

    def _explained(self) -> tuple[list[list[str]], dict[str, Any]]:
        """Return the latest requests, and why tiers are unavailable. Asks vLLM's endpoint once."""
        try:
            if self._explain is not None:
                answer = self._explain(self.url)
                away = answer.get("tiers_away")
                return read_recent(answer)[:_MOST_RECENT], away if isinstance(away, dict) else {}
        except NoExplanationsError:
            self._explain = None
        except (UnreachableError, ValueError):
            pass  # the metrics are shown without them
        return [], {}

    def _view(self, span: _Span, recent: list[list[str]], away: dict[str, Any]) -> View:
        now = span.now
        routes = sorted({(src, dst) for src, dst, _ in now.by_label(names.MOVED_BYTES)})
        return View(
            url=self.url,
            at=now.at,
            version=now.version,
            idle=_idle(now),
            queries=int(now.total(names.LOOKUPS)),
            queries_per_second=span.rate(names.LOOKUPS),
            hit_rate=_hit_rate(now.total),
            hit_rate_now=_hit_rate(span.grown),
            tokens=_tokens(now),
            full_hits=int(now.total(names.FULL_HITS)),
            misses=_counts(now, names.MISSED),
            decisions=_counts(now, names.DECISIONS),
            tiers=[_tier(name, now, str(away.get(name, ""))) for name in _tier_names(now)],
            routes=[_route(route, span) for route in routes[:MOST_ROUTES]],
            in_flight=int(now.total(names.IN_FLIGHT)),
            queued=int(now.total(names.QUEUED)),
            bytes_in_flight=int(now.total(names.BYTES_IN_FLIGHT)),
            leases=int(now.total(names.LEASES)),
            deferred_stores=int(now.total(names.DEFERRED_STORES)),
            problems={word: int(now.total(metric)) for word, metric in PROBLEMS.items()},
            pinned_bytes=_maybe(now.get(names.PINNED_BYTES)),
            load_rate=now.get(names.LOAD_RATE),
            prefill_rate=now.get(names.PREFILL_RATE),
            recent=recent,
            tenants=_tenants(now),
        )


@dataclass(frozen=True)
class _Span:
    before: Reading
    now: Reading

    @property
    def seconds(self) -> float:
        return self.now.at - self.before.at

    def grown(self, metric: Metric, *labels: str) -> float:
        return max(0.0, self.now.total(metric, *labels) - self.before.total(metric, *labels))

    def rate(self, metric: Metric, *labels: str) -> float:
        return self.grown(metric, *labels) / self.seconds if self.seconds > 0 else 0.0


def _idle(now: Reading) -> str:
    """Return why kvferry is idle, or an empty text if it is not."""
    found = now.by_label(names.IDLE).items()
    reasons = [_IDLE.get(reason, reason) for (reason,), is_on in found if is_on]
    told = [why for (why,) in now.by_label(names.IDLE_INFO)]
    return next(iter(told if reasons and told else reasons), "")


def _maybe(value: float | None) -> int | None:
    return None if value is None else int(value)


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _hit_rate(count: Callable[..., float]) -> float | None:
    """Return the share of prompt tokens found. ``count`` returns a metric's total or its growth."""
    on_device = count(names.TIER_HIT_TOKENS, DEVICE)
    prompts = on_device + count(names.LOOKUP_TOKENS)
    return _share(on_device + count(names.HIT_TOKENS), prompts)


def _tokens(now: Reading) -> dict[str, int]:
    """Return prompt tokens by the tier where they were found, and the rest as computed."""
    found = {tier: int(n) for (tier,), n in now.by_label(names.TIER_HIT_TOKENS).items()}
    if not found:
        return {}
    computed = now.total(names.LOOKUP_TOKENS) - now.total(names.HIT_TOKENS)
    tiers = list(found.items())[:MOST_TIERS]
    return {**dict(tiers), "computed": max(0, int(computed))}


def _counts(reading: Reading, metric: Metric) -> dict[str, int]:
    """Return a metric's counts by its only label, largest first, without zeros."""
    found = {labels[0]: int(value) for labels, value in reading.by_label(metric).items() if value}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _route(route: tuple[str, str], span: _Span) -> RouteView:
    moved = span.now.total(names.MOVED_BYTES, *route)
    every = span.now.by_label(names.MOVED_BYTES).items()
    return RouteView(
        *route,
        total_bytes=int(moved),
        bytes_per_second=span.rate(names.MOVED_BYTES, *route),
        copy_speed=_share(moved, span.now.total(names.MOVED_SECONDS, *route)),
        paths={path: value for (src, dst, path), value in every if (src, dst) == route},
    )


def _tenants(now: Reading) -> list[TenantView]:
    slots: dict[str, dict[str, int]] = {name: {} for (name,) in now.by_label(names.TENANT_LOOKUPS)}
    for (name, tier), count in now.by_label(names.TENANT_SLOTS).items():
        if count and len(slots.setdefault(name, {})) < MOST_TIERS:
            slots[name][tier] = int(count)
    found = [
        TenantView(
            name,
            each,
            int(now.total(names.TENANT_EVICTED, name)),
            int(now.total(names.TENANT_LOOKUPS, name)),
            _share(now.total(names.TENANT_HITS, name), now.total(names.TENANT_TOKENS, name)),
        )
        for name, each in slots.items()
        if each or now.total(names.TENANT_LOOKUPS, name)
    ]
    return sorted(found, key=lambda tenant: -sum(tenant.slots.values()))[:_MOST_TENANTS]


def _tier_names(now: Reading) -> list[str]:
    with_slots = [name for name, _ in now.by_label(names.SLOTS)]
    others = [name for (name,) in now.by_label(names.TIER_UNAVAILABLE)]
    return list(dict.fromkeys(with_slots + others))[:MOST_TIERS]


def _tier(name: str, now: Reading, why_away: str) -> TierView:
    failed = {why: int(now.total(names.DRIVE_FAILED, name, why)) for why in names.DRIVE_ERRORS}
    return TierView(
        name=name,
        **{state: int(now.total(names.SLOTS, name, state)) for state in names.STATES},
        evicted=int(now.total(names.EVICTED, name)),
        slot_bytes=_maybe(now.get(names.SLOT_BYTES, name)),
        asked=_maybe(now.get(names.LOOKUP_BLOCKS, name)),
        found=_maybe(now.get(names.FOUND_BLOCKS, name)),
        is_away=now.total(names.TIER_UNAVAILABLE, name) > 0,
        why_away=why_away,
        restored=_maybe(now.get(names.RESTORED_BLOCKS, name)),
        pending=int(now.total(names.PENDING_BLOCKS, name)),
        failed={why: count for why, count in failed.items() if count},
        held=int(now.total(names.PINNED_SLOTS, name)),
    )


@dataclass(frozen=True)
class Bar:
    """A bar of shares, each with a slot state. The rest of the bar is free."""

    parts: list[tuple[str, float]]


@dataclass(frozen=True)
class Table:
    """A table with column heads. The first head is the table's name."""

    heads: tuple[str, ...]
    rows: list[tuple[str | Bar, ...]]


@dataclass(frozen=True)
class FormattedView:
    """The view as text: cards (figure, subject), notes (text, is it a problem) and tables."""

    title: str
    cards: list[tuple[str, str]]
    notes: list[tuple[str, bool]]
    tables: list[Table]
    recent: Table

    @classmethod
    def of(cls, view: View) -> FormattedView:
        """Format a view as text."""
        requests = Table(("Request", "Tokens", "Found", "Miss reason"), [*map(tuple, view.recent)])
        tables = [table for table in _tables(view) if table.rows]
        return cls(
            f"{_name(view.version)}  {clip(view.url, _MOST_WHY)}",
            list(_cards(view)),
            list(_notes(view)),
            tables,
            requests,
        )


def _cards(view: View) -> Iterator[tuple[str, str]]:
    if not view.queries:
        return
    now = "" if view.hit_rate_now is None else f", {show_share(view.hit_rate_now)} now"
    yield show_share(view.hit_rate), f"hit rate{now}"
    rate, full = f"{view.queries_per_second:.1f}/s", counted(view.full_hits, "full hit")
    yield f"{view.queries:,}", f"{'request' if view.queries == 1 else 'requests'}, {rate}, {full}"
    yield (
        f"{view.in_flight:,}",
        f"copies in flight ({show_bytes(view.bytes_in_flight)}), {view.queued:,} queued, "
        f"{counted(view.deferred_stores, 'store')} deferred, {counted(view.leases, 'lease')}",
    )
    if view.pinned_bytes:
        yield show_bytes(view.pinned_bytes), "locked host memory"
    problems = [f"{n:,} {word}" for word, n in view.problems.items() if n]
    words = f"problems: {', '.join(problems)}" if problems else "problems"
    yield f"{sum(view.problems.values()):,}", words


def _notes(view: View) -> Iterator[tuple[str, bool]]:
    """Yield lines about the engine, unavailable tiers, drives, pins, misses and decisions."""
    if view.idle:
        yield f"idle: {clip(view.idle, _MOST_WHY)}", True
    elif not view.queries:
        yield "loaded, no request yet", False
    for tier in view.tiers:
        name = _name(tier.name)
        if tier.is_away:
            why = f": {clip(tier.why_away, _MOST_WHY)}" if tier.why_away else ""
            yield f"Tier {name} is unavailable{why}", True
        if tier.failed:
            failed = [f"{counted(n, 'block')} failed ({why})" for why, n in tier.failed.items()]
            yield f"Drives of {name}: {', '.join(failed)}", True
        told = [(tier.held, "pinned"), (tier.restored, "found at start")]
        told.append((tier.pending, "not durable yet"))
        words = [f"{counted(count, 'block')} {what}" for count, what in told if count]
        if words:
            yield f"Tier {name}: {', '.join(words)}", False
    for title, counts in (("Miss reasons", view.misses), ("Decisions", view.decisions)):
        if counts:
            words = [f"{n:,} {_name(reason).replace('_', ' ')}" for reason, n in counts.items()]
            yield f"{title}: {', '.join(words)}", False
    rates = []
    if view.load_rate is not None:
        rates.append(f"loads {show_bytes(view.load_rate)}/s")
    if view.prefill_rate is not None:
        rates.append(f"prefill {view.prefill_rate:,.0f} tokens/s")
    if rates:
        yield f"Measured: {', '.join(rates)}", False


def _tables(view: View) -> Iterator[Table]:
    whole = sum(view.tokens.values()) or 1
    yield Table(
        ("Prompt tokens", "", "Share", "Tokens"),
        [
            (_name(tier), Bar([("cached", n / whole)]), show_share(n / whole), f"{n:,}")
            for tier, n in view.tokens.items()
        ],
    )
    heads = ("Tier", "", "Full", "Slots", "Bytes", "Evicted")
    yield Table(heads, [*map(_tier_row, view.tiers)])
    yield Table(
        ("Tenant", "Slots", "Evicted", "Requests", "Device misses loaded"),
        [
            (
                _name(tenant.name),
                ", ".join(f"{_name(tier)} {n:,}" for tier, n in tenant.slots.items()),
                f"{tenant.evicted:,}",
                f"{tenant.queries:,}",
                show_share(tenant.loaded_share),
            )
            for tenant in view.tenants
        ],
    )
    routes = [*map(_route_row, view.routes)]
    yield Table(("Route", "Now", "Copy speed", "Total", "Paths"), [*routes])


def _tier_row(tier: TierView) -> tuple[str | Bar, ...]:
    whole = tier.total or 1
    if tier.asked is not None:
        part, whole = tier.found or 0, tier.asked
        bar, slots = [("cached", part / (whole or 1))], f"{part:,} of {whole:,} found"
    else:
        part, slots = tier.used, f"{tier.used:,} of {tier.total:,}"
        bar = [(state, getattr(tier, state) / whole) for state in _STATES]
    size = "–" if tier.slot_bytes is None else show_bytes(tier.used * tier.slot_bytes)
    name = _name(tier.name) + (" (unavailable)" if tier.is_away else "")
    share = show_share(part / whole if whole else None)
    return name, Bar(bar), share, slots, size, f"{tier.evicted:,}"


def _route_row(route: RouteView) -> tuple[str, ...]:
    named = {_name(path): count for path, count in route.paths.items() if path}
    paths = [path if len(named) == 1 else f"{path} {show_bytes(n)}" for path, n in named.items()]
    return (
        f"{_name(route.src)} → {_name(route.dst)}",
        f"{show_bytes(route.bytes_per_second)}/s",
        "–" if route.copy_speed is None else f"{show_bytes(route.copy_speed)}/s",
        show_bytes(route.total_bytes),
        ", ".join(paths),
    )
