"""``kvferry top``: a live view of a running kvferry, in the terminal or in a browser.

Tables that do not fit become lines. A number is never cut.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvferry.errors import UnreachableError
from kvferry.telemetry.http import LOOPBACK
from kvferry.tools.cli.output import TerminalRoom, grid
from kvferry.tools.top.scrape import DEFAULT_URL, base_url
from kvferry.tools.top.view import DrivesView, RouteView, TierView, View, Watch
from kvferry.tools.words import (
    clean,
    clip,
    counted,
    show_bytes,
    show_share,
    sparkline,
)

_BAR_WIDTH = 30
_LINE_WIDTH = 24
_WIDE = 150
"""From this width on, bars and sparklines are twice as wide."""

_LEAST_DRAWN = 6
"""A shorter bar or sparkline shows nothing."""

_MOST_WHY = 300
_STATES = (("cached", "█", "blue"), ("leased", "▓", "yellow"), ("unready", "░", "magenta"))

_name = partial(clip, most=40)
_grid = partial(grid, left=("", "Paths"), style="bold dim")


@dataclass(frozen=True)
class Screen:
    """A whole view, for any width. Without colours the shades of the bars still differ."""

    view: View
    error: str = ""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        view, room = self.view, TerminalRoom(console, options)
        yield _head(view)
        if self.error:
            yield Text(clean(self.error), style="bold red")
        yield _fitted(
            room, partial(_tier_table, view), _BAR_WIDTH, partial(_tier_lines, view, room)
        )
        yield from _notes(view)
        if view.routes:
            lines = partial(_route_lines, view, room)
            yield _fitted(room, partial(_route_table, view), _LINE_WIDTH, lines)
        else:
            yield Text("Nothing has moved yet.", style="dim")
        yield _counts(view, room)
        rates = []
        if view.load_rate is not None:
            rates.append(f"loads {show_bytes(view.load_rate)}/s")
        if view.prefill_rate is not None:
            rates.append(f"prefill {view.prefill_rate:,.0f} tokens/s")
        yield Text(f"Measured: {', '.join(rates)}." if rates else "", style="dim")


def _fitted(
    room: TerminalRoom,
    table: Callable[[int], Table],
    width: int,
    lines: Callable[[], Iterable[RenderableType]],
) -> RenderableType:
    """A table with a drawing as wide as the room allows, else lines."""
    left = room.beside(table(0))
    if left < _LEAST_DRAWN:
        return Group(*lines())
    return table(min(left, 2 * width if room.width >= _WIDE else width))


def _head(view: View) -> Text:
    text = Text.assemble(
        ("kvferry ", "bold"), (_name(view.version), "dim"), "  ", (clean(view.url), "dim"), "\n"
    )
    if view.idle:
        text.append(f"idle: {clip(view.idle, _MOST_WHY)}\n", style="bold red")
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


def _tier_table(view: View, bar_width: int) -> Table:
    table = _grid("Tier", "", "", "Slots", "Bytes", "Evicted")
    for tier in view.tiers:
        slots = f"{tier.used:,} of {tier.total:,}"
        if tier.asked is not None:
            slots = f"{tier.found or 0:,} of {tier.asked:,} found"
        bar, size = _bar(tier, bar_width), _size(tier) or "–"
        table.add_row(_title(tier), bar, _share(tier), slots, size, f"{tier.evicted:,}")
    return table


def _tier_lines(view: View, room: TerminalRoom) -> Iterator[RenderableType]:
    for tier in view.tiers:
        share = _share(tier)
        bar = _bar(tier, max(1, min(_BAR_WIDTH, room.width - len(share) - 4)))
        size = f", {_size(tier)}" if _size(tier) else ""
        words = f"{tier.used:,} of {tier.total:,} slots{size}, {tier.evicted:,} evicted"
        if tier.asked is not None:
            words = f"asked for {counted(tier.asked, 'block')}, {tier.found or 0:,} found"
        yield _title(tier, "bold dim")
        yield _indented(bar + Text(f"  {share}"), words)


def _title(tier: TierView, style: str = "") -> Text:
    if not tier.is_away:
        return Text(_name(tier.name), style=style)
    return Text(f"{_name(tier.name)} (away)", style="bold red")


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
    part, whole = tier.used, tier.total
    if tier.asked is not None:
        part, whole = tier.found or 0, tier.asked
    return show_share(part / whole if whole else None)


def _size(tier: TierView) -> str:
    return "" if tier.slot_bytes is None else show_bytes(tier.used * tier.slot_bytes)


def _notes(view: View) -> Iterator[Text]:
    """Lines about tiers that are away, pins, tenants, drives, and more memory."""
    for tier in view.tiers:
        if tier.is_away:
            why = f": {clip(tier.why_away, _MOST_WHY)}" if tier.why_away else ""
            yield Text(f"Tier {_name(tier.name)} cannot be used{why}", style="bold red")
    pinned = [f"{tier.held:,} on {_name(tier.name)}" for tier in view.tiers if tier.held]
    if pinned:
        yield Text(f"Pinned: {', '.join(pinned)}")
    for tenant in view.tenants:
        slots = [f"{counted(count, 'slot')} on {_name(t)}" for t, count in tenant.slots.items()]
        yield Text(
            f"Tenant {_name(tenant.name)}: {', '.join(slots) or 'no slot'}, "
            f"{counted(tenant.evicted, 'block')} evicted, "
            f"{counted(tenant.queries, 'request')}, hit rate {show_share(tenant.hit_rate)}"
        )
    for tier in view.tiers:
        if tier.drives is not None:
            yield from _drives(tier, tier.drives)


def _drives(tier: TierView, drives: DrivesView) -> Iterator[Text]:
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


def _route_table(view: View, line_width: int) -> Table:
    table = _grid("Route", "Now", "", "While copying", "In all", "Paths")
    for route in view.routes:
        line = Text(sparkline(route.history, line_width), style="cyan")
        ends, now, speed, in_all, paths = _route(route)
        table.add_row(Text(ends), now, line, speed, in_all, Text(paths))
    return table


def _route_lines(view: View, room: TerminalRoom) -> Iterator[RenderableType]:
    for route in view.routes:
        ends, now, speed, in_all, paths = _route(route)
        line = Text(f"{now} now ")
        line.append(sparkline(route.history, max(1, room.width - len(line) - 2)), style="cyan")
        yield Text(ends, style="bold dim")
        yield _indented(line, f"{speed} while copying, {in_all} in all{paths and f': {paths}'}")


def _route(route: RouteView) -> tuple[str, str, str, str, str]:
    named = {_name(path): count for path, count in route.paths.items() if path}
    paths = [path if len(named) == 1 else f"{path} {show_bytes(n)}" for path, n in named.items()]
    return (
        f"{_name(route.src)} → {_name(route.dst)}",
        f"{show_bytes(route.bytes_per_second)}/s",
        "–" if route.copy_speed is None else f"{show_bytes(route.copy_speed)}/s",
        show_bytes(route.total_bytes),
        ", ".join(paths),
    )


def _counts(view: View, room: TerminalRoom) -> RenderableType:
    rankings = {
        "Why requests got no more": view.misses,
        "Load or compute": view.decisions,
        "Troubles": {word: n for word, n in view.troubles.items() if n},
    }
    tables = [_ranking(title, counts) for title, counts in rankings.items()]
    row = Table.grid(padding=(0, 4))
    for _ in tables:
        row.add_column(no_wrap=True)
    row.add_row(*tables)
    if room.beside(row) >= 0:
        return row
    return Group(
        *(
            table if room.beside(table) >= 0 else _listed(*ranking)
            for table, ranking in zip(tables, rankings.items(), strict=True)
        )
    )


def _ranking(title: str, counts: dict[str, int]) -> Table:
    table = _grid(title, " ")
    for name, count in counts.items():
        table.add_row(Text(_name(name).replace("_", " ")), f"{count:,}")
    if not counts:
        table.add_row(Text("none", style="dim"), "")
    return table


def _listed(title: str, counts: dict[str, int]) -> RenderableType:
    """A ranking as lines that may break between words."""
    words = [f"{count:,} {_name(name).replace('_', ' ')}" for name, count in counts.items()]
    return Group(Text(title, style="bold dim"), *(_indented(Text(w)) for w in words or ["none"]))


def _indented(first: Text, words: str = "") -> Padding:
    return Padding(Group(first, Text(words)) if words else first, (0, 0, 0, 2))


@click.command(context_settings={"show_default": True})
@click.argument("url", default=DEFAULT_URL)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    metavar="SECONDS",
    help="Time between two readings.",
)
@click.option("--once", is_flag=True, help="Measure for one interval, print, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one document per reading.")
@click.option("--web", is_flag=True, help="Serve the view as a web page and as JSON instead.")
@click.option("--host", default=LOOPBACK, help="With --web: the address to serve on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9476, help="With --web: the port.")
def top(
    url: str, interval: float, once: bool, as_json: bool, web: bool, host: str, port: int
) -> None:
    """Watch a running kvferry.

    URL is the metrics endpoint of an engine with kvferry (metrics_port, or ferry.serve_metrics()),
    or of a vLLM server with the kvferry connector.

    The exit code is 1 if the endpoint does not answer.
    """
    if web and (as_json or once):
        raise click.UsageError(
            f"{'--json' if as_json else '--once'} prints and --web serves: leave one of them out. "
            "The page's server has the view as JSON under /view.json."
        )
    try:
        watch = Watch(base_url(url))
        if web:
            _serve(watch, host, port, interval)
        view = _once(watch, interval)
        if not once:
            _follow(watch, view, interval, as_json)
        _print(view, as_json)
    except KeyboardInterrupt:
        pass  # the usual end


def _once(watch: Watch, interval: float) -> View:
    watch.look()
    time.sleep(interval)
    return watch.look()


def _print(view: View, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(view.as_dict()))
    else:
        Console(highlight=False).print(Screen(view))


def _follow(watch: Watch, view: View, interval: float, as_json: bool) -> NoReturn:
    """Show every reading until Ctrl-C. On a terminal it waits for an engine that restarts."""
    console = Console(highlight=False)
    if as_json or not console.is_terminal:
        while True:
            _print(view, as_json)
            time.sleep(interval)
            view = watch.look()
    with Live(Screen(view), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            error = ""
            try:
                view = watch.look()
            except UnreachableError as gone:
                error = str(gone)
            live.update(Screen(view, error), refresh=True)


def _serve(watch: Watch, host: str, port: int, interval: float) -> NoReturn:
    from kvferry.tools.top.view import PageServer

    with PageServer(watch, host=host, port=port, interval=interval) as server:
        click.echo(
            f"{server.url} shows {watch.url} (view.json there is for scripts; Ctrl-C ends it)"
        )
        while True:
            time.sleep(3600)
