"""``kvferry top``: a live view of a running kvferry, in the terminal or in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.text import Text

from kvferry.errors import UnreachableError
from kvferry.telemetry.http import LOOPBACK
from kvferry.tools.cli.output import found, options, table
from kvferry.tools.top.view import DrivesView, PageServer, RouteView, TierView, View, Watch
from kvferry.tools.words import (
    clean,
    clip,
    counted,
    show_bytes,
    show_share,
    sparkline,
)

_MOST_WHY = 300
_STATES = (("cached", "█", "blue"), ("leased", "▓", "yellow"), ("unready", "░", "magenta"))

_name = partial(clip, most=40)
_WIDTH = 30
"""Columns of a bar."""


@dataclass(frozen=True)
class Screen:
    """A whole view, for any width. Without colours the shades of the bars still differ."""

    view: View
    error: str = ""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        view = self.view
        yield from _head(view)
        if self.error:
            yield Text(clean(self.error), style="bold red")
        if view.tiers:
            heads = ("Tier", "", "Full", "Slots", "Bytes", "Evicted")
            yield table(heads, map(_tier, view.tiers), style="bold dim")
        yield from _notes(view)
        if view.routes:
            heads = ("Route", "Now", "", "Copy speed", "Total", "Paths")
            yield table(heads, map(_route, view.routes), left=["Paths"], style="bold dim")
        for title, counts in (
            ("Miss reasons", view.misses),
            ("Decisions", view.decisions),
            ("Problems", {word: n for word, n in view.problems.items() if n}),
        ):
            if not view.queries and not counts:
                continue
            told = [f"{n:,} {_name(name).replace('_', ' ')}" for name, n in counts.items()]
            yield Text.assemble((f"{title}: ", "bold dim"), ", ".join(told) or "none")
        rates = []
        if view.load_rate is not None:
            rates.append(f"loads {show_bytes(view.load_rate)}/s")
        if view.prefill_rate is not None:
            rates.append(f"prefill {view.prefill_rate:,.0f} tokens/s")
        if rates:
            yield Text(f"Measured: {', '.join(rates)}", style="dim")


def _head(view: View) -> Iterator[Text]:
    yield Text.assemble(
        ("kvferry ", "bold"), (_name(view.version), "dim"), "  ", (clean(view.url), "dim")
    )
    if view.idle:
        yield Text(f"idle: {clip(view.idle, _MOST_WHY)}", style="bold red")
    if not view.queries:
        if not view.idle:
            yield Text("loaded, no request yet", style="bold")
        return
    now = f"{show_share(view.hit_rate_now)} now, " if view.hit_rate_now is not None else ""
    text = Text(f"hit rate {now}{show_share(view.hit_rate)} in total", style="bold")
    yield text.append(
        f"   {counted(view.queries, 'request')} ({view.queries_per_second:.1f}/s), "
        f"{counted(view.full_hits, 'full hit')}",
        style="not bold",
    )
    if view.tokens:
        whole = sum(view.tokens.values()) or 1
        parts = [f"{_name(tier)} {show_share(n / whole)}" for tier, n in view.tokens.items()]
        yield Text(f"prompt tokens: {', '.join(parts)}")
    pinned = "" if not view.pinned_bytes else f", {show_bytes(view.pinned_bytes)} locked memory"
    yield Text(
        f"copies: {view.in_flight:,} in flight ({show_bytes(view.bytes_in_flight)}), "
        f"{view.queued:,} queued, {counted(view.deferred_stores, 'store')} deferred, "
        f"{counted(view.leases, 'lease')}{pinned}"
    )


def _tier(tier: TierView) -> Sequence[str | Text]:
    name = _name(tier.name)
    title = Text(f"{name} (unavailable)", style="bold red") if tier.is_away else name
    if tier.asked is not None:
        part, whole = tier.found or 0, tier.asked
        slots = f"{part:,} of {whole:,} found"
    else:
        part, whole = tier.used, tier.total
        slots = f"{part:,} of {whole:,}"
    size = "–" if tier.slot_bytes is None else show_bytes(tier.used * tier.slot_bytes)
    share = show_share(part / whole if whole else None)
    return title, _bar(tier, _WIDTH), share, slots, size, f"{tier.evicted:,}"


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


def _notes(view: View) -> Iterator[Text]:
    """Lines about unavailable tiers, pins, tenants and drives."""
    for tier in view.tiers:
        if tier.is_away:
            why = f": {clip(tier.why_away, _MOST_WHY)}" if tier.why_away else ""
            yield Text(f"Tier {_name(tier.name)} is unavailable{why}", style="bold red")
    pinned = [f"{counted(t.held, 'block')} ({_name(t.name)})" for t in view.tiers if t.held]
    if pinned:
        yield Text(f"Pinned: {', '.join(pinned)}")
    for tenant in view.tenants:
        slots = [f"{counted(count, 'slot')} ({_name(t)})" for t, count in tenant.slots.items()]
        yield Text(
            f"Tenant {_name(tenant.name)}: {', '.join(slots) or 'no slot'}, "
            f"{counted(tenant.evicted, 'block')} evicted, {counted(tenant.queries, 'request')}, "
            f"{show_share(tenant.loaded_share)} of device misses loaded"
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
        words += f" (oldest {drives.durable_lag:.1f} s)"
    if tier.restored:
        words += f", {counted(tier.restored, 'block')} found at start"
    yield Text(words)
    problems = [f"{counted(count, 'block')} failed ({why})" for why, count in drives.failed.items()]
    problems += [f"{counted(drives.num_away, 'drive')} unavailable"] * bool(drives.num_away)
    if problems:
        yield Text("  " + ", ".join(problems), style="bold red")


def _route(route: RouteView) -> Sequence[str | Text]:
    named = {_name(path): count for path, count in route.paths.items() if path}
    paths = [path if len(named) == 1 else f"{path} {show_bytes(n)}" for path, n in named.items()]
    return (
        f"{_name(route.src)} → {_name(route.dst)}",
        f"{show_bytes(route.bytes_per_second)}/s",
        Text(sparkline(route.history, _WIDTH), style="cyan"),
        "–" if route.copy_speed is None else f"{show_bytes(route.copy_speed)}/s",
        show_bytes(route.total_bytes),
        ", ".join(paths),
    )


SECONDS = {"type": click.FloatRange(min=0.1), "default": 1.0, "metavar": "SECONDS"}
PORT = {"type": click.IntRange(0, 65535), "default": 9476}


@click.command(context_settings={"show_default": True})
@click.argument("url", required=False)
@options(
    ("--interval", SECONDS, "Time between two readings."),
    ("--once", {"is_flag": True}, "Measure for one interval, print, and end."),
    ("--json", {"is_flag": True}, "Print JSON, one document per reading."),
    ("--web", {"is_flag": True}, "Serve the view as a web page and as JSON instead."),
    ("--host", {"default": LOOPBACK}, "With --web: the address to serve on."),
    ("--port", PORT, "With --web: the port."),
)
def top(
    url: str | None, interval: float, once: bool, json: bool, web: bool, host: str, port: int
) -> None:
    """Watch a running kvferry.

    URL is the address of an engine with kvferry or of a vLLM server, such as localhost:8000.
    Without it, kvferry's usual ports on this machine and vLLM's port 8000 are tried.

    The exit code is 1 if the endpoint does not answer.
    """
    if web and (json or once):
        raise click.UsageError(
            f"{'--json' if json else '--once'} prints and --web serves: give only one of them. "
            "The page's server has the view as JSON under /view.json."
        )
    try:
        watch = Watch(found(url))
        if web:
            _serve(watch, host, port, interval)
        watch.look()
        time.sleep(interval)
        view = watch.look()
        if not once:
            _follow(watch, view, interval, json)
        _print(view, json)
    except KeyboardInterrupt:
        pass  # the usual end


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
    with PageServer(watch, host=host, port=port, interval=interval) as server:
        click.echo(f"{server.url} shows {watch.url}. Ctrl-C ends it. JSON: {server.url}view.json")
        while True:
            time.sleep(3600)
