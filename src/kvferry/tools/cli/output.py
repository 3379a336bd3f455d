"""Output that the commands share: JSON, tables that fit, what a command does for so long."""

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


def found(url: str | None) -> str:
    """The given address, or the first of the usual ones that has kvferry: its own before vLLM's.

    Further ones are named on standard error.
    """
    if url is not None:
        return base_url(url)
    urls = find_endpoints()
    if len(urls) > 1:
        click.echo(f"Found {', '.join(urls)}. Using {urls[0]}.", err=True)
    return urls[0]


@contextmanager
def working(words: str) -> Iterator[None]:
    """Show what is done, and for how long, on standard error if that is a terminal."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn(words), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task("")
        yield


def options(*rows: tuple[str, dict[str, Any], str]) -> Callable[[Any], Any]:
    """Add options to a command. A row has the flags, the arguments of the option, and its help."""

    def add(command: Any) -> Any:
        for flags, arguments, words in reversed(rows):
            command = click.option(*flags.split(), help=words, **arguments)(command)
        return command

    return add


def unbroken(*, stderr: bool = False) -> Console:
    """A console that breaks lines between words in a terminal, and never in a file or a pipe."""
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
    """A table without lines. Its columns are right-aligned, except the first and ``left``.

    A cell that is too wide for the terminal is folded: nothing is cut.
    """
    left = {heads[0], *left}
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=style)
    for name in heads:
        made.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(clean(cell)) if isinstance(cell, str) else cell for cell in row))
    return made
