"""Options and output that the commands share: addresses, tables, a progress line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvferry.tools.top.scrape import base_url, find_endpoints
from kvferry.tools.words import clean

_PIPE_WIDTH = 1000

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
url_option = click.option(
    "--url",
    metavar="ADDRESS",
    help="kvferry's endpoint.",
    show_default="the usual addresses on this machine",
)


def endpoint_url(url: str | None) -> str:
    """Return the given address, or the first usual address that has kvferry's metrics.

    kvferry's own ports come before vLLM's. If several have metrics, standard error names them.
    """
    if url is not None:
        return base_url(url)
    urls = find_endpoints()
    if len(urls) > 1:
        click.echo(f"Found {', '.join(urls)}. Using {urls[0]}.", err=True)
    return urls[0]


@contextmanager
def progress(words: str) -> Iterator[None]:
    """Show the elapsed time on standard error while the body runs, if that is a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn(words), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task("")
        yield


def options(*rows: tuple[str, dict[str, Any], str]) -> Callable[[Any], Any]:
    """Add options to a command. A row has an option's flags, click arguments and help."""

    def add(command: Any) -> Any:
        for flags, arguments, words in reversed(rows):
            command = click.option(*flags.split(), help=words, **arguments)(command)
        return command

    return add


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that wraps lines in a terminal, but not in a file or a pipe."""
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    left: Iterable[str] = (),
    style: str = "bold",
) -> Table:
    """Make a table without lines. Columns are right-aligned, except the first and ``left``.

    A cell that is too wide for the terminal is folded: nothing is cut.
    """
    left = {heads[0], *left}
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=style)
    for name in heads:
        made.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(clean(cell)) if isinstance(cell, str) else cell for cell in row))
    return made
