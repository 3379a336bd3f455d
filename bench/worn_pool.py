"""How scattered host memory gets: runs per transfer after a day of traffic, placed in two ways.

    PYTHONPATH=src python bench/worn_pool.py [--trace trace.jsonl]

Replays traffic through the real pool, without bytes: each request's hit is loaded, what is missing
is stored when it ends. A copy takes a run of neighbouring slots at a time, so runs per transfer is
what scattering costs. `as they come` is what host memory does, `side by
side` what tiers do. Times are the thread's own. Traffic is made (`made_traces.py`: two days of
chats, an hour of agents), or read from a file in the Mooncake format, whose blocks of 512 tokens
are cut into as many of 16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.types import SlotArray
from made_traces import Maker

BLOCK_TOKENS = 16
PLACINGS: dict[str, dict[str, Any]] = {
    "as they come": {},
    "side by side": {"placed": True},
}
WARM = 0.5
"""This part of the requests is not counted: the pool is not worn yet."""


@dataclass
class Moves:
    """Transfers of one kind: how many, in how many runs, of how many blocks."""

    transfers: int = 0
    runs: int = 0
    blocks: int = 0

    def add(self, slots: SlotArray) -> None:
        self.transfers += 1
        self.runs += 1 + int(np.count_nonzero(slots[1:] != slots[:-1] + 1))
        self.blocks += len(slots)

    def __str__(self) -> str:
        count = max(1, self.transfers)
        return f"{self.runs / count:.1f} for {self.blocks / count:.0f} blocks"


def keys_of(numbers: Iterable[int], cut: int) -> Keys:
    """A key for each block; ``cut`` of them for each number."""
    ids = np.fromiter(numbers, np.uint64)
    mixed: npt.NDArray[np.uint64] = ids.repeat(cut) * np.uint64(cut)
    mixed += np.tile(np.arange(cut, dtype=np.uint64), len(ids))
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
    words = np.empty((len(mixed), 4), np.uint64)
    for word in range(4):
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        words[:, word] = mixed
    return Keys(words)


def replay(requests: list[list[int]], cut: int, num_slots: int, placing: dict[str, Any]) -> str:
    pool = Pool(num_slots, **placing)
    stores, loads = Moves(), Moves()
    seconds, num_reserved, num_hits, num_asked = 0.0, 0, 0, 0
    for number, ids in enumerate(requests):
        keys, is_counted = keys_of(ids, cut), number >= WARM * len(requests)
        reading = pool.lease(keys)
        hit = len(reading) if reading is not None else 0
        if reading is not None:
            if is_counted:
                loads.add(reading.slots)
            reading.release()
        if is_counted:
            num_hits += hit
            num_asked += len(keys)
        if hit == len(keys):
            continue
        began = time.thread_time()
        writing = pool.reserve(keys[hit:], parent=keys[hit - 1] if hit else None)
        if is_counted:
            seconds += time.thread_time() - began
            num_reserved += 1
        if writing is not None:
            if is_counted:
                stores.add(writing.slots)
            writing.commit()
    pool.check_integrity()
    cost = seconds / max(1, num_reserved) * 1e6
    return f"{stores} | {loads} | {num_hits / num_asked:.4f} | {cost:.0f}"


def made(kind: str, limit: int) -> list[list[int]]:
    maker = Maker(1, BLOCK_TOKENS, 1.0)
    events = sorted(getattr(maker, kind)(), key=lambda event: event[0])
    return [text.ids for _, text, _ in events][:limit]


def read(path: Path, limit: int) -> Iterator[list[int]]:
    with path.open() as lines:
        for _, line in zip(range(limit), lines, strict=False):
            yield json.loads(line)["hash_ids"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a file in the Mooncake format")
    parser.add_argument("--requests", type=int, default=12_000, help="at most, of each")
    args = parser.parse_args()
    traffic = [
        ("chats, 100,000 slots", made("diurnal", args.requests), 1, 100_000),
        ("agents, 40,000 slots", made("agents", args.requests), 1, 40_000),
    ]
    if args.trace is not None:
        requests = list(read(args.trace, args.requests))
        traffic.append(
            (f"{args.trace.stem}, 300,000 slots", requests, 512 // BLOCK_TOKENS, 300_000)
        )
    print("| traffic | placed | runs per store | runs per load | hits | us per reserve |")
    print("|---|---|---|---|---|---|")
    for name, requests, cut, num_slots in traffic:
        for how, placing in PLACINGS.items():
            line = replay(requests, cut, num_slots, placing)
            print(f"| {name} | {how} | {line} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
