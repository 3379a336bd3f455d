"""``kvferry simulate``: what each policy and each size would have hit on a trace of requests."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvferry.cache.policies.contract import policy_named
from kvferry.core.quantities import parse_count, parse_seconds, parse_size, quoted
from kvferry.errors import ConfigError, KvferryError
from kvferry.settings.policies import DEFAULT_TIER_POLICY, POLICIES, read_policy
from kvferry.sim.serving import TracePart
from kvferry.sim.simulation import Simulated, Simulation, simulate
from kvferry.sim.trials import Score, Trial
from kvferry.telemetry.traces import TraceReader
from kvferry.tools.cli import output as progress
from kvferry.tools.cli.output import is_stdout, json_option, put, unbroken
from kvferry.tools.plots import Series, legend, line_plot

_MOST_BLOCKS = 1 << 30
_MOST_TRIALS = 1000


def read_policies(text: str) -> tuple[str, ...]:
    """Policies by name or module path, each once; a name that cannot be found is refused."""
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


def read_tier_policy(text: str) -> str:
    """One policy; a name that cannot be found is refused."""
    name = read_policy("--tier-policy", text)
    policy_named(name)
    return name


def read_capacities(text: str, block_bytes: int | None) -> dict[tuple[int, ...], str]:
    """Capacities in blocks, host first, each with what it was called."""
    found: dict[tuple[int, ...], str] = {}
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
            f"--capacity: {quoted(text)} is a size: say what a token takes (--token-bytes), or "
            "give a number of blocks"
        )
    blocks = size // block_bytes
    if not 0 < blocks <= _MOST_BLOCKS:
        raise ConfigError(
            f"--capacity: {quoted(text)} holds {blocks} blocks of {block_bytes} bytes; from 1 to "
            f"{_MOST_BLOCKS} can be simulated"
        )
    return blocks


def read_point(name: str, text: str | None, share: float, seconds: float) -> tuple[float, float]:
    """A place in a trace, as a share of its requests and as seconds; one of them is as given."""
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


# ------------------------------------------------------------------------------------------------
# The picture of ``kvferry simulate``: hit ratio by capacity, a line for each policy.

BOUND = "--bound"
COLOURS = ("--c1", "--c2", "--c3", "--c4", "--c5", "--c6")
STYLE = (
    ":root{--bound:#b9c4cc;--c1:#7f7f7f;--c2:#e09f3e;--c3:#5b6c9d;--c4:#c44536;--c5:#0b6e4f;"
    "--c6:#8a5a83}"
    "text{font:12px system-ui,sans-serif;fill:#444}.axis{fill:#222}.grid{stroke:#e4e4e4}"
    ".line{fill:none;stroke-width:2}.line.wide{stroke-width:7;stroke-linecap:round}"
)
PAGE_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;"
    "color:#222}svg{width:100%;height:auto}table{border-collapse:collapse;width:100%;"
    "font-size:.9rem}td,th{text-align:right;padding:.2rem .6rem;border-bottom:1px solid #e4e4e4}"
    "td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}"
    ".legend{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:0}"
    ".legend span{display:inline-block;width:1.4rem;height:.3rem;margin-right:.4rem;"
    "vertical-align:middle}.scroll{overflow-x:auto}.dim{color:#666}"
)


def drawer(file: Path) -> Callable[[dict[str, Any]], str]:
    """What draws a file of this name. ConfigError where nothing does: nobody could open it."""
    kinds = {".svg": plot, ".html": report, ".htm": report}
    found = kinds.get(file.suffix.lower())
    if found is None:
        raise ConfigError(
            f"--plot: {quoted(file.name)} must end in .svg, for a picture, or "
            ".html, for a page with tables"
        )
    return found


def plot(data: dict[str, Any]) -> str:
    """One SVG that needs nothing else."""
    drawn = _drawn(data)
    names = "".join(
        f'<text x="{86 + 118 * (at % 3)}" y="{278 + 18 * (at // 3)}">'
        f'<tspan style="fill:var({line.colour})" font-weight="bold">&#9632; </tspan>'
        f"{escape(line.name)}</text>"
        for at, line in enumerate(_lines(data))
    )
    height = 284 + 18 * ((len(_lines(data)) - 1) // 3)
    head, _, rest = drawn.partition(">")
    head = head.replace('viewBox="0 0 460 260"', f'viewBox="0 0 460 {height}"')
    back = f'<rect width="460" height="{height}" fill="#fff"/>'
    return f"{head}><style>{STYLE}</style>{back}{rest.removesuffix('</svg>')}{names}</svg>\n"


def report(data: dict[str, Any]) -> str:
    """One page with the picture and all figures, that needs nothing else."""
    lines = [(line.name, line.colour) for line in _lines(data)]
    title = f"kvferry simulate: {', '.join(path.rsplit('/', 1)[-1] for path in data['trace'])}"
    hints = f" Hints for {data['hints']:.0%} of the conversations." if data["hints"] else ""
    partial = " Partial last blocks are stored, too." if data["keep_partial"] else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}{PAGE_STYLE}</style><h1>{escape(title)}</h1>"
        f"<p>{data['requests']:,} requests, {data['blocks']:,} blocks of {data['block_tokens']} "
        f"tokens, {data['tokens']:,} prompt tokens.{hints}{partial}</p>"
        f"{_drawn(data)}{legend(lines)}{_rows(data)}"
        '<p class="dim">A block hits if it is there and all before it in its request are. The '
        "all-knowing one sees the whole trace ahead and may refuse what comes.</p></html>\n"
    )


def _lines(data: dict[str, Any]) -> list[Series]:
    bounds = sorted((_x(score["capacity_blocks"]), score["hit_ratio"]) for score in data["bound"])
    lines = [Series("all-knowing", BOUND, bounds, wide=True)] if bounds else []
    policies = dict.fromkeys(score["policy"] for score in data["scores"])
    for policy, colour in zip(policies, cycle(COLOURS), strict=False):
        points = sorted(
            (_x(score["capacity_blocks"]), score["hit_ratio"])
            for score in data["scores"]
            if score["policy"] == policy
        )
        lines.append(Series(policy, colour, points))
    return lines


def _x(capacity: list[int]) -> float:
    return math.log2(sum(capacity))


def _drawn(data: dict[str, Any]) -> str:
    labels = {_x(score["capacity_blocks"]): score["capacity"] for score in data["scores"]}
    return line_plot(
        _lines(data),
        x_label="capacity in blocks, on a logarithmic scale",
        y_label="hit ratio",
        show_y="{:.2f}".format,
        show_x=lambda x: escape(_short(labels.get(x, ""))),
        x_ticks=sorted(labels),
    )


def _short(text: str) -> str:
    return text if len(text) <= 12 else f"{text[:11]}…"


def _rows(data: dict[str, Any]) -> str:
    head = "<tr><th>capacity<th>policy<th>hit ratio<th>of bound<th>tokens saved<th>evicted</tr>"
    rows = [head]
    for score in data["scores"]:
        bound = score["bound_hit_ratio"]
        share = f"{score['hit_ratio'] / bound:.0%}" if bound else ""
        rows.append(
            f"<tr><td>{escape(score['capacity'])}<td>{escape(score['policy'])}"
            f"<td>{score['hit_ratio']:.4f}<td>{share}"
            f"<td>{score['tokens_saved']:,} ({score['token_ratio']:.1%})"
            f"<td>{score['evicted']:,}</tr>"
        )
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


# ------------------------------------------------------------------------------------------------
# ``kvferry simulate``: what each policy and each size would have hit on a trace of requests.

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
    "said. 3000+30000 is host memory and a tier below it, and so on.",
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
    "--tier-write",
    type=click.Choice(["spill", "through"]),
    default="spill",
    help="How blocks reach the tiers below host memory, as the setting of that name.",
)
@click.option(
    "--tier-policy",
    metavar="NAME",
    default=DEFAULT_TIER_POLICY,
    help="The policy of the tiers below host memory, as the setting of that name.",
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
    tier_policy = read_tier_policy(given["tier_policy"])
    trials = tuple(
        Trial(policy, capacity, given["tier_write"], tier_policy)
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
    tiers = max(len(score.trial.capacity) for score in simulated.scores)
    console.print(_table(simulated, names, halves=halves, tiers=tiers))
    console.print(
        "Hit ratio: blocks found, and all before them in their request, of all asked for. us: "
        f"processor time a request took. Took {data['seconds']:g} s.",
        style="dim",
    )


def _table(
    simulated: Simulated, names: dict[tuple[int, ...], str], *, halves: bool, tiers: int
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("Capacity", no_wrap=True)
    table.add_column("Policy", no_wrap=True)
    columns = ["Hit ratio"]
    columns += ["1st half", "2nd half"] if halves else []
    columns += [f"tier {at}" for at in range(1, tiers)]
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
                *_row(bound, bound, halves, tiers, False),
                style="dim",
            )
        table.add_row(
            "" if capacity in shown or bound is not None else names[capacity],
            score.trial.policy,
            *_row(score, bound, halves, tiers, True),
        )
        shown.add(capacity)
    return table


def _row(score: Score, bound: Score | None, halves: bool, tiers: int, real: bool) -> list[str]:
    whole = score.whole
    row = [f"{whole.hit_ratio:.4f}"]
    row += [f"{part.hit_ratio:.4f}" for part in score.parts.values()] if halves else []
    for tier in range(1, tiers):
        found = whole.hits[tier] if tier < len(whole.hits) else 0
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
