"""vLLM on a GPU with kvferry's disk below host memory: after a restart, and beyond host memory.

    PYTHONPATH=src python bench/vllm_disk.py --disk /mnt/nvme --json disk.json --report disk.md

A model shaped like Qwen2.5-7B with dummy weights, FlashAttention, CUDA graphs; and the same with
smaller pages. Every life of a server is a process of its own. Measured, per shape:

  restart  one life computes long prompts and is killed once they are on disk and durable; the next
           one is asked for each of them once: time to first token, beside a hit in the GPU's own
           cache right after it. The floor is that hit + the KV's bytes over the drive's own speed:
           large reads past the page cache at the best depth, before and after, while the server is
           idle. Digests of every layer of every block, and the answers, are compared with those of
           the life that computed them; a control must find wrong ones
  over     conversations that need four times host memory: requests/s with the disk and without it,
           two servers side by side on the card, round by round in turn

--quick does a little of each to see that it runs; --cpu does it with a tiny model and no GPU.
Their figures mean nothing. Needs a CUDA GPU (or --cpu) and a vLLM that kvferry supports; exits with
77 without.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _tables import table
from connectors.child import Child, ChildError
from connectors.disk_case import DiskCase, DiskMeasurer
from connectors.drive import RawDrive, forget_pages, free_bytes
from connectors.engine import KV_HEADS, GiB
from connectors.loads import Load
from connectors.order import environment
from vllm_connectors import provenance, what_is_missing

SKIPPED = 77
MiB = 1 << 20
SECTIONS = ("restart", "over")

Result = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--disk", type=Path, metavar="DIR", help="on the drive (a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured here")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the tables here")
    parser.add_argument("--shape", action="append", choices=list(KV_HEADS), help="only this one")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one")
    parser.add_argument("--prompts", type=int, default=6, help="of restart (6)")
    parser.add_argument("--rounds", type=int, default=2, help="of over (2)")
    parser.add_argument("--seconds", type=int, default=0, help="begin no part after so long")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--cpu", action="store_true", help="a tiny model without a GPU")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.case:
        fields = json.loads(args.case[0])
        case = DiskCase(**(fields | {"load": Load(**fields["load"])}))
        DiskMeasurer(case).serve(int(args.case[1]))
        sys.stdout.flush()
        os._exit(0)
    missing = what_is_missing(needs_gpu=not args.cpu)
    if missing:
        print(f"cannot measure here: {missing}", file=sys.stderr)
        return SKIPPED
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=args.disk))
    try:
        data = Bench(args, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = report(data)
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    print(text)
    return 0 if not data["errors"] else 1


class Bench:
    """Owns the processes of a run and what they found."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._environment = environment() | {"PYTHONHASHSEED": "0"}
        self._began = time.monotonic()
        facts = provenance("bench/vllm_disk.py", needs_gpu=not args.cpu)
        self.data: Result = {"provenance": facts, "shapes": {}, "errors": [], "left_out": []}

    def run(self) -> Result:
        size = 64 * MiB if self._args.cpu else 2 * GiB
        raw = RawDrive(self._folder, size)
        self.data["is_direct"] = raw.is_direct
        try:
            for section in self._args.section or SECTIONS:
                for shape in self._args.shape or KV_HEADS:
                    found = self.data["shapes"].setdefault(shape, {})
                    self._part(shape, section, found, raw)
        finally:
            raw.close()
        return self.data

    def _part(self, shape: str, section: str, found: Result, raw: RawDrive) -> None:
        seconds = time.monotonic() - self._began
        if self._args.seconds and seconds > self._args.seconds:
            self.data["left_out"].append(f"{section} on {shape}")
            return
        store = self._folder / f"{shape}-{section}"
        store.mkdir(mode=0o700)
        try:
            part: Callable[..., Result] = getattr(self, f"_{section}")
            found[section] = part(case_of(self._args, shape, section, store), raw)
        except ChildError as error:
            self.data["errors"].append(f"{section} on {shape}: {error}")
            print(self.data["errors"][-1], file=sys.stderr, flush=True)
        finally:
            shutil.rmtree(store, ignore_errors=True)
        print(f"== {section} on {shape}: {time.monotonic() - self._began:.0f} s", flush=True)
        if self._args.json:
            self._args.json.write_text(json.dumps(self.data, indent=1), encoding="utf-8")

    def _restart(self, case: DiskCase, raw: RawDrive) -> Result:
        lives = [self._child(case), self._child(case)]  # both import meanwhile
        try:
            first, second = lives
            for life in lives:
                life.tell("load")
            for life in lives:
                life.hear()
            begun = first.ask("start") | first.ask("warm")
            computed = first.ask("fill")
            first.end()  # killed: what it wrote is there, or it was never promised
            forget_pages(Path(case.disk))
            started = second.ask("start") | second.ask("warm")
            if not started["restored"]:
                raise ChildError("the second life found nothing of the first one on disk")
            rates = [raw.measure()]
            came = [second.ask("back", number) for number in range(case.num_prompts)]
            rates.append(raw.measure())
            control = second.ask("digests", case.num_prompts - 1)
            counted = second.ask("counted")
        finally:
            for life in lives:
                life.end()
        return {
            "case": case.as_dict(),
            "starts": [begun, started],
            "computed": [without_digests(one) for one in computed],
            "came": [without_digests(one) for one in came],
            "raw_bytes_per_s": rates,
            "counted": counted,
            "right": compare(computed, came, control),
        }

    def _over(self, case: DiskCase, raw: RawDrive) -> Result:
        cases = {"disk": case, "none": replace(case, disk="")}
        children = {name: self._child(each) for name, each in cases.items()}
        rounds: dict[str, list[Result]] = {name: [] for name in cases}
        try:
            for child in children.values():
                child.tell("load")
            for child in children.values():
                child.hear()
            starts = {name: child.ask("start") for name, child in children.items()}
            for child in children.values():
                child.ask("warm")
            for number in range(1 if self._args.quick else self._args.rounds):
                for name in ("disk", "none") if number % 2 else ("none", "disk"):
                    rounds[name].append(children[name].ask("over", number))
            counted = {name: child.ask("counted") for name, child in children.items()}
        finally:
            for child in children.values():
                child.end()
        return {
            "case": case.as_dict(),
            "starts": starts,
            "rounds": rounds,
            "counted": counted,
            "raw_bytes_per_s": [raw.measure()],
        }

    def _child(self, case: DiskCase) -> Child:
        command = [sys.executable, str(Path(__file__).resolve()), "--case"]
        return Child([*command, json.dumps(case.as_dict())], self._environment)


def case_of(args: argparse.Namespace, shape: str, section: str, store: Path) -> DiskCase:
    """As many tokens in every shape's memories as the first one's hold."""
    share = KV_HEADS[shape] / KV_HEADS["qwen7b"]
    load = Load(
        num_conversations=36,
        num_turns=3,
        num_clients=4,
        first_tokens=8000,
        turn_tokens=400,
        answer_tokens=32,
    )
    case = DiskCase(
        shape=shape,
        is_cpu=args.cpu,
        pool_bytes=int((8 if section == "restart" else 4.5) * GiB * share),
        device_bytes=int(3 * GiB * share),
        disk=str(store),
        disk_bytes=min(int(24 * GiB * share), max(GiB, free_bytes(store) - 8 * GiB)),
        write="through" if section == "restart" else "spill",
        prompt_tokens=16000,
        num_prompts=2 if args.quick else args.prompts,
        load=load,
        load_policy="always" if section == "restart" else "auto",
    )
    if args.cpu:
        tiny = replace(load, num_conversations=8, first_tokens=600, turn_tokens=40)
        return replace(
            case,
            pool_bytes=int((16 if section == "restart" else 1.25) * MiB),
            device_bytes=int(2.5 * MiB),
            disk_bytes=64 * MiB,
            prompt_tokens=960,
            num_prompts=2,
            load=replace(tiny, num_turns=2, answer_tokens=8),
        )
    if args.quick:
        return replace(case, load=replace(load, num_turns=2))
    return case


def without_digests(found: Result) -> Result:
    return {name: value for name, value in found.items() if name != "digests"}


def compare(computed: Sequence[Result], came: Sequence[Result], control: list[Any]) -> Result:
    """Blocks and tokens that are not as the first life computed them."""
    blocks = wrong_blocks = tokens = wrong_tokens = 0
    for then, now in zip(computed, came, strict=True):
        loaded = now["cached_blocks"]
        pairs = list(zip(then["digests"], now["digests"], strict=False))
        # The last token is computed again, and with it a value in the last block.
        pairs = pairs[: min(loaded, len(then["digests"]) - 1)]
        blocks += len(pairs)
        wrong_blocks += sum(a != b for a, b in pairs)
        for a, b in zip(then["answers"], now["answers"], strict=True):
            tokens += len(a)
            wrong_tokens += sum(x != y for x, y in zip(a, b, strict=True))
    last = list(zip(came[-1]["digests"], control, strict=False))
    return {
        "blocks": blocks,
        "wrong_blocks": wrong_blocks,
        "tokens": tokens,
        "wrong_tokens": wrong_tokens,
        "control_wrong_blocks": sum(a != b for a, b in last),
    }


# -- tables ---------------------------------------------------------------------------------------


def report(data: Result) -> str:
    facts = data["provenance"]
    words = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "command")
    direct = "past the page cache" if data["is_direct"] else "through the page cache"
    parts = [
        "# vLLM with a disk below host memory",
        f"{words}. One run of `{facts['command']}`. Raw reads {direct}.",
        "## First token after a restart",
        restarts(data),
        "## Conversations that need four times host memory",
        overs(data),
    ]
    if data["left_out"]:
        parts.append("Not run for want of time: " + ", ".join(data["left_out"]) + ".")
    parts += [f"Failed: {error[-1500:]}" for error in data["errors"]]
    return "\n\n".join(parts) + "\n"


def restarts(data: Result) -> str:
    rows = []
    for shape, found in data["shapes"].items():
        part = found.get("restart")
        if part is None:
            continue
        disk = [one["disk_ms"] for one in part["came"]]
        device = statistics.median(one["device_ms"] for one in part["came"])
        num_bytes = statistics.median(one["read_bytes"] for one in part["came"])
        raw = max(part["raw_bytes_per_s"])
        floor = device + 1e3 * num_bytes / raw
        right = part["right"]
        rows.append(
            (
                shape,
                f"{statistics.median(one['cold_ms'] for one in part['computed']):.1f}",
                f"{device:.1f}",
                f"{statistics.median(disk):.1f}",
                f"{min(disk):.1f}-{max(disk):.1f}",
                f"{num_bytes / 1e6:.0f}",
                f"{raw / 1e9:.2f}",
                f"{floor:.1f}",
                f"{statistics.median(disk) / floor:.2f}",
                f"{right['wrong_blocks']} of {right['blocks']}",
                f"{right['wrong_tokens']} of {right['tokens']}",
                f"{right['control_wrong_blocks']}",
            )
        )
    heads = ("", "computed ms", "device ms", "disk ms", "from-to", "MB read", "raw GB/s")
    more = ("floor ms", "disk / floor", "wrong blocks", "wrong tokens", "control finds")
    return table((*heads, *more), rows) if rows else "Not run."


def overs(data: Result) -> str:
    rows = []
    for shape, found in data["shapes"].items():
        part = found.get("over")
        if part is None:
            continue
        for name, label in (("disk", "with the disk"), ("none", "without")):
            rounds = part["rounds"][name]
            requests = sum(one["requests"] for one in rounds)
            seconds = sum(one["seconds"] for one in rounds)
            times = sorted(t for one in rounds for t in one["all_ttft_ms"])
            cached = sum(one["cached_tokens"] for one in rounds)
            rows.append(
                (
                    f"{shape}, {label}",
                    f"{requests / seconds:.2f}",
                    ", ".join(f"{one['requests_per_s']:.2f}" for one in rounds),
                    f"{statistics.median(times):.0f}",
                    f"{times[-(-95 * len(times) // 100) - 1]:.0f}",
                    f"{cached / sum(one['prompt_tokens'] for one in rounds):.0%}",
                    str(requests),
                )
            )
    heads = ("", "requests/s", "by round", "p50 TTFT ms", "p95 TTFT ms", "cached", "requests")
    return table(heads, rows) if rows else "Not run."


if __name__ == "__main__":
    sys.exit(main())
