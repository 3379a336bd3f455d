"""vLLM on a GPU, without a KV connector and with each of several, side by side.

    PYTHONPATH=src python bench/vllm_connectors.py --json vllm.json --report vllm.md

A model shaped like Qwen2.5-7B with dummy weights, FlashAttention, CUDA graphs. Every connector has
a process of its own, with the same prompts, the same device cache and the same host memory; an
engine without a connector lives beside each of them on the card. Measured, per connector:

  start   seconds to make the engine, with a large host memory
  fits    conversations that fit the device cache: what a connector costs where it cannot help;
          round by round in turn with the engine that has none
  hooks   how long vLLM spent in the connector's hooks in one more such round
  toggled kvferry's engine alone, such rounds with its hooks and without them in turn
  ttft    time to first token of a long prompt: cold, from the GPU's own cache, and from host memory
          after that cache was dropped; the floor is the GPU's own hit + the KV's bytes over the
          link's speed, one large pinned copy in the same process
  bytes   kvferry's and LMCache's only: digests of every layer of every block before it left the
          GPU and after it came back, the whole KV cache overwritten in between; a control must find
          wrong ones
  over    conversations that need several times the device cache: requests/s, p95 to first token

The second shape has smaller pages; there only ttft and bytes are measured.

LMCache (LMCacheConnectorV1, in vLLM's process) moves wrong bytes under vLLM 0.26 as it is shipped
(LMCache issue 4463): ``bytes`` shows it, and its times count only where no block is wrong.

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
from dataclasses import replace
from pathlib import Path
from typing import Any

from connectors.case import Case, Measurer
from connectors.engine import CONNECTORS, KV_HEADS, ONLY_IF_NAMED, GiB
from connectors.loads import Load
from connectors.order import Amount, Part, Run, read_case
from connectors.tables import report

SKIPPED = 77

SECTIONS = ("start", "fits", "hooks", "toggled", "ttft", "bytes", "over")

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
        "--shape", action="append", choices=list(KV_HEADS), help="only this one (may be repeated)"
    )
    parser.add_argument(
        "--connector",
        action="append",
        choices=[name for name in CONNECTORS if name != "none"],
        help="only this one beside none (may be repeated); idle, which does nothing, and LMCache "
        "are run only if they are named",
    )
    parser.add_argument(
        "--section", action="append", choices=SECTIONS, help="only this one (may be repeated)"
    )
    parser.add_argument("--pool", type=int, default=32, metavar="GIB", help="host memory (32)")
    parser.add_argument("--rounds", type=int, default=10, help="of fits, for kvferry (10)")
    parser.add_argument("--over-rounds", type=int, default=2, help="of over (2)")
    parser.add_argument("--seconds", type=int, default=0, help="start no process after so long")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.case:
        Measurer(read_case(args.case[0])).serve(int(args.case[1]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # an engine in the process makes the interpreter's own end slow
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
    """Shape after shape. After each measurement the file is written: a cut loses nothing."""
    facts = provenance("bench/vllm_connectors.py")
    data: dict[str, Any] = {"provenance": facts, "runs": [], "left_out": []}

    def keep() -> None:
        if args.json:
            args.json.write_text(json.dumps(data, indent=1), encoding="utf-8")

    wanted = args.connector or [name for name in CONNECTORS if name not in ONLY_IF_NAMED]
    sections = tuple(args.section or SECTIONS)
    run = Run(
        [sys.executable, str(Path(__file__).resolve())], data, keep=keep, seconds=args.seconds
    )
    parts = []
    for number, shape in enumerate(args.shape or KV_HEADS):
        amount = Amount(
            sections if number == 0 else tuple(s for s in sections if s in ("ttft", "bytes")),
            fits_rounds=0 if number else (1 if args.quick else args.rounds),
            over_rounds=1 if args.quick else args.over_rounds,
        )
        parts.append(Part(case_of(args, shape), tuple(wanted), amount))
    run.measure(parts)
    keep()
    return data


def what_is_missing(*, needs_gpu: bool = True) -> str:
    for name, remedy in (
        ("torch", "install vLLM, which brings it"),
        ("vllm", "pip install 'vllm>=0.26,<0.33', or run this with the Python that has it"),
        ("kvferry", "pip install it, or set PYTHONPATH=src"),
    ):
        if importlib.util.find_spec(name) is None:
            return f"there is no {name} in {sys.executable}: {remedy}"
    if not needs_gpu:
        return ""
    try:
        subprocess.run(["nvidia-smi"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "nvidia-smi finds no GPU; this benchmark needs an NVIDIA card"
    return ""


def case_of(args: argparse.Namespace, shape: str) -> Case:
    """As many tokens in every shape's device cache as 3 GiB hold of the first one's."""
    share = KV_HEADS[shape] / KV_HEADS["qwen7b"]
    case = Case(
        connector="none",
        shape=shape,
        pool_bytes=int(args.pool * GiB * share),
        device_bytes=int(3 * GiB * share),
        prompt_tokens=16000,
        num_prompts=4,
        rounds=3,
        over=OVER,
        fits=FITS,
    )
    if args.quick:
        few = replace(OVER, num_conversations=8, num_turns=2)
        short = replace(FITS, num_turns=2)
        case = replace(case, num_prompts=1, rounds=1, over=few, fits=short)
    return case


def provenance(script: str, *, needs_gpu: bool = True) -> dict[str, str]:
    """From a process of its own: this one must not hold the card."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        "import json, vllm; from _copy_rig import provenance; "
        "from kvferry.transfer.driver import Driver; d = Driver.open(0); "
        "print('PROVENANCE' + json.dumps(provenance(d) | {'vllm': vllm.__version__}))"
    )
    if not needs_gpu:
        code = "import json, vllm; print('PROVENANCE' + json.dumps({'vllm': vllm.__version__}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = next(x for x in found.stdout.splitlines() if x.startswith("PROVENANCE"))
    facts: dict[str, str] = json.loads(line.removeprefix("PROVENANCE"))
    return facts | {"command": " ".join([script, *sys.argv[1:]])}


if __name__ == "__main__":
    sys.exit(main())
