"""``kvferry simulate``: what each policy and each size would have hit on a trace of requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvferry.cli import progress
from kvferry.cli.json_output import is_stdout, json_option, put
from kvferry.cli.room import unbroken
from kvferry.cli.simulate_options import (
    read_capacities,
    read_level_policy,
    read_point,
    read_policies,
)
from kvferry.cli.simulate_plot import drawer
from kvferry.errors import KvferryError
from kvferry.policy_kinds import DEFAULT_LEVEL_POLICY, POLICIES
from kvferry.quantities import parse_size
from kvferry.simulate import Score, Simulated, Simulation, TracePart, Trial, simulate
from kvferry.traces import TraceReader

_QUIET_SECONDS = 2.0
_INTERRUPTED = 130


@click.command("simulate", context_settings={"show_default": True})
@click.argument(
    "traces",
    metavar="TRACE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--policy",
    "policies",
    metavar="NAMES",
    default="all",
    help=f"Which policies to try, with commas: {', '.join(kind.name for kind in POLICIES)}, the "
    "module path of your own (package.module:factory), or all of ours.",
)
@click.option(
    "--capacity",
    "capacities",
    metavar="SIZES",
    default="1000,3000,10000,30000",
    help="How much host memory to try, with commas: in blocks, or as 64GiB where --token-bytes is "
    "said. 3000+30000 is host memory and a level below it, and so on.",
)
@click.option(
    "--token-bytes",
    metavar="SIZE",
    default=None,
    help="Bytes of KV that a token takes, such as 128KiB: to give capacities as sizes.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    default=None,
    help="Tokens of one block of the trace, where it does not say so itself.",
    show_default="512 for Mooncake's",
)
@click.option(
    "--level-write",
    type=click.Choice(["spill", "through"]),
    default="spill",
    help="How blocks reach the levels below host memory, as the setting of that name.",
)
@click.option(
    "--level-policy",
    metavar="NAME",
    default=DEFAULT_LEVEL_POLICY,
    help="The policy of the levels below host memory, as the setting of that name.",
)
@click.option("--from", "start", metavar="WHEN", default=None, help="Leave out what came before.")
@click.option(
    "--to",
    "end",
    metavar="WHEN",
    default=None,
    help="Leave out what came from then on. WHEN is a time from the trace's start, such as 30min, "
    "or a share of its requests, such as 50%.",
)
@click.option("--halves", is_flag=True, help="Count each half of the requests by itself, too.")
@click.option(
    "--hints",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    default=0.0,
    help="Tell the policy of this share of the conversations, from the trace's future, whether "
    "they are over or go on.",
)
@click.option("--seed", type=int, default=0, help="Which conversations are told of.")
@click.option(
    "--keep-partial",
    is_flag=True,
    help="Store the last block of a prompt though it is not full. kvferry never does; published "
    "figures often do.",
)
@click.option("--bound/--no-bound", default=True, help="Work out the all-knowing bound as well.")
@click.option("--strict", is_flag=True, help="Stop at the first line that is no request.")
@click.option(
    "--jobs",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Processes to use; 0: one for each processor.",
)
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=None,
    metavar="FILE",
    help="Draw hit ratios by capacity: a picture (.svg) or a page with tables (.html).",
)
@json_option
@click.pass_context
def simulate_command(ctx: click.Context, /, json_file: Path | None, **given: Any) -> None:
    """Say what each policy and each size would have hit on TRACE, beside an all-knowing one.

    The trace goes through the pool and the policies that serve your engine, without bytes. TRACE
    is Mooncake's JSONL or kvferry's own, which a server writes with the setting record; plain or
    gzipped, in one file or several (docs/traces.md).

    A block hits if it is there and all before it in its request are. Lines that are no requests
    are left out, counted and named. The exit code is 1 where nothing could be simulated.
    """
    console = Console(stderr=True, highlight=False) if is_stdout(json_file) else unbroken()
    plot_file = given["plot_file"]
    try:
        draw = drawer(plot_file) if plot_file is not None else None
        asked, names = _asked(given)
        began = time.monotonic()
        simulated = simulate(asked, _show(began))
    except KvferryError as error:
        progress.show("")
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        progress.show("")
        ctx.exit(_INTERRUPTED)
    progress.show("")
    seconds = time.monotonic() - began
    data = as_data(asked, simulated, names, seconds)
    put(data, json_file)
    _tell(data, simulated, names, console)
    if draw is not None:
        plot_file.write_text(draw(data), encoding="utf-8")
        console.print(f"Wrote {plot_file}", markup=False)


def _asked(given: dict[str, Any]) -> tuple[Simulation, dict[tuple[int, ...], str]]:
    """What the options ask for, and each capacity as it was given."""
    token_bytes = given["token_bytes"]
    if token_bytes is not None:
        token_bytes = parse_size(token_bytes, name="--token-bytes")
    block_tokens = TraceReader(given["traces"], block_tokens=given["block_tokens"]).block_tokens
    block_bytes = token_bytes * block_tokens if token_bytes is not None else None
    names = read_capacities(given["capacities"], block_bytes)
    start_share, start_seconds = read_point("--from", given["start"], 0.0, 0.0)
    end_share, end_seconds = read_point("--to", given["end"], 1.0, float("inf"))
    level_policy = read_level_policy(given["level_policy"])
    trials = tuple(
        Trial(policy, capacity, given["level_write"], level_policy)
        for capacity in names
        for policy in read_policies(given["policies"])
    )
    asked = Simulation(
        paths=tuple(given["traces"]),
        trials=trials,
        block_tokens=given["block_tokens"],
        strict=given["strict"],
        keep_partial=given["keep_partial"],
        hints=given["hints"],
        seed=given["seed"],
        span=TracePart(start_share, end_share, start_seconds, end_seconds),
        halves=given["halves"],
        bound=given["bound"],
        jobs=given["jobs"],
    )
    return asked, names


def _show(began: float) -> Callable[[float], None]:
    told = [began]

    def show(share: float) -> None:
        now = time.monotonic()
        passed = now - began
        often = _QUIET_SECONDS / 10 if sys.stderr.isatty() else 5 * _QUIET_SECONDS
        if passed > _QUIET_SECONDS and now - told[0] >= often:
            told[0] = now
            left = passed / share - passed if share > 0.01 else None
            more = f", about {left:.0f} s more" if left is not None else ""
            progress.show(f"simulated {share:.0%}{more}")

    return show


def as_data(
    asked: Simulation, simulated: Simulated, names: dict[tuple[int, ...], str], seconds: float
) -> dict[str, Any]:
    """All figures, as ``--json`` gives them."""
    trace = simulated.trace
    bounds = {score.trial.capacity[0]: score for score in simulated.bounds}
    scores = []
    for score in simulated.scores:
        bound = bounds.get(sum(score.trial.capacity))
        scores.append(
            {
                "capacity": names[score.trial.capacity],
                **score.as_data(),
                "bound_hit_ratio": round(bound.whole.hit_ratio, 5) if bound else None,
            }
        )
    return {
        "trace": [str(path) for path in asked.paths],
        "format": trace.format,
        "block_tokens": trace.block_tokens,
        "requests": trace.num_requests,
        "blocks": trace.num_blocks,
        "tokens": trace.num_tokens,
        "trace_seconds": round(trace.seconds, 3),
        "skipped_lines": trace.num_bad,
        "complaints": list(trace.complaints),
        "out_of_order": trace.num_late,
        "keep_partial": asked.keep_partial,
        "hints": asked.hints,
        "seconds": round(seconds, 2),
        "scores": scores,
        "bound": [score.as_data() for score in simulated.bounds],
    }


def _tell(
    data: dict[str, Any],
    simulated: Simulated,
    names: dict[tuple[int, ...], str],
    console: Console,
) -> None:
    trace = simulated.trace
    console.print(
        f"{trace.num_requests:,} requests over {_time(trace.seconds)}, {trace.num_blocks:,} blocks "
        f"of {trace.block_tokens} tokens, {trace.num_tokens:,} prompt tokens.",
        markup=False,
    )
    for words in trace.complaints:
        console.print(f"left out: {words}", markup=False, style="yellow")
    if trace.num_bad:
        console.print(f"{trace.num_bad:,} lines in all were left out.", style="yellow")
    if trace.num_late:
        console.print(f"{trace.num_late:,} requests were not in the order of time.")
    halves = bool(simulated.scores[0].parts)
    levels = max(len(score.trial.capacity) for score in simulated.scores)
    console.print(_table(simulated, names, halves=halves, levels=levels))
    console.print(
        "Hit ratio: blocks found, and all before them in their request, of all asked for. us: "
        f"processor time a request took. Took {data['seconds']:g} s.",
        style="dim",
    )


def _table(
    simulated: Simulated, names: dict[tuple[int, ...], str], *, halves: bool, levels: int
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("Capacity", no_wrap=True)
    table.add_column("Policy", no_wrap=True)
    columns = ["Hit ratio"]
    columns += ["1st half", "2nd half"] if halves else []
    columns += [f"level {at}" for at in range(1, levels)]
    columns += ["Of best", "Tokens saved", "Evicted", "us"]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    bounds = {score.trial.capacity[0]: score for score in simulated.bounds}
    shown: set[tuple[int, ...]] = set()
    for score in simulated.scores:
        capacity = score.trial.capacity
        bound = bounds.get(sum(capacity))
        if bound is not None and capacity not in shown:
            table.add_row(
                names[capacity],
                "all-knowing",
                *_row(bound, bound, halves, levels, False),
                style="dim",
            )
        table.add_row(
            "" if capacity in shown or bound is not None else names[capacity],
            score.trial.policy,
            *_row(score, bound, halves, levels, True),
        )
        shown.add(capacity)
    return table


def _row(score: Score, bound: Score | None, halves: bool, levels: int, real: bool) -> list[str]:
    whole = score.whole
    row = [f"{whole.hit_ratio:.4f}"]
    row += [f"{part.hit_ratio:.4f}" for part in score.parts.values()] if halves else []
    for level in range(1, levels):
        found = whole.hits[level] if level < len(whole.hits) else 0
        row.append(f"{found / whole.blocks:.4f}" if real and whole.blocks else "")
    best = bound.whole.hit_ratio if bound is not None else 0.0
    row.append(f"{whole.hit_ratio / best:.0%}" if real and best else "")
    row.append(f"{whole.token_ratio:.1%}")
    row.append(f"{score.evicted:,}" if real else "")
    row.append(f"{score.seconds / max(1, whole.requests) * 1e6:.0f}" if real else "")
    return row


def _time(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
