"""How far the demo is: a bar for each way in a terminal, else a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.cli.fleet_report import WAYS
from kvferry.cli.report import NAMES, show_seconds
from kvferry.cli.restart_report import LIVES
from kvferry.playground.compare import ServingWay, Turn
from kvferry.playground.request import ServedRequest

Follow = Callable[[ServingWay], Callable[[ServedRequest], None]]
"""Begins to show one way's progress; the answer is told of every finished turn."""


@contextmanager
def following(console: Console, num_turns: int) -> Iterator[Follow]:
    """Shows the three ways, each as it is served."""
    if not console.is_terminal:
        yield lambda way: _PlainProgress(console, way, num_turns)
        return
    with Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[last]}"),
        console=console,
    ) as progress:

        def follow(way: ServingWay) -> Callable[[ServedRequest], None]:
            task = progress.add_task(NAMES[way], total=num_turns, last="")

            def finished(request: ServedRequest) -> None:
                progress.update(task, advance=1, last=f"first token {_wait(request)}")

            return finished

        yield follow


class _PlainProgress:
    """A line for every quarter of a run, for logs and pipes."""

    def __init__(self, console: Console, way: ServingWay, num_turns: int) -> None:
        self._console = console
        self._way = way
        self._num_turns = num_turns
        self._num_done = 0

    def __call__(self, request: ServedRequest) -> None:
        quarter = 4 * self._num_done // self._num_turns
        self._num_done += 1
        if 4 * self._num_done // self._num_turns > quarter:
            self._console.print(
                f"{NAMES[self._way]}: {self._num_done} of {self._num_turns} turns, "
                f"first token {_wait(request)}",
                highlight=False,
            )


class LifeProgress:
    """A line for every process, once it has answered its first turn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._life = ""

    def __call__(self, life: str, turn: Turn) -> None:
        if life != self._life:
            self._life = life
            wait = show_seconds(turn.first_token_seconds)
            self._console.print(f"{LIVES[life]}: first token {wait}", highlight=False)


class PolicyProgress:
    """A line for every quarter of the turns that policies are compared by."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, number: int, total: int) -> None:
        if 4 * number // total > 4 * (number - 1) // total:
            self._console.print(f"Policies: {number} of {total} turns", highlight=False)


class FleetProgress:
    """A line for every server of a fleet, once it has answered its first turn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: set[tuple[str, int]] = set()

    def __call__(self, way: str, server: int, turn: Turn) -> None:
        if (way, server) not in self._seen:
            self._seen.add((way, server))
            wait = show_seconds(turn.first_token_seconds)
            self._console.print(
                f"{WAYS[way]}: server {server}, first token {wait}", highlight=False
            )


def _wait(request: ServedRequest) -> str:
    assert request.first_token_at is not None
    return show_seconds(request.first_token_at - request.arrival)
