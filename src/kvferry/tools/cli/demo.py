"""``kvferry demo``: KV blocks leave a device that is too small, come back, and save time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.core.quantities import parse_size
from kvferry.errors import ConfigError, InputError
from kvferry.settings.tiers import read_tiers
from kvferry.tiers.contract import TierSetup
from kvferry.tiers.movers import open_tier
from kvferry.tools.cli.output import Rows, is_stdout, json_option, options, put
from kvferry.tools.demo.blocks import Turn
from kvferry.tools.demo.model import BLOCK_TOKENS, ModelShape, limit_matrix_threads
from kvferry.tools.demo.mooncake_master import require_mooncake
from kvferry.tools.demo.parts import Scenario, compare, run_fleet, run_restart
from kvferry.tools.demo.report import OnTurn, Part, render
from kvferry.tools.demo.workload import Chat
from kvferry.tools.words import show_seconds

INTERRUPTED = 130
TOKENS_DIFFER = 1

COUNT = {"type": click.IntRange(min=1), "metavar": "N"}
FLAG = {"is_flag": True}
OFF = {"default": None, "show_default": "off"}
FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(context_settings={"show_default": True})
@options(
    ("--conversations", COUNT | {"default": 14}, "Number of conversations."),
    ("--turns", COUNT | {"default": 5}, "Questions in each conversation."),
    ("--users", COUNT | {"default": 3}, "Turns at a time. More users need more device blocks."),
    ("--opening-tokens", COUNT | {"default": 320}, "Average tokens at a conversation's start."),
    ("--question-tokens", COUNT | {"default": 40}, "Average tokens of a question."),
    ("--answer-tokens", COUNT | {"default": 16}, "Average tokens of an answer."),
    (
        "--device-blocks",
        COUNT | {"default": None, "show_default": "a quarter of what all conversations need"},
        "KV blocks of the small device, 16 tokens each.",
    ),
    ("--host", {"metavar": "SIZE", "default": "256MiB"}, "Host memory for kvferry's blocks."),
    (
        "--tiers",
        {"metavar": "TIERS", "default": None, "show_default": "none"},
        "Tiers below host memory, such as memory:64MiB. A small --host shows them at work.",
    ),
    ("--restart", FLAG, "Also restart a server. The new process finds its blocks on disk."),
    (
        "--servers",
        {"type": click.IntRange(2, 16), "metavar": "N"} | OFF,
        "Show a fleet instead: N processes, with one Mooncake store for all and without.",
    ),
    ("--kill", FLAG, "With --servers: kill one of them at half of the turns."),
    ("--window", COUNT | OFF, "Give every second layer a sliding window of N tokens."),
    (
        "--seed",
        {"type": click.IntRange(min=0), "metavar": "N", "default": 0},
        "Seed of the weights and the conversations.",
    ),
    (
        "--html",
        {"type": FILE, "show_default": "kvferry-demo.html, with --servers kvferry-fleet.html"},
        "File of the report, one page.",
    ),
)
@json_option
@click.pass_context
def demo(ctx: click.Context, /, html: Path | None, json_file: Path | None, **given: Any) -> None:
    """See KV blocks leave a small device and come back.

    A small decoder on the CPU serves the same conversations three ways. One device holds them all.
    One is several times too small and computes again what it forgot. The third is as small, but
    kvferry keeps its blocks in host memory.

    The demo compares every token of all answers and shows the cost of each way. It takes about a
    minute and needs no GPU.

    The exit code is 0 if all tokens agree and 1 if they do not.
    """
    console = Console(stderr=is_stdout(json_file), highlight=False)
    try:
        scenario = _scenario(given)
        _require_runnable(scenario, given["servers"], given["kill"])
    except (InputError, ConfigError) as error:
        raise click.UsageError(str(error), ctx) from error
    name = "fleet" if given["servers"] else "demo"
    html = html or Path(f"kvferry-{name}.html")
    for file in (html, json_file):
        if file is not None and not file.parent.is_dir():
            raise click.UsageError(f"cannot write {file}: there is no folder {file.parent}")
    try:
        parts = _run(scenario, given, console)
    except KeyboardInterrupt:
        console.print("Interrupted. Nothing was written.")
        ctx.exit(INTERRUPTED)
    setting = scenario.describe(is_fleet=bool(given["servers"]))
    page = render(f"kvferry {name}", setting, list(parts.values()))
    html.write_text(page, encoding="utf-8")
    console.print(f"Report: {html}", soft_wrap=True)
    figures = {name: part.to_dict() for name, part in parts.items()}
    put({"setting": scenario.to_dict(), **figures}, json_file)
    if json_file is not None and not is_stdout(json_file):
        console.print(f"Figures: {json_file}", soft_wrap=True)
    ctx.exit(0 if all(part.tokens_equal for part in parts.values()) else TOKENS_DIFFER)


def _scenario(given: dict[str, Any]) -> Scenario:
    window = given["window"]
    shape = ModelShape(windows=(None, window) * 3 if window else (), seed=given["seed"])
    chat = Chat(
        num_conversations=given["conversations"],
        num_turns=given["turns"],
        opening_tokens=given["opening_tokens"],
        question_tokens=given["question_tokens"],
        answer_tokens=given["answer_tokens"],
        num_users=given["users"],
        vocab=shape.vocab,
        seed=given["seed"],
    )
    a_quarter = max(-(-chat.longest // BLOCK_TOKENS), chat.num_blocks(BLOCK_TOKENS) // 4)
    return Scenario(
        chat=chat,
        shape=shape,
        device_blocks=given["device_blocks"] or a_quarter,
        host_bytes=parse_size(given["host"], name="--host"),
        tiers=read_tiers("tiers", given["tiers"]),
    )


def _require_runnable(scenario: Scenario, servers: int | None, kill: bool) -> None:
    """Refuse what cannot run before a minute's work."""
    for tier in scenario.tiers:
        open_tier(tier, TierSetup(tier.name, scenario.block_bytes, options=tier.options)).close()
    if kill and servers is None:
        raise InputError("--kill kills one of several servers: give --servers too")
    if servers is not None:
        require_mooncake()


def _run(scenario: Scenario, given: dict[str, Any], console: Console) -> dict[str, Part]:
    """Run every part and show each as soon as it is done."""
    limit_matrix_threads(1)
    parts = {}
    if given["servers"] is not None:
        with _following(console) as on_turn:
            parts["fleet"] = run_fleet(
                scenario, given["servers"], kill=given["kill"], on_turn=on_turn
            )
        _show(parts["fleet"], console)
    else:
        console.print(
            f"{scenario.chat.num_conversations} conversations of {scenario.chat.num_turns} turns "
            f"need {scenario.working_set} KV blocks. The small device has "
            f"{scenario.device_blocks}."
        )
        with _following(console) as on_turn:
            parts["ways"] = compare(scenario, on_turn)
        _show(parts["ways"], console)
    if given["restart"]:
        with _following(console) as on_turn:
            parts["restart"] = run_restart(scenario, on_turn)
        _show(parts["restart"], console)
    return parts


@contextmanager
def _following(console: Console) -> Iterator[OnTurn]:
    """Show the progress of each run: a bar on a terminal, else a line for every quarter."""
    done: dict[str, int] = {}
    if not console.is_terminal:

        def print_quarters(title: str, num_turns: int, turn: Turn) -> None:
            before, done[title] = done.get(title, 0), done.get(title, 0) + 1
            if 4 * done[title] // num_turns > 4 * before // num_turns:
                wait = show_seconds(turn.first_token_seconds)
                console.print(f"{title}: {done[title]} of {num_turns} turns, first token {wait}")

        yield print_quarters
        return
    last = TextColumn("turns[dim], first token {task.fields[last]}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), last)
    with Progress(TextColumn("{task.description:<24}"), *columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def advance(title: str, num_turns: int, turn: Turn) -> None:
            if title not in tasks:
                tasks[title] = bars.add_task(title, total=num_turns, last="")
            bars.update(tasks[title], advance=1, last=show_seconds(turn.first_token_seconds))

        yield advance


def _show(part: Part, console: Console) -> None:
    head, *rows = part.table()
    console.print(Rows(head, rows))
    style, mark = ("green", "OK") if part.tokens_equal else ("bold red", "FAILED")
    console.print(f"[{style}]{mark}[/] {part.verdict}")
    console.print(part.gain, markup=False)
