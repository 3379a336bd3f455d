"""How long a short copy of the model's own waits beside a long one of ours.

    PYTHONPATH=src python bench/short_copies.py --json short-copies.json

A model copies its inputs to the card before every forward pass, and its tokens back. Here such a
copy, from or to pinned memory on a stream of its own, is made 3 ms after a load or store of 918 MB
was ordered through ``kvferry.attach``, and timed from the call to its end. Each path in turn, and
the staged path as it was before its copies took turns on two streams. Needs a GPU and torch; exits
with 77 without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from call_to_done import Rig, about, what_is_missing
from kvferry.cli.bench_copy_tables import table
from kvferry.device.paths.turns import Turns
from kvferry.device.planning.base import FixedPlanner
from kvferry.quantities import KiB, format_size

SKIPPED = 77
NUM_BLOCKS, PAGE_BYTES = 1000, 32 * KiB
SIZES = (64, 4 * KiB, 64 * KiB, 256 * KiB)
WAYS = ("staged", "staged, one stream", "kernel")
HEAD_START = 3e-3


@contextmanager
def way_of(rig: Rig, way: str) -> Iterator[None]:
    """Copies go this way meanwhile."""
    engine: Any = rig.ferry._rank.engine
    planner, take = engine._planner, Turns.take
    engine._planner = FixedPlanner(*[way.partition(",")[0]] * 2)
    if "one stream" in way:
        Turns.take = lambda self, **_: self.streams[0]  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine._planner = planner
        Turns.take = take  # type: ignore[method-assign]


class Short:
    """A short copy each way, on a stream of its own."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def seconds(self, *, to_device: bool) -> float:
        """From the call to its end."""
        ends = (self._device, self._host)[:: 1 if to_device else -1]
        began = time.perf_counter()
        with self._torch.cuda.stream(self._stream):
            ends[0].copy_(ends[1], non_blocking=True)
            done = self._stream.record_event()
        while not done.query():
            pass
        return time.perf_counter() - began


def measure(rig: Rig, rounds: int) -> list[dict[str, Any]]:
    shorts = {size: Short(size) for size in SIZES}
    keys, blocks = rig.keys(NUM_BLOCKS), rig.blocks(NUM_BLOCKS)
    rig.wait(rig.ferry.store(keys, blocks))
    found: dict[tuple[str, str, int], list[float]] = {}
    copies: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for way in WAYS:
            for size, short in shorts.items():
                with way_of(rig, way):
                    ticket = rig.ferry.load(rig.ferry.match(keys), blocks)
                    load = beside(rig, ticket, short, to_device=True)
                    rig.ferry.drop(keys)
                    store = beside(rig, rig.ferry.store(keys, blocks), short, to_device=False)
                if number:  # the first of each makes kernels and buffers
                    for verb, (waited, copied) in (("load", load), ("store", store)):
                        found.setdefault((verb, way, size), []).append(waited)
                        copies.setdefault((verb, way), []).append(copied)
    alone = {
        (verb, size): statistics.median(short.seconds(to_device=verb == "load") for _ in range(9))
        for verb in ("load", "store")
        for size, short in shorts.items()
    }
    return [
        {
            "beside": verb,
            "way": way,
            "copy_ms": 1e3 * statistics.median(copies[verb, way]),
            "waits_ms": {size: 1e3 * statistics.median(found[verb, way, size]) for size in SIZES},
            "alone_ms": {size: 1e3 * alone[verb, size] for size in SIZES},
        }
        for verb in ("load", "store")
        for way in WAYS
    ]


def beside(rig: Rig, ticket: Any, short: Short, *, to_device: bool) -> tuple[float, float]:
    """Seconds of the short copy, and of the long one on the device's clock."""
    end = time.perf_counter() + HEAD_START
    while time.perf_counter() < end:
        pass
    waited = short.seconds(to_device=to_device)
    assert rig.wait(ticket).ok
    return waited, rig.last_receipt.seconds


def report(rows: list[dict[str, Any]]) -> str:
    heads = ("beside a", "path", "takes ms", *(format_size(size) for size in SIZES))
    cells = [
        (
            row["beside"],
            row["way"],
            f"{row['copy_ms']:.2f}",
            *(f"{row['waits_ms'][size]:.2f}" for size in SIZES),
        )
        for row in rows
    ]
    cells += [
        (row["beside"], "nothing beside it", "", *(f"{row['alone_ms'][s]:.2f}" for s in SIZES))
        for row in rows[:: len(WAYS)]
    ]
    return table(heads, cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    missing = what_is_missing()
    if missing:
        print(missing)
        return SKIPPED
    rig = Rig(PAGE_BYTES, NUM_BLOCKS, 3 << 30)
    rows = measure(rig, args.rounds)
    rig.close()
    facts = about()
    print(json.dumps(facts))
    print("milliseconds from the call of a short copy to its end:\n")
    print(report(rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"provenance": facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
