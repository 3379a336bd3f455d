"""vLLM on a GPU under loads that ask for much at once, from the first second after its start.

    PYTHONPATH=src python bench/vllm_rounds.py --json rounds.json --report rounds.md

kvferry and vLLM's OffloadingConnector, each engine in a process of its own with the same host
memory, side by side on the card, round by round in turn:

  first   60 conversations of 4 turns, 24 requests at a time, pages of 8 KiB: the round right after
          the start, while host memory still grows, and the rounds after it; every round has
          conversations of its own
  bound   prompts of 16,000 tokens that live in host memory (28 in 32 GiB), answers of 4 tokens,
          4 at a time, 3 GiB on the device, pages of 32 KiB: loads are what everybody waits for;
          and the same prompts one at a time, right after the start and later

--other adds the kvferry of another checkout (one from before a change, say). --cpu does it with a
tiny model and no GPU; its figures mean nothing. Exits with 77 without a GPU or a vLLM.

    PYTHONPATH=src python bench/vllm_rounds.py --conversations 24 --pool 16 --modelless

--modelless leaves the model out and needs no GPU: vLLM's own scheduler makes the steps, and steps
and copies take as long as on an H200. It says how many tokens are computed and when answers begin;
it knows nothing of how copies and the model slow each other down. kvferry alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from _tables import table
from connectors.child import Child, ChildError
from connectors.engine import GiB, variables
from connectors.loads import Load
from connectors.order import environment
from connectors.rounds_case import RoundsCase, RoundsMeasurer
from vllm_connectors import provenance, what_is_missing

SKIPPED = 77
MiB = 1 << 20
SECTIONS = ("first", "bound")
NUM_CLIENTS = 4
"""Of ``bound``."""
ALONE_ROUNDS = 3
"""Of ``bound``, with one request at a time."""

OTHER = "kvferry (other)"

Result = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the tables here")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one")
    parser.add_argument("--rounds", type=int, default=3, help="of each section (3)")
    parser.add_argument("--pool", type=int, default=32, metavar="GIB", help="host memory each (32)")
    parser.add_argument("--conversations", type=int, default=60, help="of each first round (60)")
    parser.add_argument("--alone", action="store_true", help="kvferry without its peers")
    parser.add_argument("--other", type=Path, metavar="SRC", help="another checkout's src folder")
    parser.add_argument("--lmcache", action="store_true", help="LMCacheConnectorV1 as a peer, too")
    parser.add_argument("--cpu", action="store_true", help="a tiny model without a GPU")
    parser.add_argument("--modelless", action="store_true", help="vLLM's steps without a model")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.case:
        fields = json.loads(args.case[0])
        case = RoundsCase(**(fields | {"load": Load(**fields["load"])}))
        RoundsMeasurer(case).serve(int(args.case[1]))
        sys.stdout.flush()
        os._exit(0)
    missing = what_is_missing(needs_gpu=not (args.cpu or args.modelless))
    if missing:
        print(f"cannot measure here: {missing}", file=sys.stderr)
        return SKIPPED
    facts = provenance("bench/vllm_rounds.py", needs_gpu=not (args.cpu or args.modelless))
    data: Result = {"provenance": facts, "errors": []}
    for section in args.section or SECTIONS:
        said = partial(keep, args.json, data, section)
        try:
            measure(args, section, said)
        except ChildError as error:
            data["errors"].append(f"{section}: {error}")
            print(data["errors"][-1], file=sys.stderr, flush=True)
    text = report(data)
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    print(text)
    return 1 if data["errors"] else 0


def keep(file: Path | None, data: Result, section: str, found: dict[str, Result]) -> None:
    """Say how far it is, and write down what is known: whoever is stopped has lost nothing."""
    data[section] = found
    for name, engine in found.items():
        speeds = [f"{one['requests_per_s']:.2f}" for one in engine["rounds"]]
        print(f"{section}, {name}: {', '.join(speeds)} requests/s", file=sys.stderr, flush=True)
    if file:
        file.write_text(json.dumps(data, indent=1), encoding="utf-8")


def measure(
    args: argparse.Namespace, section: str, said: Callable[[dict[str, Result]], None]
) -> dict[str, Result]:
    """All engines of a section, in turn; what is known so far is ``said`` after each round."""
    env = environment()
    command = [sys.executable, str(Path(__file__).resolve()), "--case"]
    children = {
        name: Child(
            [*command, json.dumps(case.as_dict())],
            env
            | variables(case.connector, case.pool_bytes)
            | (before_all(args.other) if name == OTHER else {}),
        )
        for name, case in cases(args, section).items()
    }
    try:
        for child in children.values():
            child.tell("load")
        for child in children.values():
            child.hear()
        turns = first_rounds if section == "first" else bound_rounds
        return turns(children, args.rounds, said)
    finally:
        for child in children.values():
            child.end()


def before_all(source: Path) -> dict[str, str]:
    """An environment in which kvferry is imported from ``source``."""
    path = [str(source.resolve()), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def first_rounds(
    children: dict[str, Child], rounds: int, said: Callable[[dict[str, Result]], None]
) -> dict[str, Result]:
    """Each engine's first round comes right after its own start; the others wait for all."""
    found: dict[str, Result] = {}
    for name, child in children.items():
        found[name] = {"start_s": child.ask("start"), "rounds": [child.ask("round", 0)]}
        said(found)
    for name, child in children.items():
        found[name]["host_memory"] = child.ask("grown")
    for number in range(1, rounds + 1):
        for name in in_turn(children, number):
            found[name]["rounds"].append(children[name].ask("round", number))
            said(found)
    return found


def bound_rounds(
    children: dict[str, Child], rounds: int, said: Callable[[dict[str, Result]], None]
) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for name, child in children.items():
        found[name] = {"start_s": child.ask("start"), "rounds": [], "alone": []}
        child.ask("fill")
        found[name]["first"] = child.ask("bound", 1)
        child.ask("bound", NUM_CLIENTS)  # what is done once is done
        said(found)
    for number in range(rounds):
        for name in in_turn(children, number):
            found[name]["rounds"].append(children[name].ask("bound", NUM_CLIENTS))
            said(found)
    for number in range(ALONE_ROUNDS):
        for name in in_turn(children, number):
            found[name]["alone"].append(children[name].ask("bound", 1))
            said(found)
    return found


def in_turn(children: dict[str, Child], number: int) -> list[str]:
    """Who comes first changes: a card another process has just used is a little quicker."""
    return list(children)[:: 1 if number % 2 else -1]


def cases(args: argparse.Namespace, section: str) -> dict[str, RoundsCase]:
    first = section == "first"
    case = RoundsCase(
        connector="kvferry",
        shape="qwen7b-1kv" if first else "qwen7b",
        is_cpu=args.cpu,
        pool_bytes=args.pool * GiB,
        device_bytes=int(1.4 * GiB) if first else 3 * GiB,
        load=Load(args.conversations, 4, 24, first_tokens=4000, turn_tokens=400, answer_tokens=32),
        prompt_tokens=16000,
        num_prompts=28 * args.pool // 32,
    )
    if args.cpu:
        load = Load(6, 3, 3, first_tokens=300, turn_tokens=40, answer_tokens=8)
        case = replace(case, pool_bytes=64 * MiB, device_bytes=int(2.5 * MiB), load=load)
        case = replace(case, prompt_tokens=960, num_prompts=4)
    if args.modelless:
        step_seconds = 0.02 if first else 0.006
        case = replace(case, is_modelless=True, pool_bytes=512 * MiB, step_seconds=step_seconds)
    found = {"kvferry": case}
    if args.other:
        found[OTHER] = case
    peers = [] if args.alone or args.modelless else ["OffloadingConnector"]
    for name in [*peers, *(["LMCacheConnectorV1"] if args.lmcache else [])]:
        found[name] = replace(case, connector=name)
    return found


# -- tables ---------------------------------------------------------------------------------------


def report(data: Result) -> str:
    facts = data["provenance"]
    words = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "command")
    parts = ["# vLLM under many loads at once", f"{words}. One run of `{facts['command']}`."]
    if "first" in data:
        parts += ["## From the first second on, requests/s", rounds_table(data["first"])]
    if "bound" in data:
        parts += ["## Loads as the bottleneck", bound_table(data["bound"])]
    parts += [f"Failed: {error[-1500:]}" for error in data["errors"]]
    return "\n\n".join(parts) + "\n"


def rounds_table(found: dict[str, Result]) -> str:
    rows = []
    for name, engine in found.items():
        speeds = [one["requests_per_s"] for one in engine["rounds"]]
        waits = [one["ttft_ms"]["p95"] for one in engine["rounds"]]
        middles = [one["ttft_ms"]["p50"] for one in engine["rounds"]]
        computed = [one["prompt_tokens"] - one["cached_tokens"] for one in engine["rounds"]]
        later, later_wait, middle, work = (
            statistics.median(each[1:] or [math.nan]) for each in (speeds, waits, middles, computed)
        )
        rows.append(
            (
                name,
                f"{engine['start_s']:.1f}",
                f"{speeds[0]:.2f}",
                ", ".join(f"{speed:.2f}" for speed in speeds[1:]),
                f"{speeds[0] / later:.3f}",
                f"{waits[0]:.0f}",
                f"{later_wait:.0f}",
                f"{middle:.0f}",
                f"{work:,.0f}",
            )
        )
    heads = (
        "",
        "start s",
        "first round",
        "later rounds",
        "first / later",
        "p95 ms first",
        "later",
        "median",
        "computed",
    )
    return table(heads, rows)


def bound_table(found: dict[str, Result]) -> str:
    rows = []
    for name, engine in found.items():
        rounds = engine["rounds"]
        alone = sorted(ms for one in engine["alone"] for ms in one["all_ttft_ms"])
        first = engine["first"]["all_ttft_ms"][0]
        rows.append(
            (
                name,
                f"{engine['start_s']:.1f}",
                ", ".join(f"{one['requests_per_s']:.1f}" for one in rounds),
                f"{statistics.median(one['gb_per_s'] for one in rounds or [engine['first']]):.1f}",
                f"{statistics.median(one['cached'] for one in rounds or [engine['first']]):.0%}",
                f"{first:.1f}",
                *(
                    (f"{statistics.median(alone):.1f}", f"{alone[9 * len(alone) // 10]:.1f}")
                    if alone
                    else ("", "")
                ),
                f"{sum(one['wrong_answers'] for one in (*rounds, *engine['alone']))}",
            )
        )
    heads = (
        "",
        "start s",
        "requests/s",
        "GB/s loaded",
        "cached",
        "first hit ms",
        "alone: median first token ms",
        "p90",
        "wrong answers",
    )
    return table(heads, rows)


if __name__ == "__main__":
    sys.exit(main())
