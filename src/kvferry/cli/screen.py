"""One view as a terminal shows it: tiers as bars, traffic as sparklines, reasons as counts."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvferry.watch.view import TierView, View
from kvferry.watch.words import clean, show_bytes, show_share, sparkline

_BAR_WIDTH = 30
_LINE_WIDTH = 24
_STATES = (("cached", "█", "blue"), ("leased", "▓", "yellow"), ("unready", "░", "magenta"))


def screen(view: View, *, error: str = "") -> RenderableType:
    """Everything, top to bottom. Without colours the shades still differ."""
    parts: list[RenderableType] = [_head(view)]
    if error:
        parts.append(Text(clean(error), style="bold red"))
    parts += [_tiers(view), _routes(view), _counts(view), _foot(view)]
    return Group(*parts)


def _head(view: View) -> Text:
    text = Text.assemble(
        ("kvferry ", "bold"), (clean(view.version), "dim"), "  ", (view.url, "dim"), "\n"
    )
    now = f" (now {show_share(view.hit_rate_now)})" if view.hit_rate_now is not None else ""
    text.append(f"hit rate {show_share(view.hit_rate)}{now}", style="bold")
    text.append(
        f"   {view.queries:,} requests, {view.queries_per_second:.1f}/s, "
        f"{view.full_hits:,} full hits\n"
        f"{view.in_flight} in flight, {view.queued} queued, {show_bytes(view.bytes_in_flight)}, "
        f"{view.leases} {'lease' if view.leases == 1 else 'leases'}"
    )
    if view.pinned_bytes is not None:
        text.append(f"   {show_bytes(view.pinned_bytes)} pinned")
    return text


def _tiers(view: View) -> Table:
    table = _table("Tier", "", "", "Slots", "Bytes", "Evicted")
    for tier in view.tiers:
        used = tier.cached + tier.leased
        size = "–" if tier.slot_bytes is None else show_bytes(used * tier.slot_bytes)
        share = show_share(used / tier.total if tier.total else None)
        slots = f"{used:,} of {tier.total:,}"
        table.add_row(escape(clean(tier.name)), _bar(tier), share, slots, size, f"{tier.evicted:,}")
    return table


def _bar(tier: TierView) -> Text:
    text = Text()
    for state, mark, style in _STATES:
        count = getattr(tier, state)
        width = round(_BAR_WIDTH * count / tier.total) if tier.total else 0
        text.append(mark * max(width, int(count > 0)), style=style)
    text.truncate(_BAR_WIDTH)
    text.append("·" * (_BAR_WIDTH - len(text)), style="dim")
    return text


def _routes(view: View) -> RenderableType:
    if not view.routes:
        return Text("Nothing has moved yet.", style="dim")
    table = _table("Route", "Now", "", "While copying", "In all", "Paths")
    for route in view.routes:
        speed = "–" if route.copy_speed is None else f"{show_bytes(route.copy_speed)}/s"
        paths = ", ".join(f"{path} {show_bytes(n)}" for path, n in route.paths.items() if path)
        table.add_row(
            escape(clean(f"{route.src} → {route.dst}")),
            f"{show_bytes(route.bytes_per_second)}/s",
            Text(sparkline(route.history, _LINE_WIDTH), style="cyan"),
            speed,
            show_bytes(route.total_bytes),
            escape(clean(paths)),
        )
    return table


def _counts(view: View) -> Table:
    grid = Table.grid(padding=(0, 4))
    grid.add_row(
        _ranking("Why requests got no more", view.misses),
        _ranking("Load or compute", view.decisions),
        _ranking("Troubles", {word: n for word, n in view.troubles.items() if n}),
    )
    return grid


def _ranking(title: str, counts: dict[str, int]) -> Table:
    table = _table(title, "")
    for name, count in counts.items():
        table.add_row(escape(clean(name).replace("_", " ")), f"{count:,}")
    if not counts:
        table.add_row(Text("none", style="dim"), "")
    return table


def _foot(view: View) -> Text:
    known = []
    if view.load_rate is not None:
        known.append(f"loads bring {show_bytes(view.load_rate)}/s")
    if view.prefill_rate is not None:
        known.append(f"prefill makes {view.prefill_rate:,.0f} tokens/s")
    return Text(f"Measured: {', '.join(known)}." if known else "", style="dim")


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim")
    table.add_column(first, min_width=len(first))
    for name in others:
        table.add_column(name, justify="left" if not name or name == "Paths" else "right")
    return table
