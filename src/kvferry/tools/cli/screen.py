"""One view as a terminal shows it: tiers as bars, traffic as sparklines, reasons as counts.

Side by side where there is room, below each other where there is not; a number is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvferry.tools.cli.output import TerminalRoom
from kvferry.tools.top.view import RouteView, TierView, View
from kvferry.tools.words import (
    clean,
    counted,
    memory_words,
    said,
    show_bytes,
    show_share,
    sparkline,
    why_idle,
)

_BAR_WIDTH = 30
_LINE_WIDTH = 24
_WIDE = 150
"""Columns from which bars and sparklines are drawn twice as wide."""

_LEAST_DRAWN = 6
"""A bar or a sparkline of fewer columns says nothing."""

_MOST_NAME = 40
_MOST_WHY = 300
_STATES = (("cached", "█", "blue"), ("leased", "▓", "yellow"), ("unready", "░", "magenta"))


@dataclass(frozen=True)
class Screen:
    """Everything, top to bottom, for whatever width it is printed on."""

    view: View
    error: str = ""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        """Without colours the shades still differ."""
        room = TerminalRoom(console, options)
        yield _head(self.view)
        if self.error:
            yield Text(clean(self.error), style="bold red")
        yield _tiers(self.view, room)
        yield from _away(self.view)
        yield from _tenants(self.view)
        yield from _drives(self.view)
        yield from _memory(self.view)
        yield _routes(self.view, room)
        yield _counts(self.view, room)
        yield _foot(self.view)


def _head(view: View) -> Text:
    text = Text.assemble(
        ("kvferry ", "bold"), (_name(view.version), "dim"), "  ", (clean(view.url), "dim"), "\n"
    )
    if view.idle:
        text.append(f"idle: {clean(why_idle(view.idle))}\n", style="bold red")
    now = f" (now {show_share(view.hit_rate_now)})" if view.hit_rate_now is not None else ""
    text.append(f"hit rate {show_share(view.hit_rate)}{now}", style="bold")
    text.append(
        f"   {counted(view.queries, 'request')}, {view.queries_per_second:.1f}/s, "
        f"{counted(view.full_hits, 'full hit')}\n"
        f"{view.in_flight:,} in flight, {view.queued:,} queued, "
        f"{show_bytes(view.bytes_in_flight)}, {counted(view.leases, 'lease')}"
    )
    if view.pinned_bytes is not None:
        text.append(f"   {show_bytes(view.pinned_bytes)} pinned")
    return text


# -- tiers ----------------------------------------------------------------------------------------


def _tiers(view: View, room: TerminalRoom) -> RenderableType:
    left = room.beside(_tier_table(view, 0))
    if left < _LEAST_DRAWN:
        return Group(*(_tier(tier, room) for tier in view.tiers))
    return _tier_table(view, min(left, _scaled(_BAR_WIDTH, room)))


def _tier_table(view: View, bar_width: int) -> Table:
    table = _table("Tier", "", "", "Slots", "Bytes", "Evicted")
    for tier in view.tiers:
        slots = f"{tier.used:,} of {tier.total:,}"
        if tier.asked is not None:
            slots = f"{tier.found or 0:,} of {tier.asked:,} found"
        bar = _bar(tier, bar_width)
        table.add_row(_title(tier), bar, _share(tier), slots, _size(tier), f"{tier.evicted:,}")
    return table


def _title(tier: TierView, style: str = "") -> Text:
    """Its name; one that cannot be used says so where it is seen first."""
    if not tier.is_away:
        return Text(_name(tier.name), style=style)
    return Text(f"{_name(tier.name)} (away)", style="bold red")


def _away(view: View) -> Iterable[Text]:
    for tier in view.tiers:
        if tier.is_away:
            why = f": {said(tier.why_away, _MOST_WHY)}" if tier.why_away else ""
            yield Text(f"LowerTier {_name(tier.name)} cannot be used{why}", style="bold red")


def _tenants(view: View) -> Iterable[Text]:
    """What is held, and a line for each tenant, where there is anything of either."""
    held = [f"{tier.held:,} on {_name(tier.name)}" for tier in view.tiers if tier.held]
    if held:
        yield Text(f"Held for who asked: {', '.join(held)}")
    for tenant in view.tenants:
        slots = [f"{counted(count, 'slot')} on {_name(t)}" for t, count in tenant.slots.items()]
        yield Text(
            f"Tenant {_name(tenant.name)}: {', '.join(slots) or 'no slot'}, "
            f"{counted(tenant.evicted, 'block')} evicted, "
            f"{counted(tenant.queries, 'request')}, hit rate {show_share(tenant.hit_rate)}"
        )


def _drives(view: View) -> Iterable[Text]:
    """A line for each tier that has drives: what they do now, and whether all is well."""
    for tier in view.tiers:
        drives = tier.drives
        if drives is None:
            continue
        words = (
            f"Drives of {_name(tier.name)}: {show_bytes(drives.read_rate)}/s read, "
            f"{show_bytes(drives.write_rate)}/s written, "
            f"{counted(drives.pending, 'block')} not durable yet"
        )
        if drives.pending:
            words += f" (the oldest for {drives.durable_lag:.1f} s)"
        if tier.restored:
            words += f", began with {counted(tier.restored, 'block')}"
        yield Text(words)
        failed = ", ".join(f"{count:,} {why}" for why, count in drives.failed.items())
        troubles = [f"failed blocks: {failed}"] * bool(failed)
        troubles += [f"{counted(drives.num_away, 'drive')} away"] * bool(drives.num_away)
        if troubles:
            yield Text("  " + "; ".join(troubles), style="bold red")


def _memory(view: View) -> Iterable[Text]:
    """What more memory would buy, tier by tier."""
    for tier in view.tiers:
        words = memory_words(_name(tier.name), tier.curve)
        if words:
            half, four = (tier.curve.get(times) for times in ("0.5", "4"))
            more = f" (half: {show_share(half)}, four times: {show_share(four)})"
            yield Text(words[0].upper() + words[1:] + more, style="dim")


def _tier(tier: TierView, room: TerminalRoom) -> RenderableType:
    """One tier on lines of its own."""
    share = _share(tier)
    bar = _bar(tier, max(1, min(_BAR_WIDTH, room.width - len(share) - 4)))
    size = f", {_size(tier)}" if tier.slot_bytes is not None else ""
    words = f"{tier.used:,} of {tier.total:,} slots{size}, {tier.evicted:,} evicted"
    if tier.asked is not None:
        words = f"asked for {counted(tier.asked, 'block')}, {tier.found or 0:,} found"
    return Group(_title(tier, "bold dim"), _below(bar + Text(f"  {share}"), words))


def _bar(tier: TierView, width: int) -> Text:
    text = Text()
    if tier.asked:
        text.append("█" * round(width * (tier.found or 0) / tier.asked), style="blue")
    for state, mark, style in _STATES:
        count = getattr(tier, state)
        part = round(width * count / tier.total) if tier.total else 0
        text.append(mark * max(part, int(count > 0)), style=style)
    text.truncate(width)
    text.append("·" * (width - len(text)), style="dim")
    return text


def _share(tier: TierView) -> str:
    if tier.asked is not None:
        return show_share((tier.found or 0) / tier.asked if tier.asked else None)
    return show_share(tier.used / tier.total if tier.total else None)


def _size(tier: TierView) -> str:
    return "–" if tier.slot_bytes is None else show_bytes(tier.used * tier.slot_bytes)


# -- traffic --------------------------------------------------------------------------------------


def _routes(view: View, room: TerminalRoom) -> RenderableType:
    if not view.routes:
        return Text("Nothing has moved yet.", style="dim")
    left = room.beside(_route_table(view, 0))
    if left < _LEAST_DRAWN:
        return Group(*(_route(route, room) for route in view.routes))
    return _route_table(view, min(left, _scaled(_LINE_WIDTH, room)))


def _route_table(view: View, line_width: int) -> Table:
    table = _table("Route", "Now", "", "While copying", "In all", "Paths")
    for route in view.routes:
        line = Text(sparkline(route.history, line_width), style="cyan")
        speed, in_all = _speed(route), show_bytes(route.total_bytes)
        table.add_row(_ends(route), _now(route), line, speed, in_all, Text(_paths(route)))
    return table


def _route(route: RouteView, room: TerminalRoom) -> RenderableType:
    """One route on lines of its own."""
    line = Text(f"{_now(route)} now ")
    line.append(sparkline(route.history, max(1, room.width - len(line) - 2)), style="cyan")
    words = f"{_speed(route)} while copying, {show_bytes(route.total_bytes)} in all"
    paths = f": {_paths(route)}" if _paths(route) else ""
    return Group(_ends(route, style="bold dim"), _below(line, words + paths))


def _ends(route: RouteView, style: str = "") -> Text:
    return Text(f"{_name(route.src)} → {_name(route.dst)}", style=style)


def _now(route: RouteView) -> str:
    return f"{show_bytes(route.bytes_per_second)}/s"


def _speed(route: RouteView) -> str:
    return "–" if route.copy_speed is None else f"{show_bytes(route.copy_speed)}/s"


def _paths(route: RouteView) -> str:
    """Their shares, where there is more than one; the bytes of one are those of the route."""
    named = {_name(path): count for path, count in route.paths.items() if path}
    if len(named) == 1:
        return next(iter(named))
    return ", ".join(f"{path} {show_bytes(count)}" for path, count in named.items())


# -- counts ---------------------------------------------------------------------------------------


def _counts(view: View, room: TerminalRoom) -> RenderableType:
    troubles = {word: n for word, n in view.troubles.items() if n}
    rankings = {
        "Why requests got no more": view.misses,
        "Load or compute": view.decisions,
        "Troubles": troubles,
    }
    tables = {title: _ranking(title, counts) for title, counts in rankings.items()}
    grid = Table.grid(padding=(0, 4))
    for _ in tables:
        grid.add_column(no_wrap=True)
    grid.add_row(*tables.values())
    if room.beside(grid) >= 0:
        return grid
    return Group(
        *(
            table if room.beside(table) >= 0 else _listed(title, rankings[title])
            for title, table in tables.items()
        )
    )


def _ranking(title: str, counts: dict[str, int]) -> Table:
    table = _table(title, " ")
    for name, count in counts.items():
        table.add_row(Text(_reason(name)), f"{count:,}")
    if not counts:
        table.add_row(Text("none", style="dim"), "")
    return table


def _listed(title: str, counts: dict[str, int]) -> RenderableType:
    """The same on lines that may be broken between words."""
    words = [f"{count:,} {_reason(name)}" for name, count in counts.items()] or ["none"]
    return Group(Text(title, style="bold dim"), *(Padding(Text(w), (0, 0, 0, 2)) for w in words))


def _reason(name: str) -> str:
    return _name(name).replace("_", " ")


def _foot(view: View) -> Text:
    known = []
    if view.load_rate is not None:
        known.append(f"loads bring {show_bytes(view.load_rate)}/s")
    if view.prefill_rate is not None:
        known.append(f"prefill makes {view.prefill_rate:,.0f} tokens/s")
    return Text(f"Measured: {', '.join(known)}." if known else "", style="dim")


# -- all of them ----------------------------------------------------------------------------------


def _scaled(width: int, room: TerminalRoom) -> int:
    return 2 * width if room.width >= _WIDE else width


def _name(text: str) -> str:
    """A name that somebody else chose."""
    return said(text, _MOST_NAME)


def _below(first: Text, words: str) -> Padding:
    return Padding(Group(first, Text(words)), (0, 0, 0, 2))


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim")
    table.add_column(first, min_width=len(first), no_wrap=True)
    for name in others:
        is_left = not name or name == "Paths"
        table.add_column(name, justify="left" if is_left else "right", no_wrap=True)
    return table
