"""A tier of many places on the scheduler's side: bytes of memory, and how fast it is restored.

Every place holds a block of an earlier life, whose ranks name its key and place in the order of
writing. The table gives what all ranks agreeing and taking up costs, the memory that stays, and the
peak on the way. ``--json FILE`` also writes the figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from pathlib import Path

import numpy as np

from kvferry.cache.pool import Pool
from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.scheduler.tier import SlotTier
from kvferry.types import TierName

GIB = 1 << 30
TIER_BYTES = 16
"""A place costs the tier itself so much: what proves its block."""
MOST_GIB, MOST_SECONDS = 1.5, 30.0


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(77)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--places", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    num_places = options.places
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 63, (num_places, KEY_WORDS), dtype=np.uint64)
    # As an earlier life left it: conversations in runs, which came in any order.
    runs = rng.permutation(-(-num_places // 64))
    places = (runs[:, None] * 64 + np.arange(64)).reshape(-1)
    places = places[places < num_places]
    told = [(Keys(words), places)] * options.ranks
    before = resident()
    start = time.perf_counter()
    tier = SlotTier(TierName("disk"), Pool(num_places))
    made = time.perf_counter() - start
    empty = resident() - before
    start = time.perf_counter()
    count = tier.restore(told)
    restored = time.perf_counter() - start
    assert count == num_places
    stays = resident() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    few = Keys(words[:8192])
    start = time.perf_counter()
    assert tier.pool.cached(few).all()
    look = time.perf_counter() - start
    with_tier = stays + TIER_BYTES * num_places
    figures = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "places": num_places,
        "ranks": options.ranks,
        "made_seconds": made,
        "restored_seconds": restored,
        "empty_gib": empty / GIB,
        "full_gib": stays / GIB,
        "with_tier_gib": with_tier / GIB,
        "peak_gib": peak / GIB,
        "bytes_per_place": stays / num_places,
        "look_up_8192_ms": look * 1e3,
    }
    print(f"{num_places:,} places, {options.ranks} rank(s) tell what they have\n")
    print("| | measured | bound |\n|---|---|---|")
    print(f"| made | {made:.2f} s | |")
    print(f"| restored | {restored:.2f} s | {MOST_SECONDS:.0f} s, with the index's recovery |")
    print(f"| memory, full | {stays / GIB:.2f} GiB ({stays / num_places:.0f} bytes a place) | |")
    print(
        f"| with {TIER_BYTES} bytes a place of the tier | {with_tier / GIB:.2f} GiB | {MOST_GIB} |"
    )
    print(f"| peak while restoring, what was told not counted | {peak / GIB:.2f} GiB | |")
    print(f"| look up 8192 keys, first time | {look * 1e3:.2f} ms | |")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    if with_tier > MOST_GIB * GIB or restored > MOST_SECONDS:
        raise SystemExit("over the bound")


if __name__ == "__main__":
    main()
