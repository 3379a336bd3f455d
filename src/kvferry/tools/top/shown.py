"""A view in words: cards, notes and tables, the same on a terminal and on the live page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from kvferry.tools.top.view import RouteView, TierView, View
from kvferry.tools.words import clip, counted, show_bytes, show_share

_MOST_WHY = 300
_STATES = ("cached", "leased", "unready")

_name = partial(clip, most=40)


@dataclass(frozen=True)
class Bar:
    """Shares of a whole, each of a kind. What they leave is free."""

    parts: list[tuple[str, float]]


@dataclass(frozen=True)
class Line:
    """The latest values of a figure."""

    values: list[float]


@dataclass(frozen=True)
class Table:
    """Rows under their heads. The first head is the table's name."""

    heads: tuple[str, ...]
    rows: list[tuple[str | Bar | Line, ...]]


@dataclass(frozen=True)
class Shown:
    """All that is shown: large figures with their subject, notes with their weight, tables."""

    title: str
    cards: list[tuple[str, str]]
    notes: list[tuple[str, bool]]
    tables: list[Table]
    recent: Table

    @classmethod
    def of(cls, view: View) -> Shown:
        """What a person should see of this view."""
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
    """Lines about the engine, unavailable tiers, drives, pins, misses and decisions."""
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
    yield Table(heads, [*map(_tier, view.tiers)])
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
    heads = ("Route", "Now", "", "Copy speed", "Total", "Paths")
    yield Table(heads, [*map(_route, view.routes)])


def _tier(tier: TierView) -> tuple[str | Bar, ...]:
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


def _route(route: RouteView) -> tuple[str | Line, ...]:
    named = {_name(path): count for path, count in route.paths.items() if path}
    paths = [path if len(named) == 1 else f"{path} {show_bytes(n)}" for path, n in named.items()]
    return (
        f"{_name(route.src)} → {_name(route.dst)}",
        f"{show_bytes(route.bytes_per_second)}/s",
        Line(route.history),
        "–" if route.copy_speed is None else f"{show_bytes(route.copy_speed)}/s",
        show_bytes(route.total_bytes),
        ", ".join(paths),
    )
