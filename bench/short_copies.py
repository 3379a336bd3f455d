"""How long a short copy of the model's own waits beside a long one of ours.

    PYTHONPATH=src python bench/short_copies.py --json short-copies.json

A model copies its inputs to the card before every forward pass, and its tokens back. Here such a
copy, from or to pinned memory on a stream of its own, is made 3 ms after a load or store of 918 MB
was ordered through ``kvferry.attach``, and timed from the call to its end: beside each path in
turn, and beside one long queue of copies that never wait for anything. A card's copy engine stays
with such a queue until it is through; it looks for other copies where one has to wait, as those of
the staged path do for their slot of the ring. Needs a GPU and torch; exits with 77 without.
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

from _card import about, what_is_missing
from _tables import table
from call_to_done import Rig
from kvferry.core.quantities import KiB, MiB, format_size
from kvferry.transfer.planner.choose import Planner

SKIPPED = 77
NUM_BLOCKS, PAGE_BYTES = 1000, 32 * KiB
SIZES = (64, 4 * KiB, 64 * KiB, 256 * KiB)
WAYS = ("staged", "kernel")
QUEUE = "plain copies"
NUM_PLAIN, PLAIN_BYTES = 56, 16 * MiB
HEAD_START = 3e-3


@contextmanager
def way_of(rig: Rig, way: str) -> Iterator[None]:
    """Copies go this way meanwhile."""
    engine: Any = rig.ferry._rank.engine
    planner, engine._planner = (
        engine._planner,
        Planner(engine._planner.profile, engine._paths, pinned=way),
    )
    try:
        yield
    finally:
        engine._planner = planner


class Plain:
    """As many bytes in copies of 16 MiB on one stream, one right behind the other."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._host = torch.empty(NUM_PLAIN, PLAIN_BYTES, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(PLAIN_BYTES, dtype=torch.uint8, device="cuda")

    def beside(self, short: Short, *, to_device: bool) -> tuple[float, float]:
        """Seconds of a short copy, and of the long ones on the device's clock."""
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record(self._stream)
        with self._torch.cuda.stream(self._stream):
            for row in self._host:
                ends = (self._device, row)[:: 1 if to_device else -1]
                ends[0].copy_(ends[1], non_blocking=True)
        events[1].record(self._stream)
        pause()
        waited = short.seconds(to_device=to_device)
        self._torch.cuda.synchronize()
        return waited, events[0].elapsed_time(events[1]) / 1e3


def pause() -> None:
    end = time.perf_counter() + HEAD_START
    while time.perf_counter() < end:
        pass


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

    def alone(self, *, to_device: bool) -> float:
        return statistics.median(self.seconds(to_device=to_device) for _ in range(9))


def measure(rig: Rig, rounds: int) -> list[dict[str, Any]]:
    shorts = {size: Short(size) for size in SIZES}
    plain = Plain()
    keys, blocks = rig.keys(NUM_BLOCKS), rig.blocks(NUM_BLOCKS)
    rig.wait(rig.ferry.store(keys, blocks))
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for size, short in shorts.items():
            here = {("load", QUEUE): plain.beside(short, to_device=True)}
            here["store", QUEUE] = plain.beside(short, to_device=False)
            for way in WAYS:
                with way_of(rig, way):
                    here["load", way], here["store", way] = ours(rig, keys, blocks, short)
            if number:  # the first of each makes kernels and buffers
                for (verb, way), one in here.items():
                    found.setdefault((verb, way, size), []).append(one)
    return [
        {
            "beside": verb,
            "way": way,
            "copy_ms": 1e3
            * statistics.median(one[1] for s in SIZES for one in found[verb, way, s]),
            "waits_ms": {
                s: 1e3 * statistics.median(o[0] for o in found[verb, way, s]) for s in SIZES
            },
            "alone_ms": {s: 1e3 * shorts[s].alone(to_device=verb == "load") for s in SIZES},
        }
        for verb in ("load", "store")
        for way in (*WAYS, QUEUE)
    ]


def ours(rig: Rig, keys: Any, blocks: Any, short: Short) -> list[tuple[float, float]]:
    """Seconds of a short copy and of the long one, beside a load and beside a store."""
    found = []
    for verb in ("load", "store"):
        if verb == "load":
            ticket = rig.ferry.load(rig.ferry.match(keys), blocks)
        else:
            rig.ferry.drop(keys)
            ticket = rig.ferry.store(keys, blocks)
        pause()
        waited = short.seconds(to_device=verb == "load")
        assert rig.wait(ticket).ok
        found.append((waited, rig.last_receipt.seconds))
    return found


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
        for row in rows[:: len(WAYS) + 1]
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
