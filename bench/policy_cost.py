"""What an eviction policy costs the scheduler's thread, beside LRU in the same run, by pool size.

Chats come back, new ones begin, and the pool is full: every request is looked up, used, and what is
new of it stored in the place of others, as the scheduler does it. Requests take turns between the
policies, so that both have the same share of whatever else the machine does. Times are those of the
thread, so what others do to the processor counts only by its caches.

It exits with 1 where a policy takes more than LIMIT times as long a request as LRU, or more than
MOST_BYTES for a slot of a large pool.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import time
import tracemalloc
from datetime import datetime, timezone
from random import Random

import numpy as np

import kvferry
from kvferry.cache.policies import policy_named
from kvferry.cache.replay import PoolReplay
from kvferry.telemetry.traces import keys_of_numbers

LIMIT = 1.2
MOST_BYTES = 200


class Chats:
    """Requests by number of blocks: conversations that grow, some of which return."""

    def __init__(self, blocks: int, seed: int) -> None:
        self._rng = Random(seed)
        self._open: list[list[int]] = []
        self._next = 1
        self._blocks = blocks

    def request(self) -> list[int]:
        """The blocks of the next one."""
        rng = self._rng
        goes_on = bool(self._open) and rng.random() < 0.5
        chat = self._open.pop(rng.randrange(len(self._open))) if goes_on else [0]
        new = max(1, int(self._blocks * rng.expovariate(1.0) / (4 if goes_on else 1)))
        chat = [*chat, *range(self._next, self._next + new)]
        self._next += new
        if len(chat) < 8 * self._blocks:
            self._open.append(chat)
        if len(self._open) > 4096:
            self._open.pop(0)
        return chat


def measure(policies: list[str], num_slots: int, blocks: int, count: int) -> dict[str, float]:
    """Seconds of the thread that a request takes with each policy, once the pool is full."""
    chats = Chats(blocks, 7)
    replays = {name: PoolReplay(num_slots, policy_named(name)) for name in policies}
    spent: dict[str, list[float]] = {name: [] for name in policies}
    at, measured = 0.0, 0
    gc.disable()
    while measured < count:
        at += 0.3
        keys = keys_of_numbers(np.array(chats.request(), dtype=np.uint64))
        full = all(replay.pool.num_free < blocks for replay in replays.values())
        for name, replay in replays.items():
            began = time.thread_time()
            replay.serve(keys, len(keys), at, None, 16 * len(keys))
            if full:
                spent[name].append(time.thread_time() - began)
        measured += full
    gc.enable()
    return {name: float(np.mean(times)) for name, times in spent.items()}


def bytes_of_slot(policy: str, num_slots: int = 50_000, blocks: int = 24) -> float:
    """Memory of a policy, its history full, divided by the slots; the pool's own is left out."""

    def used(name: str) -> int:
        chats = Chats(blocks, 7)
        gc.collect()
        tracemalloc.start()
        replay, at = PoolReplay(num_slots, policy_named(name)), 0.0
        while replay.stored < 4 * num_slots and at < 30_000:
            at += 0.3
            keys = keys_of_numbers(np.array(chats.request(), dtype=np.uint64))
            replay.serve(keys, len(keys), at, None, 16 * len(keys))
        del chats
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size

    return (used(policy) - used("lru")) / num_slots


def main() -> None:
    """Measure, print a table, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default="lru,returns")
    parser.add_argument("--slots", default="10000,100000,1000000")
    parser.add_argument("--blocks", default="24,512", help="of a request, about")
    parser.add_argument("--requests", type=int, default=3000)
    asked = parser.parse_args()
    policies = asked.policies.split(",")
    if "lru" not in policies:
        parser.error("--policies must have lru, to compare with")
    today = datetime.now(timezone.utc).date()
    print(f"kvferry {kvferry.__version__}, Python {platform.python_version()}, {today}")
    print(f"{'slots':>9} {'blocks':>7}", *(f"{name:>12}" for name in policies), "  us a request")
    worst = 0.0
    for blocks in map(int, asked.blocks.split(",")):
        for num_slots in map(int, asked.slots.split(",")):
            found = measure(policies, num_slots, blocks, asked.requests)
            row = [f"{found[name] * 1e6:12.0f}" for name in policies]
            print(f"{num_slots:>9} {blocks:>7}", *row, flush=True)
            worst = max(worst, *(found[name] / found["lru"] for name in policies))
    print(f"At most {worst:.2f} times LRU; the limit is {LIMIT}.")
    used = max(bytes_of_slot(name) for name in policies)
    print(f"At most {used:.0f} bytes for a slot; the limit is {MOST_BYTES}.")
    sys.exit(worst > LIMIT or used > MOST_BYTES)


if __name__ == "__main__":
    main()
