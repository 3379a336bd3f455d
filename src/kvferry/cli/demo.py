"""``kvferry demo``: see KV blocks leave a device that is too small, come back, and save time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvferry.cli.json_output import is_stdout, json_option, put
from kvferry.cli.report import NAMES, ROWS, gain, render, show_seconds, verdict
from kvferry.cli.restart_report import (
    LIVES,
    columns,
    restart_gain,
    restart_section,
    restart_verdict,
)
from kvferry.cli.restart_report import ROWS as RESTART_ROWS
from kvferry.errors import ConfigError, InputError, KvferryError
from kvferry.level_kinds import LevelSpec, read_levels, show_levels
from kvferry.playground.compare import (
    Answers,
    Comparison,
    Figures,
    Scenario,
    ServingWay,
    Turn,
    compare,
    run,
)
from kvferry.playground.model import Decoder, ModelShape
from kvferry.playground.request import ServedRequest
from kvferry.playground.restart import Restart, run_restart
from kvferry.playground.threads import limit_matrix_threads
from kvferry.playground.workload import Chat
from kvferry.quantities import parse_size
from kvferry.tiers import TierSetup, open_tier
from kvferry.watch.words import show_bytes

INTERRUPTED = 130
TOKENS_DIFFER = 1


def _read_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    try:
        return parse_size(value, name="a size")
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _read_levels(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[LevelSpec, ...]:
    try:
        return read_levels("levels", value)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


COUNT = click.IntRange(min=1)
FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(context_settings={"show_default": True})
@click.option("--conversations", type=COUNT, metavar="N", default=14, help="How many people chat.")
@click.option("--turns", type=COUNT, metavar="N", default=5, help="Questions in each conversation.")
@click.option(
    "--users",
    type=COUNT,
    metavar="N",
    default=3,
    help="Turns answered at a time. More users fight harder for the device's blocks.",
)
@click.option(
    "--opening-tokens",
    type=COUNT,
    metavar="N",
    default=320,
    help="Text a conversation opens with, about.",
)
@click.option(
    "--question-tokens",
    type=COUNT,
    metavar="N",
    default=40,
    help="Tokens each question adds, about.",
)
@click.option(
    "--answer-tokens", type=COUNT, metavar="N", default=16, help="Tokens of each answer, about."
)
@click.option(
    "--device-blocks",
    type=COUNT,
    metavar="N",
    default=None,
    help="KV blocks of the small device, 16 tokens each. A block is forgotten when another one "
    "needs its place.",
    show_default="a quarter of what all conversations need",
)
@click.option(
    "--host",
    metavar="SIZE",
    callback=_read_size,
    default="256MiB",
    help="Host memory in which kvferry keeps blocks. Too little, and it must forget as well.",
)
@click.option(
    "--levels",
    metavar="LEVELS",
    callback=_read_levels,
    default=None,
    help="What lies below host memory, such as memory:64MiB: it takes what host memory must "
    "forget. Give a small --host to see it at work.",
    show_default="none",
)
@click.option(
    "--restart",
    is_flag=True,
    help="Then also stop the server and start it again, as processes of their own with a disk "
    "(a temporary directory) below host memory: its first turns are found there.",
)
@click.option(
    "--window",
    type=COUNT,
    metavar="N",
    default=None,
    help="Give every second layer a sliding window of so many tokens: it needs only the last "
    "blocks of a conversation, so far less is loaded.",
    show_default="off",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Other weights and conversations.",
)
@click.option(
    "--html",
    type=FILE,
    default="kvferry-demo.html",
    help="Where to write the report: one page with plots that needs no network.",
)
@json_option
@click.pass_context
def demo(
    ctx: click.Context,
    conversations: int,
    turns: int,
    users: int,
    opening_tokens: int,
    question_tokens: int,
    answer_tokens: int,
    device_blocks: int | None,
    host: int,
    levels: tuple[LevelSpec, ...],
    restart: bool,
    window: int | None,
    seed: int,
    html: Path,
    json_file: Path | None,
) -> None:
    """See KV blocks leave a small device and come back.

    Serves the same multi-turn conversations three ways with a small paged decoder on the CPU: on a
    device that holds them all, on one that is several times too small, and on the small one with
    kvferry, which keeps in host memory what the device must forget. Then it proves that all three
    gave the same tokens and shows what each of them cost. Takes less than a minute, needs no GPU.
    With --restart it also shows a server that stops, and a new process that goes on where it
    stopped, with what the first one left on disk.

    The exit code is 0 when all tokens agree and 1 when they do not.
    """
    console = Console(stderr=is_stdout(json_file))
    try:
        shape = ModelShape(windows=(None, window) * 3 if window else (), seed=seed)
        chat = Chat(
            num_conversations=conversations,
            num_turns=turns,
            opening_tokens=opening_tokens,
            question_tokens=question_tokens,
            answer_tokens=answer_tokens,
            num_users=users,
            vocab=shape.vocab,
            seed=seed,
        )
        setting = Scenario(
            chat=chat,
            shape=shape,
            device_blocks=device_blocks or _default_device_blocks(chat),
            host_bytes=host,
            levels=levels,
        )
        if host < setting.block_bytes:
            raise InputError(
                f"--host {host} bytes holds not even one block of {setting.block_bytes} bytes"
            )
        for level in levels:  # before a minute's work, not after it
            open_tier(
                level, TierSetup(level.name, setting.block_bytes, options=level.options)
            ).close()
    except (InputError, ConfigError) as error:
        raise click.UsageError(str(error), ctx) from error
    _require_folder(html, None if is_stdout(json_file) else json_file)
    again: Restart | None = None
    try:
        result = _run_all(setting, console)
        _show(result, console)
        if restart:
            again = run_restart(setting, _LifeProgress(console))
            _show_restart(again, console)
    except KeyboardInterrupt:
        console.print("Interrupted. Nothing was written.")
        ctx.exit(INTERRUPTED)
    except KvferryError as error:
        raise click.ClickException(str(error)) from error
    html.write_text(render(result, restart_section(again) if again else ""), encoding="utf-8")
    console.print(f"Report: {html}", highlight=False, soft_wrap=True)
    put(result.to_dict() | ({"restart": again.to_dict()} if again else {}), json_file)
    if json_file is not None and not is_stdout(json_file):
        console.print(f"Figures: {json_file}", highlight=False, soft_wrap=True)
    if not (result.tokens_equal and (again is None or again.tokens_equal)):
        ctx.exit(TOKENS_DIFFER)


def _default_device_blocks(chat: Chat, block_tokens: int = 16) -> int:
    longest = -(-chat.longest // block_tokens)
    return max(longest, chat.num_blocks(block_tokens) // 4)


def _require_folder(*files: Path | None) -> None:
    """A minute's work must not be lost because its report has no place to go."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise click.UsageError(f"cannot write {file}: there is no folder {file.parent}")


def _run_all(setting: Scenario, console: Console) -> Comparison:
    limit_matrix_threads(1)
    chat = setting.chat
    console.print(
        f"{chat.num_conversations} conversations of {chat.num_turns} turns need "
        f"{setting.working_set} KV blocks; the small device has {setting.device_blocks}.",
        highlight=False,
    )
    decoder = Decoder(setting.shape)
    results: dict[ServingWay, tuple[Figures, Answers]] = {}
    with _progress(console, chat.num_conversations * chat.num_turns) as follow:
        for way in ServingWay:
            results[way] = run(setting, way, decoder, follow(way))
    return compare(setting, results)


Follow = Callable[[ServingWay], Callable[[ServedRequest], None]]
"""Begins to show one way's progress; the answer is told of every finished turn."""


@contextmanager
def _progress(console: Console, num_turns: int) -> Iterator[Follow]:
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


class _LifeProgress:
    """A line for every process, once it has answered its first turn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._life = ""

    def __call__(self, life: str, turn: Turn) -> None:
        if life != self._life:
            self._life = life
            wait = show_seconds(turn.first_token_seconds)
            self._console.print(f"{LIVES[life]}: first token {wait}", highlight=False)


def _show_restart(again: Restart, console: Console) -> None:
    table = Table(title=None, header_style="bold")
    table.add_column("")
    lives = columns(again)
    for name, life in lives:
        widest = max(len(show(life)) for _, show in RESTART_ROWS)
        style = "cyan" if life is again.warm else None
        table.add_column(name, justify="right", style=style, min_width=widest)
    for name, show in RESTART_ROWS:
        table.add_row(name, *(show(life) for _, life in lives))
    console.print(table)
    style, mark = ("green", "OK") if again.tokens_equal else ("bold red", "FAILED")
    console.print(f"[{style}]{mark}[/] {restart_verdict(again)}", highlight=False)
    console.print(restart_gain(again), highlight=False)


def _wait(request: ServedRequest) -> str:
    assert request.first_token_at is not None
    return show_seconds(request.first_token_at - request.arrival)


def _show(result: Comparison, console: Console) -> None:
    table = Table(title=None, header_style="bold")
    table.add_column("")
    for way, figures in result.figures.items():
        widest = max(len(show(figures)) for _, show in ROWS)  # words may be broken, numbers not
        style = "cyan" if way is ServingWay.KVFERRY else None
        table.add_column(NAMES[way], justify="right", style=style, min_width=widest)
    for name, show in ROWS:
        table.add_row(name, *(show(figures) for figures in result.figures.values()))
    console.print(table)
    style, mark = ("green", "OK") if result.tokens_equal else ("bold red", "FAILED")
    console.print(f"[{style}]{mark}[/] {verdict(result)}", highlight=False)
    console.print(gain(result), highlight=False)
    if result.setting.levels:
        ferried = result.figures[ServingWay.KVFERRY]
        console.print(
            f"Below host memory ({show_levels(result.setting.levels)}): "
            f"{show_bytes(ferried.spilled_bytes)} went down, "
            f"{show_bytes(ferried.promoted_bytes)} came back.",
            highlight=False,
        )
