"""Output that the commands share: JSON, tables that fit, progress on one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvferry.tools.top.scrape import DEFAULT_URL

STDOUT = Path("-")
_PIPE_WIDTH = 1000

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
url_option = click.option(
    "--url", default=DEFAULT_URL, show_default=True, help="The engine's kvferry endpoint."
)


def options(*rows: tuple[str, dict[str, Any], str]) -> Callable[[Any], Any]:
    """Add options to a command. A row has the flags, the arguments of the option, and its help."""

    def add(command: Any) -> Any:
        for flags, arguments, words in reversed(rows):
            command = click.option(*flags.split(), help=words, **arguments)(command)
        return command

    return add


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``: alone it prints only the figures, with FILE it writes them there."""
    return click.option(
        "--json",
        "json_file",
        is_flag=False,
        flag_value=str(STDOUT),
        default=None,
        show_default=False,
        metavar="[FILE]",
        type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
        help="Print all figures as JSON, and the tables on standard error. With FILE, write the "
        "figures there instead.",
    )(command)


def is_stdout(json_file: Path | None) -> bool:
    """Whether standard output carries the figures."""
    return json_file == STDOUT


def put(data: object, json_file: Path | None, *, indent: int = 2) -> None:
    """Write the figures to the place that ``--json`` names, if it was given."""
    if json_file is None:
        return
    text = json.dumps(data, indent=indent)
    if is_stdout(json_file):
        click.echo(text)
    else:
        json_file.write_text(f"{text}\n", encoding="utf-8")


def show(line: str) -> None:
    """Show progress on standard error. On a terminal each line replaces the last."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{line}", nl=False, err=True)
    elif line:
        click.echo(line, err=True)


@dataclass(frozen=True)
class TerminalRoom:
    """The columns of a terminal."""

    console: Console
    options: ConsoleOptions

    @property
    def width(self) -> int:
        return self.options.max_width

    def beside(self, table: Table) -> int:
        """Columns that a table leaves free. Below zero the table does not fit."""
        endless = self.options.update(width=10_000)
        return self.width - Measurement.get(self.console, endless, table).maximum


def unbroken() -> Console:
    """A console that breaks lines between words in a terminal, and never in a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def grid(
    first: str,
    *others: str,
    left: Iterable[str] = ("",),
    style: str = "bold",
    no_wrap: bool = True,
) -> Table:
    """A table without lines. Its columns are right-aligned, except the first and ``left``."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=style)
    table.add_column(first, min_width=len(first), no_wrap=no_wrap)
    for name in others:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=no_wrap)
    return table


def put_table(table: Table, lines: Iterable[tuple[str, str]], console: Console) -> None:
    """Print the table, or the same figures in lines if the table is too wide."""
    if TerminalRoom(console, console.options).beside(table) >= 0:
        console.print(table)
        return
    for name, words in lines:
        console.print(Text(name))
        console.print(Padding(Text(words), (0, 0, 0, 2)))
