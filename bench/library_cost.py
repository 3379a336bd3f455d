"""What the library costs its caller: match, load and store of 32, 256 and 8192 blocks.

    python bench/library_cost.py --other ../kvferry-before/src

The time from the call to its return, on a CPU; the copies themselves run on other threads, and are
waited for in between. ``--other`` names the ``src`` folder of another checkout (one from before a
change, say): both are measured in turn, round by round, each in processes of its own, so that a
busy machine is busy for both. The least time of all rounds counts: it is what the code needs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

BLOCK_TOKENS = 16
AMOUNTS = {32: 300, 256: 200, 8192: 25}
VERBS = ("match", "load", "store")

Least = dict[str, dict[str, float]]
"""Microseconds by number of blocks and verb."""


def measure(num_blocks: int, rounds: int) -> dict[str, float]:
    import kvferry

    kv = [np.zeros((num_blocks, 16), dtype=np.uint8) for _ in range(2)]
    blocks = np.arange(num_blocks)
    least = dict.fromkeys(VERBS, float("inf"))
    host = str(max(1 << 20, num_blocks * 32 * 64))
    with kvferry.attach(
        kv, model="m", block_tokens=BLOCK_TOKENS, host=host, load_policy="always"
    ) as ferry:
        time.sleep(0.3)
        ferry.poll()  # all slots are there
        gc.disable()
        for number in range(rounds):
            keys = ferry.keys(np.arange(num_blocks * BLOCK_TOKENS) + number * 7919)
            marks = [time.perf_counter()]
            stored = ferry.store(keys, blocks)
            marks.append(time.perf_counter())
            ferry.wait(stored)
            marks.append(time.perf_counter())
            hit = ferry.match(keys)
            marks.append(time.perf_counter())
            assert len(hit) == num_blocks
            loaded = ferry.load(hit, blocks)
            marks.append(time.perf_counter())
            ferry.wait(loaded)
            times = (marks[3] - marks[2], marks[4] - marks[3], marks[1] - marks[0])
            for verb, seconds in zip(VERBS, times, strict=True):
                least[verb] = min(least[verb], 1e6 * seconds)
        gc.enable()
    return least


def measure_all(rounds: float) -> Least:
    return {
        str(count): measure(count, max(2, int(often * rounds))) for count, often in AMOUNTS.items()
    }


def in_a_process(source: Path, rounds: float) -> Least:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, __file__, "--child", str(rounds)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told: Least = json.loads(found.stdout.splitlines()[-1])
    return told


def merge(best: Least, found: Least) -> None:
    for count, times in found.items():
        for verb, value in times.items():
            own = best.setdefault(count, {})
            own[verb] = min(own.get(verb, float("inf")), value)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, metavar="SRC", help="another checkout's src folder")
    parser.add_argument("--turns", type=int, default=4, help="how often each is measured (4)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(measure_all(arguments.child)))
        return 0
    own = Path(__file__).resolve().parent.parent / "src"
    sources = {"here": own, **({"other": arguments.other} if arguments.other else {})}
    best: dict[str, Least] = {name: {} for name in sources}
    for _ in range(1 if arguments.quick else arguments.turns):
        for name, source in sources.items():
            merge(best[name], in_a_process(source, 0.2 if arguments.quick else 1.0))
    report(best)
    if arguments.json:
        arguments.json.write_text(json.dumps(best, indent=2) + "\n", encoding="utf-8")
    return 0


def report(best: dict[str, Least]) -> None:
    print(f"µs of the caller's thread, Python {sys.version.split()[0]}, numpy {np.__version__}\n")
    names = list(best)
    print(
        f"| blocks | verb | {' | '.join(names)} |" + (" other / here |" if "other" in best else "")
    )
    print("|---|---|" + "---|" * (len(names) + ("other" in best)))
    for count in AMOUNTS:
        for verb in VERBS:
            values = [best[name][str(count)][verb] for name in names]
            ratio = f" {values[1] / values[0]:.2f} |" if "other" in best else ""
            print(f"| {count} | {verb} | {' | '.join(f'{v:.0f}' for v in values)} |{ratio}")


if __name__ == "__main__":
    sys.exit(main())
