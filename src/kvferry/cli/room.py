"""How wide a terminal is, and whether a table fits into it: what does not is told in lines."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table

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
