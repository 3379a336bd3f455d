"""What ``kvferry demo`` says in a terminal: a table for each of its parts, and what it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from kvferry.cli import fleet_report, policies_report, restart_report
from kvferry.cli.report import NAMES, ROWS, gain, verdict
from kvferry.level_kinds import show_levels
from kvferry.playground.compare import Comparison, ServingWay
from kvferry.playground.fleet import FleetResult
from kvferry.playground.policies import PoliciesResult
from kvferry.playground.restart import Restart
from kvferry.watch.words import show_bytes

Shown = TypeVar("Shown")


def show_comparison(result: Comparison, console: Console) -> None:
    columns = [(NAMES[way], figures) for way, figures in result.figures.items()]
    _put_table(columns, ROWS, console, list(result.figures).index(ServingWay.KVFERRY))
    _put_words(result, verdict(result), console)
    console.print(gain(result), highlight=False)
    if result.setting.levels:
        ferried = result.figures[ServingWay.KVFERRY]
        console.print(
            f"Below host memory ({show_levels(result.setting.levels)}): "
            f"{show_bytes(ferried.spilled_bytes)} went down, "
            f"{show_bytes(ferried.promoted_bytes)} came back.",
            highlight=False,
        )


def show_restart(again: Restart, console: Console) -> None:
    _put_table(restart_report.columns(again), restart_report.ROWS, console)
    _put_words(again, restart_report.restart_verdict(again), console)
    console.print(restart_report.restart_gain(again), highlight=False)


def show_policies(kept: PoliciesResult, console: Console) -> None:
    columns = policies_report.columns(kept)
    _put_table(columns, policies_report.ROWS, console, len(columns) - 1)
    _put_words(kept, policies_report.policies_verdict(kept), console)
    console.print(policies_report.policies_gain(kept), highlight=False)


def show_fleet(fleet: FleetResult, console: Console) -> None:
    _put_table(fleet_report.columns(fleet), fleet_report.ROWS, console)
    _put_words(fleet, fleet_report.fleet_verdict(fleet), console)
    console.print(fleet_report.fleet_gain(fleet), highlight=False)


def _put_table(
    columns: Sequence[tuple[str, Shown]],
    rows: Sequence[tuple[str, Callable[[Shown], str]]],
    console: Console,
    coloured: int = 0,
) -> None:
    table = Table(title=None, header_style="bold")
    table.add_column("")
    for at, (name, column) in enumerate(columns):
        widest = max(len(show(column)) for _, show in rows)  # words may be broken, numbers not
        style = "cyan" if at == coloured else None
        table.add_column(name, justify="right", style=style, min_width=widest)
    for name, show in rows:
        table.add_row(name, *(show(column) for _, column in columns))
    console.print(table)


def _put_words(
    result: Comparison | Restart | PoliciesResult | FleetResult, words: str, console: Console
) -> None:
    style, mark = ("green", "OK") if result.tokens_equal else ("bold red", "FAILED")
    console.print(f"[{style}]{mark}[/] {words}", highlight=False)
