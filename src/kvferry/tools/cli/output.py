"""Output that the commands share: JSON, tables that fit, progress on one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvferry.errors import UnreachableError
from kvferry.tools.top.scrape import VLLM_PORT, base_url, find_endpoints

STDOUT = Path("-")
_PIPE_WIDTH = 1000
_LEAST_DRAWN = 6
"""A narrower drawing shows nothing."""
_WIDE = 150
"""From this width on, drawings are twice as wide."""

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
url_option = click.option(
    "--url",
    metavar="ADDRESS",
    help="kvferry's endpoint.",
    show_default="the usual addresses on this machine",
)


def found(url: str | None, *, explains: bool = False) -> str:
    """The given address, or the first of the usual ones that has kvferry.

    Further ones are named on standard error. With ``explains`` vLLM's own does not count.
    """
    if url is not None:
        return base_url(url)
    urls = find_endpoints()
    if explains:
        vllms = urls[-1]
        urls = [each for each in urls if not each.endswith(f":{VLLM_PORT}")]
        if not urls:
            raise UnreachableError(
                f"{vllms} has kvferry's metrics but does not explain requests. kvferry's own "
                "endpoint does: vLLM's log has its address, unless metrics_port is none or "
                "kvferry is idle"
            )
    if len(urls) > 1:
        click.echo(f"Found {', '.join(urls)}. Using {urls[0]}.", err=True)
    return urls[0]


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


@contextmanager
def progress(words: str, *, is_hidden: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on standard error, if that is a terminal. Tell it how much is done, and of how many."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    is_hidden = is_hidden or not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=is_hidden
    ) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def unbroken(*, stderr: bool = False) -> Console:
    """A console that breaks lines between words in a terminal, and never in a file or a pipe."""
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


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


Cell = str | Text | Callable[[int], Text]
"""A text, or a function that draws so many columns."""


@dataclass(frozen=True)
class Rows:
    """A table where it fits, else each row as lines. A number is never cut.

    ``heads`` name the columns. The first cell of a row is its name. At most one cell of a row is
    drawn, as wide as the room allows and at most ``most`` columns.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left: Sequence[str] = ()
    style: str = "bold"
    most: int = 30

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        width = options.max_width
        endless = options.update(width=10_000)
        room = width - Measurement.get(console, endless, self._table(0)).maximum
        has_drawing = any(callable(cell) for row in self.rows for cell in row)
        if room >= (_LEAST_DRAWN if has_drawing else 0):
            yield self._table(min(room, 2 * self.most if width >= _WIDE else self.most))
            return
        for row in self.rows:
            yield Text.assemble(row[0], style=self.style)  # type: ignore[arg-type]
            drawn = [cell(min(self.most, width - 2)) for cell in row if callable(cell)]
            words = Text(", ").join(
                Text.assemble(f"{head.lower()} " * bool(head), cell)
                for head, cell in zip(self.heads[1:], row[1:], strict=True)
                if not callable(cell) and cell not in ("", "–")
            )
            yield Padding(Group(*drawn, words), (0, 0, 0, 2))

    def _table(self, width: int) -> Table:
        table = grid(*self.heads, left=("", *self.left), style=self.style)
        for row in self.rows:
            cells = (cell(width) if callable(cell) else cell for cell in row)
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
        return table
