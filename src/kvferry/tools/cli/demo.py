"""``kvferry demo``: a small device offloads KV blocks, loads them again, and saves prefill."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvferry.errors import InputError
from kvferry.tools.cli.output import options, table
from kvferry.tools.demo.model import ModelShape
from kvferry.tools.demo.mooncake_master import require_mooncake
from kvferry.tools.demo.parts import Scenario, compare, run_fleet, run_restart
from kvferry.tools.demo.report import OnTurn, Part, render
from kvferry.tools.demo.workload import Chat, Turn
from kvferry.tools.words import show_seconds

INTERRUPTED = 130
TOKENS_DIFFER = 1

COUNT = {"type": click.IntRange(min=1), "metavar": "N"}
FLAG = {"is_flag": True}
FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(context_settings={"show_default": True})
@options(
    ("--conversations", COUNT | {"default": 14}, "Number of conversations."),
    ("--turns", COUNT | {"default": 5}, "Questions in each conversation."),
    ("--opening-tokens", COUNT | {"default": 320}, "Average tokens at a conversation's start."),
    ("--restart", FLAG, "Also restart a server. The new process finds its blocks on disk."),
    (
        "--servers",
        {"type": click.IntRange(2, 16), "metavar": "N", "default": None, "show_default": "off"},
        "Show a fleet instead: N processes, with one Mooncake store for all and without.",
    ),
    ("--kill", FLAG, "With --servers: kill one of them at half of the turns."),
    (
        "--html",
        {"type": FILE, "show_default": "kvferry-demo.html, with --servers kvferry-fleet.html"},
        "File of the report, one page.",
    ),
)
@click.pass_context
def demo(ctx: click.Context, /, html: Path | None, **given: Any) -> None:
    """See KV blocks leave a small device and come back.

    A small decoder on the CPU serves the same conversations three ways. One device holds them all.
    One is several times too small and computes again what it forgot. The third is as small, but
    kvferry keeps its blocks in host memory.

    The demo compares every token of all answers and shows the cost of each way. It takes about a
    minute and needs no GPU.

    The exit code is 0 if all tokens agree and 1 if they do not.
    """
    console = Console(highlight=False)
    name = "fleet" if given["servers"] else "demo"
    html = html or Path(f"kvferry-{name}.html")
    try:
        scenario = _scenario(given)
        if given["kill"] and not given["servers"]:
            raise InputError("--kill kills one of several servers: give --servers too")
        if given["servers"]:
            require_mooncake()
        if not html.parent.is_dir():
            raise InputError(f"cannot write {html}: there is no folder {html.parent}")
    except InputError as error:
        raise click.UsageError(str(error), ctx) from error
    try:
        parts = _run(scenario, given, console)
    except KeyboardInterrupt:
        console.print("Interrupted. Nothing was written.")
        ctx.exit(INTERRUPTED)
    setting = scenario.describe(scenario.short_chat if given["servers"] else scenario.chat)
    html.write_text(render(f"kvferry {name}", setting, list(parts.values())), encoding="utf-8")
    console.print(f"Report: {html}", soft_wrap=True)
    ctx.exit(0 if all(part.tokens_equal for part in parts.values()) else TOKENS_DIFFER)


def _scenario(given: dict[str, Any]) -> Scenario:
    shape = ModelShape()
    chat = Chat(
        num_conversations=given["conversations"],
        num_turns=given["turns"],
        opening_tokens=given["opening_tokens"],
        vocab=shape.vocab,
    )
    return Scenario(chat, shape)


def _run(scenario: Scenario, given: dict[str, Any], console: Console) -> dict[str, Part]:
    parts, on_turn = {}, _following(console)
    if given["servers"]:
        parts["fleet"] = run_fleet(scenario, given["servers"], kill=given["kill"], on_turn=on_turn)
    else:
        parts["ways"] = compare(scenario, on_turn)
    _show(next(iter(parts.values())), console)
    if given["restart"]:
        parts["restart"] = run_restart(scenario, on_turn)
        _show(parts["restart"], console)
    return parts


def _following(console: Console) -> OnTurn:
    """Return a callback that prints a line at every quarter of a run."""
    done = Counter[str]()

    def on_turn(title: str, num_turns: int, turn: Turn) -> None:
        before, done[title] = done[title], done[title] + 1
        if 4 * done[title] // num_turns > 4 * before // num_turns:
            wait = show_seconds(turn.first_token_seconds)
            console.print(f"{title}: {done[title]} of {num_turns} turns, first token {wait}")

    return on_turn


def _show(part: Part, console: Console) -> None:
    head, *rows = part.table()
    console.print(table(head, rows))
    style, mark = ("green", "OK") if part.tokens_equal else ("bold red", "FAILED")
    console.print(f"[{style}]{mark}[/] {part.verdict}")
    console.print(part.gain, markup=False)
