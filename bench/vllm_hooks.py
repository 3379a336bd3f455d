"""vLLM on a GPU: the share of its time in kvferry's hooks, plain and with all that can be on.

    PYTHONPATH=src python bench/vllm_hooks.py --json hooks.json --report hooks.md

A model shaped like Qwen2.5-7B with dummy weights serves conversations that fit the device's cache,
so kvferry costs and cannot help. Several engines, a process each, side by side on the card; they
serve the same rounds in turn, with every hook timed:

  returns  policy ``returns``, all else as the settings' defaults are
  hints    the same, and with every request hints: it goes on, how much its beginning matters, whose
           it is
  plain    policy ``lru``, no hints
  idle     a connector that does nothing: what timing the hooks takes

The figure is the time in all hooks of scheduler and worker over that of the round, by engine: the
median over its rounds, the first of which is not counted. Further tables have, by hook, the
microseconds on the processor per request and per step; and by thread what it had of the processor,
and how long the engine's thread stood in a hook without it: ready to run (queued, in the whole
round), or waiting, which is for the interpreter (the GIL) or for a copy.

    PYTHONPATH=src python bench/vllm_hooks.py --modelless --other ../kvferry-before/src

--modelless leaves the model out and needs no GPU: vLLM's own scheduler makes the same steps, and
the figure is microseconds in the hooks, on the processor. --other names the ``src`` folder of
another checkout (one from before a change, say), which serves the same rounds in turn.

--long adds a prompt of 16,000 tokens that comes again and again to an idle engine whose own cache
has it: microseconds on the processor in all hooks, from its arrival until nothing is left to do.

With a model each engine takes half a minute to start: --kind returns --kind idle takes two minutes.

--cpu tries it out with a tiny model and no GPU; its figures mean nothing. Needs a CUDA GPU (or
--cpu, --modelless) and a vLLM that kvferry supports; exits with 77 without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from _tables import table
from connectors import model_time
from connectors.case import warm_up
from connectors.child import Child, ChildError, serve
from connectors.disk_case import CPU_OPTIONS, TinyShape
from connectors.engine import Engine, GiB, shape_of
from connectors.first_tokens import others
from connectors.hooks import queued_seconds, summary, thread_seconds, timed_hooks
from connectors.loads import Load, difference, new_tokens, run_load
from connectors.modelless import Modelless, rest
from connectors.order import environment
from vllm_connectors import FITS, provenance, what_is_missing

SKIPPED = 77
GROWN_AFTER = 30.0
NUM_BLOCKS = 3510
"""Device blocks without a model: as many as 3 GiB hold with it."""

LONG_TOKENS, LONG_ANSWER, LIVES = 16_000, 8, 6
"""A prompt that the device has, its answer, and how often it comes in a round."""

OTHER = " (other)"

_ALL = {"policy": "returns"}
_HINTS = {
    "continues": "2min",
    "priorities": [{"token_start": 0, "token_end": 512, "priority": 60}],
    "tenant": "bench",
}

KINDS: dict[str, Mapping[str, Any]] = {
    "returns": {"connector": "kvferry", "settings": _ALL, "params": None},
    "hints": {"connector": "kvferry", "settings": _ALL, "params": {"kvferry": _HINTS}},
    "plain": {
        "connector": "kvferry",
        "settings": {"policy": "lru"},
        "params": None,
    },
    "idle": {"connector": "idle", "settings": {}, "params": None},
}

TINY = Load(
    num_conversations=4,
    num_turns=3,
    num_clients=4,
    first_tokens=200,
    turn_tokens=40,
    answer_tokens=16,
)

Result = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the tables here")
    parser.add_argument("--rounds", type=int, default=6, help="of each engine (6)")
    parser.add_argument("--pool", type=int, default=8, metavar="GIB", help="host memory each (8)")
    parser.add_argument("--seconds", type=int, default=0, help="begin no round after so long")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this one")
    parser.add_argument("--cpu", action="store_true", help="a tiny model without a GPU")
    parser.add_argument("--modelless", action="store_true", help="vLLM's steps without a model")
    parser.add_argument("--long", action="store_true", help="a long prompt alone, too")
    parser.add_argument("--other", type=Path, metavar="SRC", help="another checkout's src folder")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.other and not (args.other / "kvferry").is_dir():
        parser.error(f"--other {args.other}: there is no kvferry in that folder")
    return args


def main() -> int:
    args = parse()
    if args.case:
        Measurer(json.loads(args.case[0])).serve(int(args.case[1]))
        sys.stdout.flush()
        os._exit(0)  # an engine in the process makes the interpreter's own end slow
    missing = what_is_missing(needs_gpu=not (args.cpu or args.modelless))
    if missing:
        print(f"cannot measure here: {missing}", file=sys.stderr)
        return SKIPPED
    data = run(args)
    text = report(data)
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    print(text)
    return 1 if data["errors"] else 0


# -- in each engine's process ---------------------------------------------------------------------


class Measurer:
    """Owns the engine of this process; each method is an order's answer."""

    def __init__(self, case: Result) -> None:
        self._case = case
        self._engine: Any = None  # one with a model, or Modelless

    def serve(self, descriptor: int) -> None:
        serve({"load": self.load, "start": self.start, "round": self.round}, descriptor)

    def load(self, _: None) -> None:
        from vllm import LLM  # noqa: F401

    def start(self, _: None) -> float:
        """Seconds to make the engine; then everything has run once and host memory is whole."""
        case, kind, began = self._case, KINDS[self._case["kind"]], time.perf_counter()
        if case["is_modelless"]:
            engine: Any = Modelless(
                kind["connector"],
                num_blocks=NUM_BLOCKS,
                pool_bytes=case["pool_bytes"],
                settings=kind["settings"],
            )
        else:
            engine = Engine(
                TinyShape("qwen7b") if case["is_cpu"] else shape_of("qwen7b"),
                kind["connector"],
                pool_bytes=case["pool_bytes"],
                device_bytes=case["device_bytes"],
                settings=kind["settings"],
                options=CPU_OPTIONS if case["is_cpu"] else {"gpu_memory_utilization": 0.2},
            )
            warm_up(engine)
        end = time.perf_counter() + GROWN_AFTER
        while not engine.has_grown and time.perf_counter() < end:
            time.sleep(0.1)
        engine.params = kind["params"]
        self._engine = engine
        return time.perf_counter() - began

    def round(self, number: int) -> Result:
        """Conversations that fit, others in every round, with every hook timed."""
        engine, load = self._engine, Load(**self._case["load"])
        engine.forget(others(1))
        threads, queued = thread_seconds(), queued_seconds()
        with timed_hooks(engine) as times:
            found = run_load(engine, load, seed=100 + number, fills=False)
            if isinstance(engine, Modelless):
                rest(engine)  # what is stored once all have ended is part of it
        session = vars(engine.core.scheduler.connector).get("_session")
        if session is not None and session.guard.reason:  # its hooks would cost nothing
            raise RuntimeError(f"kvferry is out of service: {session.guard.reason}")
        return {
            "seconds": found["seconds"],
            "requests": found["requests"],
            "cached_tokens": found["cached_tokens"],
            "hooks": summary(times),
            "threads": difference(threads, thread_seconds()),
            "queued": queued_seconds() - queued,
            "long": self._long() if self._case["has_long"] else [],
        }

    def _long(self) -> list[float]:
        """Seconds on the processor in the hooks, for each life of a prompt that the device has."""
        engine, lives = self._engine, []
        prompt = new_tokens(random.Random(1), LONG_TOKENS)
        for _ in range(1 + LIVES):
            with timed_hooks(engine) as times:
                live = engine.add(prompt, LONG_ANSWER)
                while not live.done:
                    engine.step()
                rest(engine)
            lives.append(sum(hook["worked"] for hook in summary(times).values()))
        return lives[1:]  # the first was computed


# -- in the parent --------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> Result:
    began = time.monotonic()
    load, needs_gpu = TINY if args.cpu else FITS, not (args.cpu or args.modelless)
    case = {
        "is_cpu": args.cpu,
        "is_modelless": args.modelless,
        "has_long": args.long,
        "pool_bytes": args.pool * GiB if needs_gpu else 16 << 20,
        "device_bytes": int(2.5 * (1 << 20)) if args.cpu else 3 * GiB,
        "load": vars(load),
    }
    data: Result = {
        "provenance": provenance("bench/vllm_hooks.py", needs_gpu=needs_gpu),
        "kinds": {name: dict(kind) for name, kind in KINDS.items()},
        "case": case,
        "start_seconds": {},
        "errors": [],
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--case"]
    children = {}
    for name, (kind, source) in _seats(args.kind or list(KINDS), args.other).items():
        around = environment()
        # Before what is there: a vLLM may be found by it, and another kvferry.
        around["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(source), around.get("PYTHONPATH", os.environ.get("PYTHONPATH"))))
        )
        if args.modelless:
            around[model_time.ASKED_BY] = "1"
        children[name] = Child([*command, json.dumps(case | {"kind": kind})], around)
    data["rounds"] = {name: [] for name in children}
    try:
        for child in children.values():
            child.tell("load")
        for child in children.values():
            child.hear()
        for name, child in children.items():
            data["start_seconds"][name] = child.ask("start")
        for number in range(-1, args.rounds):
            if args.seconds and time.monotonic() - began > args.seconds:
                data["errors"].append(f"rounds from {number} on were not run for want of time")
                break
            for name in list(children) if number % 2 else list(children)[::-1]:
                found = children[name].ask("round", number)
                if number >= 0:
                    data["rounds"][name].append(found)
            if args.json:
                args.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    except ChildError as error:
        data["errors"].append(str(error))
    finally:
        for child in children.values():
            child.end()
    data["took_seconds"] = time.monotonic() - began
    if args.json:
        args.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return data


def _seats(kinds: list[str], other: Path | None) -> dict[str, tuple[str, Path]]:
    """Who is measured, by name: which kind, of which source."""
    own = Path(__file__).resolve().parent.parent / "src"
    seats = {kind: (kind, own) for kind in kinds}
    if other is not None:
        seats |= {f"{kind}{OTHER}": (kind, other.resolve()) for kind in kinds if kind != "idle"}
    return seats


def report(data: Result) -> str:
    facts = data["provenance"]
    words = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "command")
    parts = [
        "# Time in kvferry's hooks on a load that fits the device",
        f"{words}. One run of `{facts['command']}`, {data['took_seconds']:.0f} s.",
        per_request(data) if data["case"]["is_modelless"] else shares(data),
        "## Microseconds on the processor, by hook: a request / a step, medians over the rounds",
        by_hook(data),
        "## Milliseconds a round, by thread, medians over the rounds",
        by_thread(data),
    ]
    if data["case"]["has_long"]:
        words = f"## A prompt of {LONG_TOKENS:,} tokens that the device has, microseconds in hooks"
        parts += [words, long_lives(data)]
    parts += [f"Failed: {error[-1500:]}" for error in data["errors"]]
    return "\n\n".join(parts) + "\n"


def side_seconds(one: Result, side: str = "", clock: str = "seconds") -> float:
    return sum(hook[clock] for name, hook in one["hooks"].items() if name.startswith(side))


def shares(data: Result) -> str:
    rows = []
    for name, rounds in data["rounds"].items():
        if not rounds:
            continue
        each = [side_seconds(one) / one["seconds"] for one in rounds]
        rows.append(
            (
                name,
                f"{statistics.median(each):.2%}",
                f"{min(each):.2%} to {max(each):.2%}",
                *(
                    f"{1e3 * statistics.median(side_seconds(one, side) for one in rounds):.1f}"
                    for side in ("scheduler", "worker")
                ),
                f"{statistics.median(one['seconds'] for one in rounds):.3f}",
                str(len(rounds)),
            )
        )
    heads = ("", "of the round", "from to", "scheduler ms", "worker ms", "round s", "rounds")
    return table(heads, rows) if rows else "Nothing was measured."


def per_request(data: Result) -> str:
    """Microseconds, and how many times as many in the other checkout."""
    each = {
        name: [1e6 * side_seconds(one, clock="worked") / one["requests"] for one in rounds]
        for name, rounds in data["rounds"].items()
        if rounds
    }
    rows = []
    for name, found in each.items():
        middle, other = statistics.median(found), each.get(f"{name}{OTHER}")
        ratio = f"{statistics.median(other) / middle:.2f}" if other else ""
        rows.append(
            (name, f"{middle:.0f}", f"{min(found):.0f} to {max(found):.0f}", ratio, len(found))
        )
    heads = ("", "us a request", "from to", "other / here", "rounds")
    return table(heads, [tuple(map(str, row)) for row in rows]) if rows else "Nothing was measured."


def by_hook(data: Result) -> str:
    names = sorted(
        {hook for rounds in data["rounds"].values() for r in rounds for hook in r["hooks"]}
    )
    rows = []
    for hook in names:
        cells = []
        for rounds in data["rounds"].values():
            each = [1e6 * one["hooks"].get(hook, {"worked": 0.0})["worked"] for one in rounds]
            per = [
                statistics.median(us / count for us, count in zip(each, counts, strict=True))
                for counts in ([one["requests"] for one in rounds], list(map(num_steps, rounds)))
                if each
            ]
            cells.append(f"{per[0]:.0f} / {per[1]:.1f}" if per else "-")
        rows.append((hook, *cells))
    return table(("", *data["rounds"]), rows) if rows else ""


def long_lives(data: Result) -> str:
    rows = []
    for name, rounds in data["rounds"].items():
        each = [1e6 * life for one in rounds for life in one["long"]]
        if each:
            rows.append((name, f"{statistics.median(each):.0f}", f"{min(each):.0f}", len(each)))
    heads = ("", "median", "least", "lives")
    return table(heads, [tuple(map(str, row)) for row in rows]) if rows else "Nothing was measured."


def num_steps(one: Result) -> int:
    return max(1, int(one["hooks"]["scheduler: build_connector_meta"]["calls"]))


def by_thread(data: Result) -> str:
    """What each thread had of the processor, and what the engine's thread waited for."""
    waits = {
        "engine's thread: queued for the processor": lambda one: one["queued"],
        "engine's thread: in hooks, off the processor": lambda one: (
            side_seconds(one) - side_seconds(one, clock="worked")
        ),
    }
    threads = sorted(
        {t for rounds in data["rounds"].values() for r in rounds for t in r["threads"]}
    )
    figures = waits | {name: partial(_of_thread, name) for name in threads}
    rows = [
        (
            name,
            *(
                f"{1e3 * statistics.median(map(figure, rounds)):.1f}" if rounds else "-"
                for rounds in data["rounds"].values()
            ),
        )
        for name, figure in figures.items()
    ]
    return table(("", *data["rounds"]), rows)


def _of_thread(name: str, one: Result) -> float:
    return float(one["threads"].get(name, 0.0))


if __name__ == "__main__":
    sys.exit(main())
