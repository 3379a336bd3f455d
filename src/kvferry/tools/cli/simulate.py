"""``kvferry simulate``: the hits of each policy and each size on a trace of requests."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvferry.cache.policies import policy_named
from kvferry.core.quantities import parse_count, parse_seconds, parse_size, quoted
from kvferry.errors import ConfigError
from kvferry.settings.eviction import DEFAULT_TIER_POLICY, POLICIES, read_policy
from kvferry.sim.simulation import (
    ALL_KNOWING,
    LOAD_SECONDS,
    PREFILL_SECONDS,
    Simulated,
    Simulation,
    TracePart,
    Trial,
    simulate,
)
from kvferry.telemetry.traces import TraceReader
from kvferry.tools import plots
from kvferry.tools.cli.output import (
    grid,
    is_stdout,
    json_option,
    options,
    progress,
    put,
    unbroken,
)
from kvferry.tools.words import clip

_MOST_BLOCKS = 1 << 30
_MOST_TRIALS = 1000
_INTERRUPTED = 130

Rows = list[list[str]]
Names = dict[tuple[int, ...], str]
"""The capacities in blocks, host first, each as the user wrote it."""


def read_policies(text: str) -> tuple[str, ...]:
    """Policies by name or module path, each once. Raises ConfigError for an unknown name."""
    names: dict[str, None] = {}
    for part in text.split(","):
        if part.strip().lower() == "all":
            names |= dict.fromkeys(kind.name for kind in POLICIES)
        elif part.strip():
            names[read_policy("--policy", part)] = None
    if not names:
        raise ConfigError("--policy: name at least one policy")
    for name in names:
        policy_named(name)
    return tuple(names)


def read_capacities(text: str, block_bytes: int | None) -> Names:
    """Read capacities such as ``3000``, ``64GiB`` or ``3000+30000``."""
    found: Names = {}
    for part in text.split(","):
        if part.strip():
            tiers = tuple(_blocks(each.strip(), block_bytes) for each in part.split("+"))
            found.setdefault(tiers, part.strip())
    if not found:
        raise ConfigError("--capacity: name at least one, such as 3000 or 3000+30000")
    if len(found) > _MOST_TRIALS:
        raise ConfigError(f"--capacity: at most {_MOST_TRIALS}, got {len(found)}")
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


def read_point(name: str, text: str | None, share: float, seconds: float) -> tuple[float, float]:
    """Read a point of a trace. Returns it as share of the requests and as seconds."""
    if text is None:
        return share, seconds
    if text.strip().endswith("%"):
        try:
            percent = float(text.strip()[:-1])
        except ValueError:
            percent = -1.0
        if not 0 <= percent <= 100:
            raise ConfigError(f"{name}: expected 0% to 100%, got {quoted(text)}")
        return percent / 100, seconds
    if text.strip() in ("0", "0s"):
        return share, 0.0
    return share, parse_seconds(text, name=name)


def _require_drawable(file: Path) -> None:
    if file.suffix.lower() not in (".svg", ".html", ".htm"):
        raise ConfigError(
            f"--plot: {quoted(file.name)} must end in .svg, for a picture, or "
            ".html, for a page with tables"
        )


def _draw(file: Path, data: dict[str, Any], rows: Rows) -> str:
    """A picture, or a page with the picture and all figures."""
    labels = {_place(score): score["capacity"] for score in data["scores"]}
    series: dict[str, list[plots.Point]] = {}
    for score in sorted([*data["bound"], *data["scores"]], key=_place):
        series.setdefault(score["policy"], []).append((_place(score), score["hit_ratio"]))
    bound = series.pop(ALL_KNOWING, None)
    colours = cycle([colour for colour in plots.COLOURS if colour != "--grey"])
    lines = [plots.Series(ALL_KNOWING, "--grey", bound, wide=True)] if bound else []
    lines += [plots.Series(name, next(colours), points) for name, points in series.items()]
    plot = plots.line_plot(
        lines,
        x_label="capacity in blocks, on a logarithmic scale",
        y_label="hit ratio",
        show_y="{:.2f}".format,
        show_x=lambda x: clip(labels.get(x, ""), 12),
        x_ticks=sorted(labels),
    )
    if file.suffix.lower() == ".svg":
        return plots.picture(plot, lines)
    title = f"kvferry simulate: {', '.join(path.rsplit('/', 1)[-1] for path in data['trace'])}"
    words = (
        f"{data['requests']:,} requests, {data['blocks']:,} blocks of {data['block_tokens']} "
        f"tokens, {data['tokens']:,} prompt tokens. A block hits if it is cached, and all blocks "
        "before it in its request. The all-knowing policy sees the whole trace."
    )
    if data["hints"]:
        words += f" Hints for {data['hints']:.0%} of the conversations."
    if data["keep_partial"]:
        words += " Partial last blocks are stored, too."
    legend = plots.legend([(line.name, line.colour) for line in lines])
    return plots.page(
        title, plots.figure("Hit ratio by capacity", words, plot, legend, plots.table(rows))
    )


def _place(score: dict[str, Any]) -> float:
    return math.log2(sum(score["capacity_blocks"]))


_COUNT = {"type": click.IntRange(min=1), "metavar": "N"}
_WHEN = {"metavar": "WHEN", "default": None}
_FLAG = {"is_flag": True}
_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


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
        f"Policies with commas: {', '.join(kind.name for kind in POLICIES)}, a module path "
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
    ("--from start", _WHEN, "Leave out earlier requests."),
    (
        "--to end",
        _WHEN,
        "Leave out later requests. WHEN is a time from the start, such as 30min, or a share of "
        "the requests, such as 50%.",
    ),
    ("--halves", _FLAG, "Also count each half of the requests."),
    (
        "--hints",
        {"type": click.FloatRange(0, 1), "metavar": "SHARE", "default": 0.0},
        "Hint from the trace's future whether conversations continue, for this share of them.",
    ),
    ("--seed", {"type": int, "default": 0}, "Seed of the hinted conversations."),
    ("--keep-partial", _FLAG, "Also store last blocks that are not full, as many papers do."),
    ("--bound/--no-bound", {"default": True}, "Also compute the all-knowing bound."),
    ("--strict", _FLAG, "Stop at the first line that is no request."),
    (
        "--jobs",
        {"type": click.IntRange(min=0), "metavar": "N", "default": 0},
        "Number of processes; 0: one for each processor.",
    ),
    (
        "--plot plot_file",
        {"type": _FILE, "default": None, "metavar": "FILE"},
        "Draw hit ratios by capacity: a picture (.svg) or a page with tables (.html).",
    ),
)
@json_option
@click.pass_context
def simulate_command(ctx: click.Context, /, json_file: Path | None, **given: Any) -> None:
    """Predict the hits of each policy and each size on TRACE, beside an all-knowing policy.

    The trace goes through the same pool and policies as in your engine, without bytes. TRACE is
    Mooncake's JSONL or kvferry's own, which a server writes with the setting record. It may be
    gzipped and in several files (docs/traces.md).

    A block hits if it is cached, and all blocks before it in its request. Lines that are no
    requests are left out, counted and named. The exit code is 1 if there is nothing to simulate.
    """
    console = Console(stderr=True, highlight=False) if is_stdout(json_file) else unbroken()
    plot_file = given["plot_file"]
    try:
        if plot_file is not None:
            _require_drawable(plot_file)
        asked, names = _asked(given)
        began = time.monotonic()
        with progress("Simulating", is_hidden=False) as follow:
            simulated = simulate(asked, lambda share: follow(round(100 * share), 100))
    except KeyboardInterrupt:
        ctx.exit(_INTERRUPTED)
    seconds = time.monotonic() - began
    data = as_data(asked, simulated, names, seconds)
    rows = _rows(data)
    put(data, json_file)
    _put_figures(data, rows, console)
    if plot_file is not None:
        plot_file.write_text(_draw(plot_file, data, rows), encoding="utf-8")
        console.print(f"Wrote {plot_file}", markup=False)


def _asked(given: dict[str, Any]) -> tuple[Simulation, Names]:
    """The simulation that the options describe, and each capacity as the user wrote it."""
    token_bytes = given["token_bytes"]
    if token_bytes is not None:
        token_bytes = parse_size(token_bytes, name="--token-bytes")
    block_tokens = TraceReader(given["traces"], block_tokens=given["block_tokens"]).block_tokens
    block_bytes = token_bytes * block_tokens if token_bytes is not None else None
    names = read_capacities(given["capacities"], block_bytes)
    start_share, start_seconds = read_point("--from", given["start"], 0.0, 0.0)
    end_share, end_seconds = read_point("--to", given["end"], 1.0, float("inf"))
    tier_policy = read_policy("--tier-policy", given["tier_policy"])
    policy_named(tier_policy)  # refuses a name that cannot be found
    trials = tuple(
        Trial(policy, capacity, given["tier_write"], tier_policy)
        for capacity in names
        for policy in read_policies(given["policies"])
    )
    same = ("block_tokens", "strict", "keep_partial", "hints", "seed", "halves", "bound", "jobs")
    asked = Simulation(
        paths=tuple(given["traces"]),
        trials=trials,
        span=TracePart(start_share, end_share, start_seconds, end_seconds),
        **{name: given[name] for name in same},
    )
    return asked, names


def as_data(
    asked: Simulation, simulated: Simulated, names: Names, seconds: float
) -> dict[str, Any]:
    """All figures, as ``--json`` gives them."""
    trace = simulated.trace
    bounds = {score.trial.capacity[0]: score for score in simulated.bounds}
    scores = []
    for score in simulated.scores:
        bound = bounds.get(sum(score.trial.capacity))
        ratio = round(bound.whole.hit_ratio, 5) if bound else None
        name = {"capacity": names[score.trial.capacity]}
        scores.append({**name, **score.as_data(), "bound_hit_ratio": ratio})
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


def _put_figures(data: dict[str, Any], rows: Rows, console: Console) -> None:
    console.print(
        f"{data['requests']:,} requests over {timedelta(seconds=round(data['trace_seconds']))}, "
        f"{data['blocks']:,} blocks of {data['block_tokens']} tokens, {data['tokens']:,} prompt "
        "tokens.",
        markup=False,
    )
    for words in data["complaints"]:
        console.print(f"left out: {words}", markup=False, style="yellow")
    if data["skipped_lines"]:
        console.print(f"{data['skipped_lines']:,} lines in all were left out.", style="yellow")
    if data["out_of_order"]:
        console.print(f"{data['out_of_order']:,} requests were not in the order of time.")
    table = grid(*rows[0], left=["Policy"])
    for row in rows[1:]:
        table.add_row(*row, style="dim" if row[1] == ALL_KNOWING else None)
    console.print(table)
    console.print(
        "Hit ratio: share of all looked up blocks that hit. Seconds saved: prefill at "
        f"{1 / PREFILL_SECONDS:,.0f} tokens a second, less loads at {1 / LOAD_SECONDS:,.0f}. "
        f"us: processor time of a request. Took {data['seconds']:g} s.",
        style="dim",
    )


def _rows(data: dict[str, Any]) -> Rows:
    """The table: its head, then for each capacity the bound and the policies."""
    scores = data["scores"]
    tiers = range(1, max(len(score["capacity_blocks"]) for score in scores))
    columns = ["Hit ratio", *scores[0]["parts"], *(f"tier {tier}" for tier in tiers)]
    more = ["Of best", "Tokens saved", "Seconds saved", "Evicted", "us"]
    rows = [["Capacity", "Policy", *columns, *more]]
    bounds = {bound["capacity_blocks"][0]: bound for bound in data["bound"]}
    for capacity, found in groupby(scores, key=lambda score: str(score["capacity"])):
        first, *others = found
        bound = bounds.get(sum(first["capacity_blocks"]))
        shown = [*([bound] if bound else ()), first, *others]
        rows += [["" if at else capacity, *_row(each, tiers)] for at, each in enumerate(shown)]
    return rows


def _row(score: dict[str, Any], tiers: range) -> list[str]:
    is_bound = score["policy"] == ALL_KNOWING
    found = [*score["hit_blocks_by_tier"], *[0] * len(tiers)]
    best = score.get("bound_hit_ratio")
    row = [score["policy"]]
    row += [f"{part['hit_ratio']:.4f}" for part in (score, *score["parts"].values())]
    row += ["" if is_bound else f"{found[n] / max(1, score['blocks']):.4f}" for n in tiers]
    row += [f"{score['hit_ratio'] / best:.0%}" if best else "", f"{score['token_ratio']:.1%}"]
    row.append(f"{score['seconds_saved']:,.0f}")
    micros = score["seconds"] / max(1, score["requests"]) * 1e6
    return [*row, *(("", "") if is_bound else (f"{score['evicted']:,}", f"{micros:.0f}"))]
