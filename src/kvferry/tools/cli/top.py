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
    except KvferryError as error:
        raise click.ClickException(str(error)) from error
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
    from kvferry.tools.top.server import PageServer

    with PageServer(watch, host=host, port=port, interval=interval) as server:
        click.echo(
            f"{server.url} shows {watch.url} (view.json there is for scripts; Ctrl-C ends it)"
        )
        while True:
            time.sleep(3600)
