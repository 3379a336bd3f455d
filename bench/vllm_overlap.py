"""vLLM on a GPU: loads that overlap the forward pass, and the same loads that land before it.

    PYTHONPATH=src python bench/vllm_overlap.py --json overlap.json --report overlap.md

A model shaped like Qwen2.5-7B with dummy weights, FlashAttention, CUDA graphs; and the same with
smaller pages. One engine per shape, in which the overlap is switched on and off in turn:

  first   time to first token of a long prompt from host memory, the engine otherwise idle, beside
          a hit in the GPU's own cache and the copy's own time; and when what happened
  bytes   digests of every layer of every block before it left the GPU and after it came back with
          the overlap on, the whole KV cache overwritten in between; a control must find wrong ones

--quick does a little of each to see that it runs; --cpu does it with a tiny model and no GPU. Their
figures mean nothing. Needs a CUDA GPU (or --cpu) and a vLLM that kvferry supports; exits with 77
without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _tables import table
from connectors.child import Child, ChildError
from connectors.engine import KV_HEADS, GiB
from connectors.order import environment
from connectors.overlap_case import OverlapCase, OverlapMeasurer, median, quantile
from vllm_connectors import provenance, what_is_missing

SKIPPED = 77
MiB = 1 << 20
SECTIONS = ("first", "bytes")

Result = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the tables here")
    parser.add_argument("--shape", action="append", choices=list(KV_HEADS), help="only this one")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one")
    parser.add_argument("--mode", action="append", help="of first (off, auto)")
    parser.add_argument("--rounds", type=int, default=4, help="of first (4)")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--cpu", action="store_true", help="a tiny model without a GPU")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.case:
        OverlapMeasurer(OverlapCase(**json.loads(args.case[0]))).serve(int(args.case[1]))
        sys.stdout.flush()
        os._exit(0)
    missing = what_is_missing(needs_gpu=not args.cpu)
    if missing:
        print(f"cannot measure here: {missing}", file=sys.stderr)
        return SKIPPED
    facts = provenance("bench/vllm_overlap.py", needs_gpu=not args.cpu)
    data: Result = {"provenance": facts, "shapes": {}}
    failed = False
    for shape in args.shape or KV_HEADS:
        try:
            data["shapes"][shape] = measure(args, shape, args.section or SECTIONS)
        except ChildError as error:
            failed = True
            print(f"== {shape}: {error}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    text = report(data)
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    print(text)
    return 1 if failed else 0


def measure(args: argparse.Namespace, shape: str, sections: Sequence[str]) -> Result:
    case = case_of(args, shape)
    command = [sys.executable, str(Path(__file__).resolve()), "--case", json.dumps(case.as_dict())]
    child = Child(command, environment())
    try:
        child.ask("load")
        found: Result = {"case": case.as_dict(), "start": child.ask("start")}
        found["host"] = child.ask("warm")
        found |= child.ask("fill")
        few = args.quick or args.cpu
        if "first" in sections:
            modes = args.mode or ["off", "auto"]
            rounds = range(1 if few else args.rounds)
            found["first"] = [child.ask("first", {"modes": modes}) for _ in rounds]
        if "bytes" in sections and not args.cpu:
            found["bytes"] = child.ask("bytes", "auto")
        return found
    finally:
        child.end()


def case_of(args: argparse.Namespace, shape: str) -> OverlapCase:
    """As many tokens in every shape's device cache as 3 GiB hold of the first one's."""
    share = KV_HEADS[shape] / KV_HEADS["qwen7b"]
    case = OverlapCase(
        shape=shape,
        is_cpu=args.cpu,
        pool_bytes=int(14 * GiB * share),
        device_bytes=int(4 * GiB * share),
        prompt_tokens=16000,
        num_prompts=2 if args.quick else 6,
    )
    if args.cpu:
        size = int(3 * MiB)
        case = replace(case, pool_bytes=8 * MiB, device_bytes=size, prompt_tokens=960)
        return replace(case, num_prompts=2)
    return case


def report(data: Result) -> str:
    lines = ["# Loads that overlap the forward pass", ""]
    lines += [f"{name}: {value}  " for name, value in data["provenance"].items()]
    for shape, found in data["shapes"].items():
        lines += ["", f"## {shape}", ""]
        if "first" in found:
            lines += [*first_tokens(found), ""]
        if "bytes" in found:
            lines += [f"Bytes with the overlap: {json.dumps(found['bytes'])}", ""]
    return "\n".join(lines)


def first_tokens(found: Result) -> list[str]:
    rounds = found["first"]
    rows = [["computed", f"{median(found['cold_ms']):.1f}", "", "", ""]]
    device = [ms for one in rounds for ms in one["device_ms"]]
    rows.append(["from the GPU", f"{median(device):.1f}", f"{quantile(device, 0.9):.1f}", "", ""])
    for mode in rounds[0]["host_ms"]:
        times = [ms for one in rounds for ms in one["host_ms"][mode]]
        copy = [ms for one in rounds for ms in one["copy_ms"][mode]]
        steps = [step for one in rounds for step in one["steps"][mode]]
        names = dict.fromkeys(name for step in steps for name in step)
        when = ", ".join(
            f"{name} {median([s[name] for s in steps if name in s]):.1f}" for name in names
        )
        words = [f"{median(times):.1f}", f"{quantile(times, 0.9):.1f}", f"{median(copy):.1f}"]
        rows.append([f"from host, overlap {mode}", *words, when])
    wrong = sum(one["wrong_answers"] for one in rounds)
    heads = ["first token, ms", "median", "p90", "copy", "when (ms after the request)"]
    return [table(heads, rows), "", f"Answers that differ: {wrong}"]


if __name__ == "__main__":
    sys.exit(main())
