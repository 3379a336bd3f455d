"""``kvferry top``: a live view of a running kvferry, in the terminal or in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NoReturn

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.text import Text

from kvferry.errors import UnreachableError
from kvferry.telemetry.http import LOOPBACK
from kvferry.tools.cli.output import endpoint_url, options
from kvferry.tools.cli.output import table as draw
from kvferry.tools.top.page import PageServer
from kvferry.tools.top.view import Bar, FormattedView, View, Watch
from kvferry.tools.words import clean

_WIDTH = 30
"""Columns of a bar."""

_MARKS = {"cached": ("█", "blue"), "leased": ("▓", "yellow"), "unready": ("░", "magenta")}


@dataclass(frozen=True)
class Screen:
    """Draws a view, or an error above the last view. Bars differ in shade even without colours."""

    view: View
    error: str = ""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        shown = FormattedView.of(self.view)
        yield Text(f"kvferry {shown.title}", style="bold")
        if self.error:
            yield Text(clean(self.error), style="bold red")
        width = max((len(big) for big, _ in shown.cards), default=0)
        for big, words in shown.cards:
            yield Text.assemble((big.rjust(width), "bold"), f"  {words}")
        for table in shown.tables:
            rows = [[_cell(cell) for cell in row] for row in table.rows]
            yield draw(table.heads, rows, left=["Paths", "Slots"], style="bold dim")
        for words, is_bad in shown.notes:
            yield Text(words, style="bold red" if is_bad else "")


def _cell(cell: str | Bar) -> str | Text:
    if isinstance(cell, str):
        return cell
    text = Text()
    for kind, share in cell.parts:
        mark, style = _MARKS[kind]
        text.append(mark * max(round(_WIDTH * share), int(share > 0)), style=style)
    text.truncate(_WIDTH)
    return text.append("·" * (_WIDTH - len(text)), style="dim")


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
    try:
        watch = Watch(endpoint_url(url))
        if web:
            _serve(watch, host, port, interval)
        watch.look()
        time.sleep(interval)
        view = watch.look()
        if not once:
            _follow(watch, view, interval, json)
        _print(view, json)
    except KeyboardInterrupt:
        pass  # the usual way to end this command


def _print(view: View, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(view)))
    else:
        Console(highlight=False).print(Screen(view))


def _follow(watch: Watch, view: View, interval: float, as_json: bool) -> NoReturn:
    """Show every reading until Ctrl-C. On a terminal, keep trying while the engine restarts."""
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
