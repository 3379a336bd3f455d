"""What one waiting request costs the scheduler per step, while others commit stores.

A request of 8192 blocks waits (for device blocks, say) and is looked up again in every step.
Between the steps another request stores a block, so the pool has something new every time. The
first look walks all keys; after it a step must cost less than 50 µs, whatever the request hits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.config import Config
from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.transfers import NO_BLOCK
from kvferry.types import FIRST_RANK, Outcome, Receipt

BLOCKS = 8192
BLOCK_TOKENS = 16
MOST_US = 50.0


@dataclass
class Row:
    """One kind of waiting request; microseconds."""

    case: str
    first_us: float
    step_us: float
    p99_us: float


GROUPS: dict[str, tuple[reach.Group, ...]] = {
    "full": (reach.FullAttention(BLOCK_TOKENS),),
    "full+window": (
        reach.FullAttention(BLOCK_TOKENS),
        reach.SlidingWindow(BLOCK_TOKENS, window=1024),
    ),
}
STORED = {"nothing": 0, "half": BLOCKS // 2, "everything": BLOCKS, "few windows": BLOCKS}


def chain(count: int, seed: int) -> Keys:
    rng = np.random.default_rng(seed)
    return Keys(rng.integers(0, 1 << 63, (count, KEY_WORDS), dtype=np.uint64))


def settle_all(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    scheduler.settle([Receipt(t.id, FIRST_RANK, Outcome.OK) for t in plan.transfers])


def measure(model: str, stored: str, steps: int) -> Row:
    groups = GROUPS[model]
    scheduler = Scheduler(
        Pool(4 * BLOCKS * len(groups)), groups, config=Config(load_policy="always")
    )
    waiting = chain(BLOCKS, 1)
    if STORED[stored]:
        tables = [list(range(BLOCKS)) for _ in groups]
        if stored == "few windows":  # the hit is stopped by them, not by full attention
            tables[-1][BLOCKS // 2 :] = [NO_BLOCK] * (BLOCKS // 2)
        earlier = scheduler.open("earlier", waiting)
        earlier.store(tables, STORED[stored] * BLOCK_TOKENS)
        settle_all(scheduler)
        earlier.end()
    request, other = scheduler.open("waiting", waiting), scheduler.open("other", chain(steps, 2))
    table = [list(range(BLOCKS, BLOCKS + steps)) for _ in groups]
    limit = BLOCKS * BLOCK_TOKENS - 1
    start = time.perf_counter()
    request.match(max_tokens=limit)
    first = time.perf_counter() - start
    times = []
    for step in range(steps):
        other.store(table, (step + 1) * BLOCK_TOKENS)
        settle_all(scheduler)
        start = time.perf_counter()
        request.match(max_tokens=limit)
        times.append(time.perf_counter() - start)
    scheduler.close()
    times.sort()
    step_us = 1e6 * statistics.median(times)
    p99 = 1e6 * times[int(0.99 * (len(times) - 1))]
    return Row(f"{model}, {stored} stored", 1e6 * first, step_us, p99)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    steps = 50 if arguments.quick else 500
    rows = [measure(model, stored, steps) for model in GROUPS for stored in STORED]
    print(f"a waiting request of {BLOCKS} blocks; µs per look-up\n")
    print(f"{'request':<32}{'first look':>12}{'each step':>12}{'p99':>10}")
    for row in rows:
        kept = "" if row.step_us < MOST_US else f"  above {MOST_US:g}"
        print(f"{row.case:<32}{row.first_us:>12.0f}{row.step_us:>12.1f}{row.p99_us:>10.1f}{kept}")
    if arguments.json is not None:
        figures = {"blocks": BLOCKS, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
