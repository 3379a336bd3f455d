"""``kvferry demo``: see KV blocks leave a device that is too small, come back, and save time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvferry.core.quantities import parse_size
from kvferry.errors import ConfigError, InputError, KvferryError
from kvferry.settings.tiers import TierSpec, read_tiers, show_tiers
from kvferry.tiers.contract import TierSetup
from kvferry.tiers.opening import open_tier
from kvferry.tools.cli.output import is_stdout, json_option, put
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.compare import (
    Answers,
    Comparison,
    Figures,
    ReturningChat,
    Scenario,
    ServingWay,
    Turn,
    compare,
    run,
)
from kvferry.tools.demo.fleet import FleetResult, run_fleet
from kvferry.tools.demo.model import Decoder, ModelShape, limit_matrix_threads
from kvferry.tools.demo.mooncake_master import require_mooncake
from kvferry.tools.demo.policies import PoliciesResult, PolicyTrial, run_policies
from kvferry.tools.demo.report import (
    FLEET_ROWS,
    LIVES,
    NAMES,
    POLICIES_ROWS,
    RESTART_ROWS,
    ROWS,
    WAYS,
    fleet_columns,
    fleet_gain,
    fleet_section,
    fleet_verdict,
    gain,
    policies_columns,
    policies_gain,
    policies_section,
    policies_verdict,
    render,
    restart_columns,
    restart_gain,
    restart_section,
    restart_verdict,
    show_seconds,
    verdict,
)
from kvferry.tools.demo.restart import Restart, run_restart
from kvferry.tools.demo.workload import Chat
from kvferry.tools.top.words import show_bytes

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


# ------------------------------------------------------------------------------------------------
# What ``kvferry demo`` says in a terminal: a table for each of its parts, and what it shows.

Shown = TypeVar("Shown")


def show_comparison(result: Comparison, console: Console) -> None:
    columns = [(NAMES[way], figures) for way, figures in result.figures.items()]
    _put_table(columns, ROWS, console, list(result.figures).index(ServingWay.KVFERRY))
    _put_words(result, verdict(result), console)
    console.print(gain(result), highlight=False)
    if result.setting.tiers:
        ferried = result.figures[ServingWay.KVFERRY]
        console.print(
            f"Below host memory ({show_tiers(result.setting.tiers)}): "
            f"{show_bytes(ferried.spilled_bytes)} went down, "
            f"{show_bytes(ferried.promoted_bytes)} came back.",
            highlight=False,
        )


def show_restart(again: Restart, console: Console) -> None:
    _put_table(restart_columns(again), RESTART_ROWS, console)
    _put_words(again, restart_verdict(again), console)
    console.print(restart_gain(again), highlight=False)


def show_policies(kept: PoliciesResult, console: Console) -> None:
    columns = policies_columns(kept)
    _put_table(columns, POLICIES_ROWS, console, len(columns) - 1)
    _put_words(kept, policies_verdict(kept), console)
    console.print(policies_gain(kept), highlight=False)


def show_fleet(fleet: FleetResult, console: Console) -> None:
    _put_table(fleet_columns(fleet), FLEET_ROWS, console)
    _put_words(fleet, fleet_verdict(fleet), console)
    console.print(fleet_gain(fleet), highlight=False)


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


# ------------------------------------------------------------------------------------------------
# ``kvferry demo``: see KV blocks leave a device that is too small, come back, and save time.

INTERRUPTED = 130
TOKENS_DIFFER = 1


def _read_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    try:
        return parse_size(value, name="a size")
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _read_tiers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[TierSpec, ...]:
    try:
        return read_tiers("tiers", value)
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
    "--tiers",
    metavar="TIERS",
    callback=_read_tiers,
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
    "--policies",
    is_flag=True,
    help="Then also compare eviction policies (lru and returns): hundreds of short conversations "
    "that return after minutes or never, as in a chat service, and host memory for few of them. "
    "Has sizes of its own, and a service's clock: nobody waits for the minutes.",
)
@click.option(
    "--servers",
    type=click.IntRange(min=2, max=16),
    metavar="N",
    default=None,
    help="Then also serve with so many servers, each a process, and every turn by any of them: "
    "with one Mooncake store for all, which is started for it, and each for itself.",
    show_default="off",
)
@click.option(
    "--kill",
    is_flag=True,
    help="With --servers: kill one of them at half of the turns, in the midst of one.",
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
    tiers: tuple[TierSpec, ...],
    restart: bool,
    policies: bool,
    servers: int | None,
    kill: bool,
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
    stopped, with what the first one left on disk; with --policies, what it changes which blocks
    host memory keeps; with --servers, how much less several servers compute that share what they
    have computed.

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
            tiers=tiers,
        )
        _require_runnable(setting, servers, kill)
    except (InputError, ConfigError) as error:
        raise click.UsageError(str(error), ctx) from error
    _require_folder(html, None if is_stdout(json_file) else json_file)
    with _interruptible(ctx, console):
        result = _run_all(setting, console)
        also = _run_also(setting, restart, policies, servers, kill, console)
    _write(result, also, html, json_file, console)
    ctx.exit(0 if result.tokens_equal and also.tokens_equal else TOKENS_DIFFER)


@dataclass
class _Also:
    """What was asked for besides the comparison, as far as it was."""

    restart: Restart | None = None
    policies: PoliciesResult | None = None
    fleet: FleetResult | None = None

    @property
    def tokens_equal(self) -> bool:
        every = (self.restart, self.policies, self.fleet)
        return all(each.tokens_equal for each in every if each is not None)

    def sections(self) -> str:
        """Of the report, in the order in which they were shown."""
        sections = restart_section(self.restart) if self.restart else ""
        sections += policies_section(self.policies) if self.policies else ""
        return sections + (fleet_section(self.fleet) if self.fleet else "")

    def to_dict(self) -> dict[str, Any]:
        told = {"restart": self.restart, "policies": self.policies, "fleet": self.fleet}
        return {name: each.to_dict() for name, each in told.items() if each is not None}


@contextmanager
def _interruptible(ctx: click.Context, console: Console) -> Iterator[None]:
    """What stops it half-way is said in a sentence."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("Interrupted. Nothing was written.")
        ctx.exit(INTERRUPTED)
    except KvferryError as error:
        raise click.ClickException(str(error)) from error


def _require_runnable(setting: Scenario, servers: int | None, kill: bool) -> None:
    """Before a minute's work, not after it."""
    if setting.host_bytes < setting.block_bytes:
        raise InputError(
            f"--host {setting.host_bytes} bytes holds not even one block of "
            f"{setting.block_bytes} bytes"
        )
    for tier in setting.tiers:
        open_tier(tier, TierSetup(tier.name, setting.block_bytes, options=tier.options)).close()
    if kill and servers is None:
        raise InputError("--kill kills one of several servers: give --servers too")
    if servers is not None:
        require_mooncake()


def _default_device_blocks(chat: Chat, block_tokens: int = 16) -> int:
    longest = -(-chat.longest // block_tokens)
    return max(longest, chat.num_blocks(block_tokens) // 4)


def _require_folder(*files: Path | None) -> None:
    """A minute's work must not be lost because its report has no place to go."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise click.UsageError(f"cannot write {file}: there is no folder {file.parent}")


def _run_all(setting: Scenario, console: Console) -> Comparison:
    """The three ways, shown beside each other."""
    limit_matrix_threads(1)
    chat = setting.chat
    console.print(
        f"{chat.num_conversations} conversations of {chat.num_turns} turns need "
        f"{setting.working_set} KV blocks; the small device has {setting.device_blocks}.",
        highlight=False,
    )
    decoder = Decoder(setting.shape)
    results: dict[ServingWay, tuple[Figures, Answers]] = {}
    with following(console, chat.num_conversations * chat.num_turns) as follow:
        for way in ServingWay:
            results[way] = run(setting, way, decoder, follow(way))
    result = compare(setting, results)
    show_comparison(result, console)
    return result


def _run_also(
    setting: Scenario,
    restart: bool,
    policies: bool,
    servers: int | None,
    kill: bool,
    console: Console,
) -> _Also:
    """Each is shown as soon as it is there."""
    also = _Also()
    if restart:
        also.restart = run_restart(setting, LifeProgress(console))
        show_restart(also.restart, console)
    if policies:
        trial = PolicyTrial(ReturningChat(seed=setting.chat.seed))
        also.policies = run_policies(trial, PolicyProgress(console))
        show_policies(also.policies, console)
    if servers is not None:
        also.fleet = run_fleet(setting, servers, kill=kill, on_turn=FleetProgress(console))
        show_fleet(also.fleet, console)
    return also


def _write(
    result: Comparison, also: _Also, html: Path, json_file: Path | None, console: Console
) -> None:
    html.write_text(render(result, also.sections()), encoding="utf-8")
    console.print(f"Report: {html}", highlight=False, soft_wrap=True)
    put(result.to_dict() | also.to_dict(), json_file)
    if json_file is not None and not is_stdout(json_file):
        console.print(f"Figures: {json_file}", highlight=False, soft_wrap=True)
