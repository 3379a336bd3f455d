"""A million things that can happen to a server, with every promise checked: ``make soak``.

Servers of every kind live side by side for the whole run, each with ranks, tiers and weather of
its own. Their bookkeeping and every byte they promise are checked regularly; from time to time the
weather turns calm and every request must finish. Memory must not grow: nothing may be remembered
for ever.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.model.serving import Serving
from tests.model.stage import Setup
from tests.model.weather import Weather

from kvferry.scheduler.tier import WriteMode

BURST = 250  # operations of one server before the next one's turn
CALM_EVERY = 80  # bursts of one server between two calm hours
WARM_UP = 320_000  # operations until every bounded memory (journals of a thousand requests) is full
MAX_GROWTH = 0.05

SPILL, THROUGH = WriteMode.SPILL, WriteMode.THROUGH

SERVERS = (
    Setup("full", num_ranks=3, num_slots=32, num_blocks=30, num_stories=10, stores_late=True),
    Setup("full", num_slots=16, num_blocks=30, tiers=((200, SPILL),)),
    Setup("window", num_ranks=2, num_slots=24, tiers=((200, THROUGH), (6, SPILL))),
    Setup("window", num_slots=64, num_blocks=26, store_threshold=2),
    Setup("recurrent", num_slots=48, tiers=((40, SPILL), (300, THROUGH)), load_policy="auto"),
    Setup("chunked", hash_tokens=2, num_ranks=2, num_slots=24, joins_loads=False),
    Setup("pairs", hash_tokens=2, num_slots=16, tiers=((100, SPILL),), num_stories=10),
    Setup("three", num_ranks=2, num_slots=40, num_blocks=26, tiers=((100, THROUGH),)),
)


@dataclass
class Report:
    """What was done, and what it took."""

    operations: Counter[str] = field(default_factory=Counter)
    num_checks: int = 0
    num_loads: int = 0
    num_failed_loads: int = 0
    num_finished: int = 0
    seconds: float = 0.0
    warm_kib: int = 0
    end_kib: int = 0

    @property
    def total(self) -> int:
        return self.operations.total()

    @property
    def growth(self) -> float:
        return self.end_kib / self.warm_kib - 1.0 if self.warm_kib else 0.0

    def lines(self) -> list[str]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kinds = ", ".join(f"{name} {count:,}" for name, count in self.operations.most_common())
        return [
            f"{self.total:,} operations in {self.seconds:.0f} s "
            f"({self.total / max(self.seconds, 1e-9):,.0f} states/s): {kinds}",
            f"{self.num_finished:,} requests finished, {self.num_loads:,} loads right, "
            f"{self.num_failed_loads:,} loads failed as told, {self.num_checks:,} full checks",
            f"memory {self.memory}, peak {peak / 1024:.1f} MiB",
        ]

    @property
    def memory(self) -> str:
        end = f"{self.end_kib / 1024:.1f} MiB at the end"
        if not self.warm_kib:
            return f"{end} (too short a run to say whether it grows)"
        return f"{self.warm_kib / 1024:.1f} MiB after warm-up, {end} ({self.growth:+.1%})"


def soak(
    operations: int, seed: int, *, seconds: float = float("inf"), talk: bool = False
) -> Report:
    """Live through so many operations, or so many seconds; raises at the first broken promise."""
    report = Report()
    weathers = [
        Weather(Serving(setup), random.Random(f"{seed} {at}")) for at, setup in enumerate(SERVERS)
    ]
    start = last_word = time.monotonic()
    bursts = max(1, operations // (BURST * len(weathers)))
    for burst in range(1, bursts + 1):
        for weather in weathers:
            weather.blow(BURST)
            weather.serving.check()
            if burst % CALM_EVERY == 0:
                weather.serving.quiesce()
            report.num_checks += 1
        now = time.monotonic()
        done = burst * BURST * len(weathers)
        if not report.warm_kib and done >= WARM_UP:
            report.warm_kib = resident_kib()
        if talk and now - last_word > 5.0:
            last_word = now
            print(f"  {done:,} operations, {resident_kib() / 1024:.1f} MiB", flush=True)
        if now - start > seconds:
            break
    report.end_kib = resident_kib()
    for weather in weathers:
        weather.serving.quiesce()
        weather.serving.drain()
        report.operations += weather.counts
        report.num_loads += weather.serving.num_loads
        report.num_failed_loads += weather.serving.num_failed
        report.num_finished += weather.serving.num_finished
    report.seconds = time.monotonic() - start
    return report


def resident_kib() -> int:
    """Memory this process has in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, usage="make soak ARGS='...'")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    args = parser.parse_args()
    print(f"soak: {args.operations:,} operations, seed {args.seed}", flush=True)
    report = soak(args.operations, args.seed, seconds=args.seconds, talk=True)
    print("\n".join(report.lines()))
    if report.growth > MAX_GROWTH:
        print(f"memory grew by {report.growth:.1%}, more than {MAX_GROWTH:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
