"""``kvferry top``: a live view of a running kvferry, in the terminal or in a browser."""

from __future__ import annotations

import json
import time
from typing import NoReturn

import click
from rich.console import Console
from rich.live import Live

from kvferry.errors import KvferryError, UnreachableError
from kvferry.telemetry.http import LOOPBACK
from kvferry.tools.cli.screen import Screen
from kvferry.tools.top.scrape import DEFAULT_URL, base_url
from kvferry.tools.top.view import View, Watch


@click.command(context_settings={"show_default": True})
@click.argument("url", default=DEFAULT_URL)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    metavar="SECONDS",
    help="Time between looks.",
)
@click.option("--once", is_flag=True, help="Look for one interval, print, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one document per look.")
@click.option("--web", is_flag=True, help="Serve the view as a web page instead, and as JSON.")
@click.option("--host", default=LOOPBACK, help="With --web: the address to serve on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9476, help="With --web: the port.")
def top(
    url: str, interval: float, once: bool, as_json: bool, web: bool, host: str, port: int
) -> None:
    """See what a running kvferry does, now.

    URL is the metrics endpoint of an engine that uses kvferry (metrics_port, or
    ferry.serve_metrics()), or that of a vLLM server with the kvferry connector.

    The exit code is 1 where nothing answers there.
    """
    if web and (as_json or once):
        which = "--json" if as_json else "--once"
        raise click.UsageError(
            f"{which} prints and --web serves: leave one of them out. "
            "The page's server has the view as JSON under /view.json."
        )
    try:
        url = base_url(url)
        watch = Watch(url)
        if web:
            _serve(watch, host, port, interval)
        elif once:
            view = _once(watch, interval)
            _print(view, as_json)
        else:
            _follow(watch, interval, as_json)
    except KvferryError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        pass  # how one leaves it


def _once(watch: Watch, interval: float) -> View:
    watch.look()
    time.sleep(interval)
    return watch.look()


def _print(view: View, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(view.as_dict()))
    else:
        Console(highlight=False).print(Screen(view))


def _follow(watch: Watch, interval: float, as_json: bool) -> NoReturn:
    """Look until interrupted. An engine that restarts is waited for."""
    console = Console(highlight=False)
    view = _once(watch, interval)
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


def _serve(watch: Watch, host: str, port: int, interval: float) -> None:
    from kvferry.tools.top.server import PageServer

    with PageServer(watch, host=host, port=port, interval=interval) as server:
        click.echo(
            f"{server.url} shows {watch.url} (view.json there is for scripts; Ctrl-C ends it)"
        )
        while True:
            time.sleep(3600)
