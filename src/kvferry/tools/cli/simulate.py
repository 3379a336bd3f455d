"""``kvferry simulate``: predict the hits of policies and capacities on a trace of requests."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvferry.cache.policies import policy_named
from kvferry.core.quantities import parse_count, parse_size, quoted
from kvferry.errors import ConfigError
from kvferry.settings.eviction import DEFAULT_TIER_POLICY, POLICIES, read_policy
from kvferry.sim.simulation import (
    LOAD_SECONDS,
    PREFILL_SECONDS,
    Score,
    Simulation,
    SimulationResult,
    Trial,
    simulate,
)
from kvferry.telemetry.traces import TraceReader
from kvferry.tools.cli.output import as_json_option, options, plain_console, progress, table

_MOST_BLOCKS = 1 << 30
_INTERRUPTED = 130

CapacityNames = dict[tuple[int, ...], str]
"""The capacities in blocks, host first, each as the user wrote it."""


def read_policies(text: str) -> tuple[str, ...]:
    """Policies by name or module path, each once. Raises ConfigError for an unknown name."""
    names: dict[str, None] = {}
    for part in text.split(","):
        if part.strip().lower() == "all":
            names |= dict.fromkeys(POLICIES)
        elif part.strip():
            names[read_policy("--policy", part)] = None
    if not names:
        raise ConfigError("--policy: name at least one policy")
    for name in names:
        policy_named(name)
    return tuple(names)


def read_capacities(text: str, block_bytes: int | None) -> CapacityNames:
    """Read capacities such as ``3000``, ``64GiB`` or ``3000+30000``, each as the user wrote it."""
    found: CapacityNames = {}
    for part in text.split(","):
        if part.strip():
            tiers = tuple(_blocks(each.strip(), block_bytes) for each in part.split("+"))
            found.setdefault(tiers, part.strip())
    if not found:
        raise ConfigError("--capacity: name at least one, such as 3000 or 3000+30000")
    return found


def _blocks(text: str, block_bytes: int | None) -> int:
    if text.isdigit() and text.isascii():
        return parse_count(text, name="--capacity", maximum=_MOST_BLOCKS)
    if text[-1:].lower() == "k" and text[:-1].isdigit() and text.isascii():
        return parse_count(f"{text[:-1]}000", name="--capacity", maximum=_MOST_BLOCKS)
    size = parse_size(text, name="--capacity")
    if block_bytes is None:
        raise ConfigError(
            f"--capacity: {quoted(text)} is a size: give the bytes of a token (--token-bytes), "
            "or a number of blocks"
        )
    blocks = size // block_bytes
    if not 0 < blocks <= _MOST_BLOCKS:
        raise ConfigError(
            f"--capacity: {quoted(text)} holds {blocks} blocks of {block_bytes} bytes; from 1 to "
            f"{_MOST_BLOCKS} can be simulated"
        )
    return blocks


_COUNT = {"type": click.IntRange(min=1), "metavar": "N"}
_FLAG = {"is_flag": True}


@click.command("simulate", context_settings={"show_default": True})
@click.argument(
    "traces",
    metavar="TRACE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@options(
    (
        "--policy policies",
        {"metavar": "NAMES", "default": "all"},
        f"Policies with commas: {', '.join(POLICIES)}, a module path "
        "(package.module:factory), or all.",
    ),
    (
        "--capacity capacities",
        {"metavar": "SIZES", "default": "1000,3000,10000,30000"},
        "Sizes of host memory with commas, in blocks, or as 64GiB with --token-bytes. 3000+30000 "
        "is host memory and a tier below it.",
    ),
    (
        "--token-bytes",
        {"metavar": "SIZE", "default": None},
        "Bytes of KV of a token, such as 128KiB, for capacities as sizes.",
    ),
    (
        "--block-tokens",
        _COUNT | {"default": None, "show_default": "512 for Mooncake's"},
        "Tokens of one block of the trace, if the trace does not say it.",
    ),
    (
        "--tier-write",
        {"type": click.Choice(["spill", "through"]), "default": "spill"},
        "The setting tier_write: how blocks reach the tiers below host memory.",
    ),
    (
        "--tier-policy",
        {"metavar": "NAME", "default": DEFAULT_TIER_POLICY},
        "The setting tier_policy: the policy of the tiers below host memory.",
    ),
    (
        "--hints",
        {"type": click.FloatRange(0, 1), "metavar": "SHARE", "default": 0.0},
        "Hint from the trace's future whether conversations continue, for this share of them.",
    ),
    ("--keep-partial", _FLAG, "Also store last blocks that are not full, as many papers do."),
    ("--bound/--no-bound", {"default": True}, "Also compute the all-knowing bound."),
    (
        "--jobs",
        {"type": click.IntRange(min=0), "metavar": "N", "default": 0},
        "Number of processes; 0: one for each processor.",
    ),
)
@as_json_option
@click.pass_context
def simulate_command(ctx: click.Context, /, as_json: bool, **given: Any) -> None:
    """Predict the hits of a policy or a size.

    An all-knowing policy is shown for comparison. The trace goes through the same pool and policies
    as in your engine, without bytes. TRACE is Mooncake's JSONL or kvferry's own, which a server
    writes with the setting record. It may be gzipped and in several files (docs/traces.md).

    A block hits if it is cached, and all blocks before it in its request. Lines that are no
    requests are left out, counted and named. The exit code is 1 if there is nothing to simulate.
    """
    try:
        simulation, names = _read_simulation(given)
        began = time.monotonic()
        with progress("Simulating"):
            result = simulate(simulation)
    except KeyboardInterrupt:
        ctx.exit(_INTERRUPTED)
    if as_json:
        scores, bounds = (
            [score.as_data() for score in each] for each in (result.scores, result.bounds)
        )
        click.echo(json.dumps({**asdict(result.trace), "scores": scores, "bound": bounds}))
    else:
        _print_result(result, names, time.monotonic() - began, plain_console())


def _read_simulation(given: dict[str, Any]) -> tuple[Simulation, CapacityNames]:
    """Return the simulation that the options describe, and each capacity as the user wrote it."""
    token_bytes = given["token_bytes"]
    if token_bytes is not None:
        token_bytes = parse_size(token_bytes, name="--token-bytes")
    block_tokens = TraceReader(given["traces"], block_tokens=given["block_tokens"]).block_tokens
    block_bytes = token_bytes * block_tokens if token_bytes is not None else None
    names = read_capacities(given["capacities"], block_bytes)
    tier_policy = read_policy("--tier-policy", given["tier_policy"])
    policy_named(tier_policy)  # refuses a name that cannot be found
    trials = tuple(
        Trial(policy, capacity, given["tier_write"], tier_policy)
        for capacity in names
        for policy in read_policies(given["policies"])
    )
    same = ("block_tokens", "keep_partial", "hints", "bound", "jobs")
    simulation = Simulation(
        paths=tuple(given["traces"]),
        trials=trials,
        **{name: given[name] for name in same},
    )
    return simulation, names


def _print_result(
    result: SimulationResult, names: CapacityNames, seconds: float, console: Console
) -> None:
    trace = result.trace
    console.print(
        f"{trace.num_requests:,} requests over {timedelta(seconds=round(trace.seconds))}, "
        f"{trace.num_blocks:,} blocks of {trace.block_tokens} tokens, {trace.num_tokens:,} prompt "
        "tokens.",
        markup=False,
    )
    for words in trace.complaints:
        console.print(f"left out: {words}", markup=False, style="yellow")
    if trace.num_bad:
        console.print(f"{trace.num_bad:,} lines in all were left out.", style="yellow")
    if trace.num_late:
        console.print(f"{trace.num_late:,} requests were not in the order of time.")
    num_tiers = max(len(capacity) for capacity in names)
    tiers = [f"tier {n}" for n in range(1, num_tiers)]
    heads = ["Capacity", "Policy", "Hit ratio", *tiers, "Of best", "Tokens saved", "Seconds saved"]
    rows = []
    bounds = {bound.trial.capacity[0]: bound for bound in result.bounds}
    for capacity, found in groupby(result.scores, key=lambda score: score.trial.capacity):
        bound = bounds.get(sum(capacity))
        if bound:
            rows.append([names[capacity], *_row(bound, bound, num_tiers)])
        rows += [[names[capacity], *_row(score, bound, num_tiers)] for score in found]
    console.print(table([*heads, "Evicted", "us"], rows, left=["Policy"]))
    console.print(
        "Hit ratio: share of all looked up blocks that hit. Seconds saved: prefill at "
        f"{1 / PREFILL_SECONDS:,.0f} tokens a second, less loads at {1 / LOAD_SECONDS:,.0f}. "
        f"us: processor time of a request. Took {seconds:.2f} s.",
        style="dim",
    )


def _row(score: Score, bound: Score | None, num_tiers: int) -> list[str]:
    found = [*score.hits, *[0] * num_tiers][1:num_tiers]
    row = [score.trial.policy, f"{score.hit_ratio:.4f}"]
    row += ["" if score is bound else f"{n / max(1, score.blocks):.4f}" for n in found]
    best = bound.hit_ratio if bound else 0.0
    row += [f"{score.hit_ratio / best:.0%}" if best else "", f"{score.token_ratio:.1%}"]
    row.append(f"{score.seconds_saved:,.0f}")
    micros = score.seconds / max(1, score.requests) * 1e6
    return [*row, *(("", "") if score is bound else (f"{score.evicted:,}", f"{micros:.0f}"))]
