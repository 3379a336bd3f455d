"""``--json`` of the commands that measure: figures on standard output, or in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table

STDOUT = Path("-")


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json`` alone prints the figures and nothing else; ``--json FILE`` writes them too."""
    return click.option(
        "--json",
        "json_file",
        is_flag=False,
        flag_value=str(STDOUT),
        default=None,
        show_default=False,
        metavar="[FILE]",
        type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
        help="Print all figures as JSON; what is for people goes to standard error. With FILE, "
        "write them there instead.",
    )(command)


def is_stdout(json_file: Path | None) -> bool:
    """Whether standard output belongs to the figures."""
    return json_file == STDOUT


def put(data: object, json_file: Path | None, *, indent: int = 2) -> None:
    """Write the figures to where they were asked for, if they were."""
    if json_file is None:
        return
    text = json.dumps(data, indent=indent)
    if is_stdout(json_file):
        click.echo(text)
    else:
        json_file.write_text(f"{text}\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------
# Progress of a command that measures, on standard error.


def show(line: str) -> None:
    """Each line in place of the last on a terminal, one after another elsewhere."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{line}", nl=False, err=True)
    elif line:
        click.echo(line, err=True)


# ------------------------------------------------------------------------------------------------
# How wide a terminal is, and whether a table fits into it: what does not is told in lines.

_PIPE_WIDTH = 1000


@dataclass(frozen=True)
class TerminalRoom:
    """The columns that something may take."""

    console: Console
    options: ConsoleOptions

    @property
    def width(self) -> int:
        return self.options.max_width

    def beside(self, table: Table) -> int:
        """Columns that a table leaves free; below zero if it does not fit."""
        endless = self.options.update(width=10_000)
        return self.width - Measurement.get(self.console, endless, table).maximum


def unbroken() -> Console:
    """A console that breaks lines between words in a terminal, and nowhere in a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)
