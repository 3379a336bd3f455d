"""How long ``kvferry simulate`` takes for a long trace, and what memory: a made-up one.

::

    python bench/simulate_speed.py --requests 1000000

Conversations begin, come back after minutes, grow, and end; a prompt has 24 blocks of 512 tokens on
average, as in the public conversation trace.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from random import Random

from kvferry.settings.eviction import POLICIES
from kvferry.sim.simulation import Simulation, Trial, simulate

BLOCK_TOKENS = 512
RATE = 3.4  # requests per second


def write(path: Path, num_requests: int, seed: int = 1) -> None:
    """A trace of so many requests, three in ten of which go on with a conversation."""
    chance = Random(seed)
    talks: list[list[int]] = []
    next_id = 1
    with path.open("w", encoding="ascii") as file:
        for number in range(num_requests):
            if talks and chance.random() < 0.4:
                talk = talks[-1 - min(len(talks) - 1, int(chance.expovariate(1 / 400)))]
            else:
                talk = [0]
                talks.append(talk)
                if len(talks) > 5000:
                    del talks[:1000]
            more = 1 + int(chance.expovariate(1 / 16))
            talk.extend(range(next_id, next_id + more))
            next_id += more
            tokens = BLOCK_TOKENS * len(talk) - chance.randrange(BLOCK_TOKENS)
            line = {
                "timestamp": round(1000 * number / RATE),
                "input_length": tokens,
                "output_length": 200,
                "hash_ids": talk,
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            if len(talk) > 150:
                talks.remove(talk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--capacity", type=int, default=10_000)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--jobs", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made.jsonl")
        write(path, arguments.requests)
        trials = tuple(
            Trial(policy, (arguments.capacity,)) for policy in arguments.policies.split(",")
        )
        began = time.perf_counter()
        found = simulate(Simulation(paths=(path,), trials=trials, jobs=arguments.jobs))
        seconds = time.perf_counter() - began
        size = path.stat().st_size
    trace = found.trace
    print(
        f"{trace.num_requests:,} requests, {trace.num_blocks:,} blocks, {size / 1e6:.0f} MB, "
        f"{arguments.capacity:,} blocks of memory"
    )
    print("| policy | hit ratio | processor time of a request, us |")
    print("|---|---|---|")
    for score in (*found.bounds, *found.scores):
        each = score.seconds / trace.num_requests * 1e6
        print(f"| {score.trial.policy} | {score.hit_ratio:.4f} | {each:.0f} |")
    most = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(f"{seconds:.0f} s in all, at most {most / 1024:.0f} MiB in one process")


if __name__ == "__main__":
    main()
