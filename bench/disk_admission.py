"""Which blocks should go to disk: all that host memory drops, or only those asked for again?

Replays a trace of requests through the real scheduler, its host pool and a tier of the size of a
disk, with copies that end at once, and counts where each request's blocks came from. A block is one
of the trace's, of 512 tokens. Prints a table; ``--trace FILE`` names the trace (JSON lines with
``hash_ids``, as published with the Mooncake paper).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import WriteMode, lower_tier
from kvferry.types import FIRST_RANK, MatchState, Outcome, Receipt, TierName

DISK = TierName("disk")
TOKENS = 512
AFTER = ("all", "requested-twice")


def keys_of(ids: list[int]) -> Keys:
    """Every id a key of its own: the words are spread as a digest's are."""
    words = np.array(ids, dtype=np.uint64)[:, None] + np.arange(4, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
        words ^= words >> np.uint64(31)
    return Keys(words)


class Replay:
    """One scheduler over one trace. Owns the counts."""

    def __init__(self, after: str, write: str, num_host: int, num_disk: int) -> None:
        self.now = 0.0
        self.tier = lower_tier(DISK, num_disk, WriteMode(write))
        config = Config.from_dict({"load_policy": "always", "disk_admission": after})
        self.scheduler = Scheduler(
            Pool(num_host, clock=lambda: self.now),
            [FullAttention(TOKENS)],
            config=config,
            block_bytes=[1 << 20],
            tiers=[self.tier],
            joins_loads=False,
            clock=lambda: self.now,
        )
        self.asked = self.host = self.disk = self.written = 0

    def settle(self) -> None:
        for _ in range(100):
            plan = self.scheduler.plan()
            self.written += sum(len(t) for t in plan.transfers if t.dst == DISK)
            if not plan.transfers:
                return
            ok = [Receipt(t.id, FIRST_RANK, Outcome.OK) for t in plan.transfers]
            self.scheduler.settle(ok)

    def serve(self, name: str, keys: Keys) -> None:
        request = self.scheduler.open(name, keys)
        table = [np.arange(len(keys))]
        first = self.scheduler.pool.match(keys)
        while (match := request.match()).state is MatchState.WAIT:
            self.settle()
        found = match.num_tokens // TOKENS
        self.asked += len(keys)
        self.host += min(first, found)
        self.disk += max(0, found - first)
        if match.state is MatchState.HIT:
            request.load(table)
            self.settle()
        request.store(table, len(keys) * TOKENS)
        request.end()
        self.settle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--host", type=int, nargs="+", default=[1000, 3000])
    parser.add_argument("--disk", type=int, nargs="+", default=[4, 16], help="times the host")
    parser.add_argument("--requests", type=int, default=None)
    options = parser.parse_args()
    lines = options.trace.read_text().splitlines()[: options.requests]
    requests = [(r["timestamp"] / 1000, keys_of(r["hash_ids"])) for r in map(json.loads, lines)]
    print(f"{len(requests)} requests of {options.trace.name}\n")
    print("| host | disk | written | hit ratio | of it disk | written per disk hit | s |")
    print("|---|---|---|---|---|---|---|")
    for num_host in options.host:
        for times in options.disk:
            for write, after in (("spill", AFTER[0]), ("spill", AFTER[1]), ("through", AFTER[0])):
                start = time.perf_counter()
                replay = Replay(after, write, num_host, times * num_host)
                for number, (at, keys) in enumerate(requests):
                    replay.now = max(replay.now, at)
                    replay.serve(f"r{number}", keys)
                replay.scheduler.check_integrity()
                hit = (replay.host + replay.disk) / replay.asked
                below = replay.disk / replay.asked
                each = replay.written / max(1, replay.disk)
                words = f"{write}, {after}" if write == "spill" else write
                took = time.perf_counter() - start
                print(
                    f"| {num_host} | {times * num_host} | {words} | {hit:.3f} | {below:.3f} "
                    f"| {each:.2f} | {took:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
