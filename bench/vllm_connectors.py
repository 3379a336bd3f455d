"""vLLM on a GPU, without a KV connector and with each of several, side by side.

    PYTHONPATH=src python bench/vllm_connectors.py --json vllm.json --report vllm.md

A model shaped like Qwen2.5-7B with dummy weights, FlashAttention, CUDA graphs. Every connector gets
processes of its own, one after the other, with the same prompts, the same device cache and the same
host memory. Measured, per connector:

  start   seconds to make the engine, with a large host memory
  ttft    time to first token of a long prompt: cold, from the GPU's own cache, and from host memory
          after that cache was dropped; the floor is the GPU's own hit + the KV's bytes over the
          link's speed, one large pinned copy in the same process
  bytes   digests of every layer of every block before it left the GPU and after it came back, the
          whole KV cache overwritten in between; and a control that must find wrong ones
  over    conversations that need several times the device cache: requests/s, p95 to first token
  fits    conversations that fit the device cache: what a connector costs where it cannot help

--quick does a little of each to see that it runs; its figures mean nothing. Needs a CUDA GPU and a
vLLM that kvferry supports; exits with 77 without.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from connectors.case import Case, run_case
from connectors.engine import CONNECTORS, KV_HEADS, GiB
from connectors.loads import Load
from connectors.tables import report

SKIPPED = 77

EXIT_SECONDS = 20.0
"""How long the next process waits for one that gives its host memory back."""

ENVIRONMENT = os.environ | {
    # The engine in the process that times it: no message between the two is measured.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

FIRST_ORDER = (
    "none",
    "kvferry",
    "kvferry",
    "none",
    "SimpleCPUOffloadConnector",
    "OffloadingConnector",
)
NEXT_ORDER = ("kvferry", "OffloadingConnector", "SimpleCPUOffloadConnector", "none")

OVER = Load(
    num_conversations=20,
    num_turns=3,
    num_clients=4,
    first_tokens=8000,
    turn_tokens=400,
    answer_tokens=32,
)
FITS = Load(
    num_conversations=8,
    num_turns=6,
    num_clients=8,
    first_tokens=1500,
    turn_tokens=200,
    answer_tokens=64,
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the tables here")
    parser.add_argument(
        "--from",
        dest="given",
        type=Path,
        metavar="FILE",
        help="tables of an earlier --json; no run",
    )
    parser.add_argument(
        "--shape", action="append", choices=list(KV_HEADS), help="only this one (may be repeated)"
    )
    parser.add_argument(
        "--connector", action="append", choices=CONNECTORS, help="only this one (may be repeated)"
    )
    parser.add_argument("--pool", type=int, default=32, metavar="GIB", help="host memory (32)")
    parser.add_argument("--seconds", type=int, default=0, help="start no process after so long")
    parser.add_argument("--limit", type=int, default=600, help="seconds for one process (600)")
    parser.add_argument(
        "--warm", action="store_true", help="vLLM's compile cache is filled: no starts to fill it"
    )
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--case-out", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.case:
        return run_child(args.case, args.case_out)
    if args.given:
        print(report(json.loads(args.given.read_text(encoding="utf-8"))))
        return 0
    missing = what_is_missing()
    if missing:
        print(f"cannot measure here: {missing}", file=sys.stderr)
        return SKIPPED
    data = run_all(args)
    text = report(data)
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all("error" not in run for run in data["runs"]) else 1


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Every case, one after the other. After each the file is written: a cut loses nothing."""
    data: dict[str, Any] = {"provenance": provenance(), "runs": []}
    began = time.monotonic()
    todo = list(cases(args))
    for number, case in enumerate(todo):
        if args.seconds and time.monotonic() - began > args.seconds:
            data.setdefault("left_out", []).append(f"{case.connector} on {case.shape}")
            continue
        result, process = run_apart(case, args.limit)
        data["runs"].append(result)
        if args.json:
            args.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
        # The first process of another shape compiles, and its start is not compared.
        is_last = [case.shape] != [other.shape for other in todo[number + 1 : number + 2]]
        if not let_end(process, 1.0 if is_last else EXIT_SECONDS):
            result["still_ending"] = True
    return data


def what_is_missing() -> str:
    for name, remedy in (
        ("torch", "install vLLM, which brings it"),
        ("vllm", "pip install 'vllm>=0.26,<0.33', or run this with the Python that has it"),
        ("kvferry", "pip install it, or set PYTHONPATH=src"),
    ):
        if importlib.util.find_spec(name) is None:
            return f"there is no {name} in {sys.executable}: {remedy}"
    try:
        subprocess.run(["nvidia-smi"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "nvidia-smi finds no GPU; this benchmark needs an NVIDIA card"
    return ""


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Where start and cost are compared, none comes first and last, so that drift shows."""
    wanted = args.connector or CONNECTORS
    for number, shape in enumerate(args.shape or KV_HEADS):
        order = FIRST_ORDER if number == 0 else NEXT_ORDER
        case = case_of(args, shape)
        if not args.warm:
            for connector in (c for c in ("none", "kvferry") if c in wanted):
                yield replace(case, connector=connector, pool_bytes=GiB, sections=())
        seen: set[str] = set()
        for connector in (c for c in order if c in wanted):
            sections: tuple[str, ...] = ("ttft", "bytes", "over") if connector not in seen else ()
            if connector == "none":
                sections = tuple(s for s in sections if s != "bytes")
            if number == 0 and connector in ("none", "kvferry"):
                sections = (*sections, "fits")
            seen.add(connector)
            rounds = 1 if connector == "none" or number else case.over_rounds
            yield replace(case, connector=connector, sections=sections, over_rounds=rounds)


def case_of(args: argparse.Namespace, shape: str) -> Case:
    """As many tokens in every shape's device cache as 3 GiB hold of the first one's."""
    share = KV_HEADS[shape] / KV_HEADS["qwen7b"]
    case = Case(
        connector="none",
        shape=shape,
        pool_bytes=int(args.pool * GiB * share),
        device_bytes=int(3 * GiB * share),
        graphs=True,
        sections=(),
        prompt_tokens=16000,
        num_prompts=4,
        rounds=3,
        over=OVER,
        fits=FITS,
        fits_rounds=4,
        over_rounds=2,
    )
    if args.quick:
        few = replace(OVER, num_conversations=8, num_turns=2)
        short = replace(FITS, num_turns=2)
        case = replace(case, num_prompts=1, rounds=1, over=few, fits=short, fits_rounds=1)
    return case


def run_apart(case: Case, limit: float) -> tuple[dict[str, Any], subprocess.Popen[bytes]]:
    """One case in a fresh process; what it had written counts even if it did not end well.

    The process may still have memory to give back when this returns.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-vllm-"))
    out, log = folder / "result.json", folder / "log"
    command = [sys.executable, str(Path(__file__).resolve())]
    command += ["--case", json.dumps(asdict(case)), "--case-out", str(out)]
    began = time.monotonic()
    result: dict[str, Any] = {}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file)
    while "done" not in result and process.poll() is None:
        time.sleep(0.1)
        result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        if time.monotonic() - began > limit:
            process.kill()
    result["process_s"] = time.monotonic() - began
    result.setdefault("case", asdict(case))
    if "done" not in result:
        result["error"] = f"exit status {process.wait()} after {result['process_s']:.0f} s"
        print(log.read_text(encoding="utf-8", errors="replace")[-6000:])
    print(f"== {case.connector} on {case.shape}: {result['process_s']:.0f} s", flush=True)
    return result, process


def let_end(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process that only gives its memory back; whether it is gone."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def run_child(text: str, out: str) -> int:
    fields = json.loads(text)
    loads = {name: Load(**fields[name]) for name in ("over", "fits")}
    run_case(Case(**(fields | loads | {"sections": tuple(fields["sections"])})), out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine in the process makes the interpreter's own end slow


def provenance() -> dict[str, str]:
    """From a process of its own: this one must not hold the card."""
    code = (
        "import json, vllm; from kvferry.device.calibrate import provenance; "
        "from kvferry.device.driver import open_driver; d = open_driver(0); "
        "print('PROVENANCE' + json.dumps(provenance(d) | {'vllm': vllm.__version__}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = next(x for x in found.stdout.splitlines() if x.startswith("PROVENANCE"))
    facts: dict[str, str] = json.loads(line.removeprefix("PROVENANCE"))
    return facts | {"command": " ".join(["bench/vllm_connectors.py", *sys.argv[1:]])}


if __name__ == "__main__":
    sys.exit(main())
