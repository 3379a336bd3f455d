"""What a caller of the library waits for: from the call to `Done`, by wall clock.

    PYTHONPATH=src python bench/call_to_done.py --json call-to-done.json

Stores and loads of one request through `kvferry.attach`, against one large pinned copy of as many
bytes in the same run, in turn; how long `load` and `store` themselves hold their caller; four
requests queued in a pool that churn has worn; small requests, look-up included. Every load is
compared with what was stored. Needs a GPU and torch; exits with 77 without.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvferry
from kvferry.quantities import KiB, MiB, parse_size

SKIPPED = 77
LAYERS = 28
BLOCK_TOKENS = 16


class Rig:
    """KV tensors of one page size, a ferry for them, and fresh keys for every request."""

    def __init__(self, page_bytes: int, num_blocks: int, host: int) -> None:
        import torch

        self.torch = torch
        self.page_bytes = page_bytes
        self.block_bytes = page_bytes * LAYERS
        self.num_blocks = num_blocks
        shape = (num_blocks, page_bytes // 2)
        self.kv = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
        self.ferry = kvferry.attach(self.kv, model="bench", host=host, block_tokens=BLOCK_TOKENS)
        while self.ferry.host_stats().ready_slots < self.ferry.host_stats().num_slots:
            self.ferry.poll()
            time.sleep(0.01)
        self.rng = np.random.default_rng(7)

    def keys(self, count: int) -> Any:
        return self.ferry.keys(self.rng.integers(0, 1 << 40, count * BLOCK_TOKENS))

    def blocks(self, count: int) -> Any:
        return self.rng.permutation(self.num_blocks)[:count]

    def fill(self, blocks: Any) -> Any:
        """Fresh bytes in these blocks; what they are."""
        torch = self.torch
        index = torch.from_numpy(blocks).cuda()
        sums = []
        for layer in self.kv:
            fresh = torch.randint(-30000, 30000, (len(blocks), layer.shape[1]), device="cuda")
            fresh = fresh.to(torch.int16)
            layer.view(torch.int16)[index] = fresh
            sums.append(fresh.view(len(blocks), -1).to(torch.int64).sum(1))
        torch.cuda.synchronize()
        return torch.stack(sums)

    def poison(self, blocks: Any) -> None:
        index = self.torch.from_numpy(blocks).cuda()
        for layer in self.kv:
            layer[index] = 7
        self.torch.cuda.synchronize()

    def wrong(self, blocks: Any, sums: Any) -> int:
        torch = self.torch
        index = torch.from_numpy(blocks).cuda()
        found = torch.stack(
            [layer.view(torch.int16)[index].to(torch.int64).sum(1) for layer in self.kv]
        )
        return int((found != sums).sum())

    def close(self) -> None:
        self.ferry.close()


def pinned_copy(num_bytes: int, to_device: bool) -> Callable[[], float]:
    """One large copy between pinned and device memory: seconds by wall clock."""
    import torch

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def once() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        if to_device:
            device.copy_(host, non_blocking=True)
        else:
            host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    return once


def one_request(rig: Rig, num_bytes: int, rounds: int) -> dict[str, Any]:
    """One request at a time, store then load, each beside the same bytes in one pinned copy."""
    count = max(1, num_bytes // rig.block_bytes)
    out, back = (pinned_copy(count * rig.block_bytes, way) for way in (False, True))
    seconds: dict[str, list[float]] = {
        name: [] for name in ("store", "store_call", "pin_out", "load", "load_call", "pin_in")
    }
    wrong = 0
    for _ in range(rounds):
        keys, blocks = rig.keys(count), rig.blocks(count)
        sums = rig.fill(blocks)
        seconds["pin_out"].append(out())
        began = time.perf_counter()
        ticket = rig.ferry.store(keys, blocks)
        seconds["store_call"].append(time.perf_counter() - began)
        done = rig.ferry.wait(ticket)
        seconds["store"].append(time.perf_counter() - began)
        assert done.ok
        assert done.num_blocks == count, done
        rig.poison(blocks)
        seconds["pin_in"].append(back())
        began = time.perf_counter()
        hit = rig.ferry.match(keys)
        called = time.perf_counter()
        ticket = rig.ferry.load(hit, blocks)
        seconds["load_call"].append(time.perf_counter() - called)
        done = rig.ferry.wait(ticket)
        seconds["load"].append(time.perf_counter() - began)
        assert done.ok, done
        assert done.num_blocks == count, done
        wrong += rig.wrong(blocks, sums)
    best = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "bytes": count * rig.block_bytes,
        "page_bytes": rig.page_bytes,
        "wrong": wrong,
        "store_of_pinned": best["pin_out"] / best["store"],
        "load_of_pinned": best["pin_in"] / best["load"],
        **{f"{name}_ms": value * 1e3 for name, value in best.items()},
    }


def queued_in_worn_pool(rig: Rig, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Four requests at once in a pool whose slots churn has scattered."""
    count = max(1, num_bytes // rig.block_bytes)
    wear(rig)
    out, back = (pinned_copy(4 * count * rig.block_bytes, way) for way in (False, True))
    ratios: dict[str, list[float]] = {"store": [], "load": []}
    wrong = 0
    for _ in range(rounds):
        requests = [(rig.keys(count), blocks) for blocks in rig.blocks(4 * count).reshape(4, -1)]
        sums = [rig.fill(blocks) for _, blocks in requests]
        limit = out()
        began = time.perf_counter()
        for ticket in [rig.ferry.store(keys, blocks) for keys, blocks in requests]:
            assert rig.ferry.wait(ticket).ok
        ratios["store"].append(limit / (time.perf_counter() - began))
        for _, blocks in requests:
            rig.poison(blocks)
        limit = back()
        began = time.perf_counter()
        hits = [rig.ferry.match(keys) for keys, _ in requests]
        tickets = [
            rig.ferry.load(hit, blocks[: len(hit)])
            for hit, (_, blocks) in zip(hits, requests, strict=True)
        ]
        for ticket in tickets:
            assert rig.ferry.wait(ticket).ok
        ratios["load"].append(limit / (time.perf_counter() - began))
        for hit, (_, blocks), expected in zip(hits, requests, sums, strict=True):
            wrong += rig.wrong(blocks[: len(hit)], expected[:, : len(hit)])
    return {
        "bytes": 4 * count * rig.block_bytes,
        "wrong": wrong,
        **{f"{way}_of_pinned": statistics.median(values) for way, values in ratios.items()},
    }


def wear(rig: Rig) -> None:
    """Requests of many lengths, some asked for again, until the pool has turned over thrice."""
    num_slots = rig.ferry.host_stats().num_slots
    stored = 0
    kept: list[Any] = []
    while stored < 3 * num_slots:
        count = int(rig.rng.integers(1, 48))
        keys = rig.keys(count)
        rig.ferry.wait(rig.ferry.store(keys, rig.blocks(count)))
        stored += count
        kept.append(keys)
        if len(kept) > 64:
            old = kept.pop(int(rig.rng.integers(len(kept))))
            rig.ferry.release(rig.ferry.match(old))


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| what | store | load | store() holds | load() holds |",
        "|---|---|---|---|---|",
        *(row_of(row) for row in figures["one"]),
    ]
    worn = figures["worn"]
    lines.append(
        f"| four queued in a worn pool, {worn['bytes'] / 1e6:.0f} MB | "
        f"{worn['store_of_pinned']:.2f} | {worn['load_of_pinned']:.2f} | | |"
    )
    return "\n".join(lines)


def row_of(row: dict[str, Any]) -> str:
    what = f"one request, {row['bytes'] / 1e6:.0f} MB, pages of {row['page_bytes'] // KiB} KiB"
    cells = [
        f"{row[f'{way}_of_pinned']:.2f} ({row[f'{way}_ms']:.2f} of {row[f'{limit}_ms']:.2f} ms)"
        for way, limit in (("store", "pin_out"), ("load", "pin_in"))
    ]
    calls = [f"{row[f'{way}_call_ms']:.2f} ms" for way in ("store", "load")]
    return f"| {' | '.join([what, *cells, *calls])} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--host", type=parse_size, default=6 << 30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("needs torch")
        return SKIPPED
    import torch

    if not torch.cuda.is_available():
        print("needs a GPU")
        return SKIPPED
    figures: dict[str, Any] = {"one": []}
    for page_bytes, sizes in (
        (32 * KiB, (256 * MiB, 918_000_000)),
        (8 * KiB, (16_000_000, 64_000_000)),
    ):
        rig = Rig(page_bytes, 1200 if page_bytes > 8 * KiB else 1600, args.host)
        for num_bytes in sizes:
            one_request(rig, num_bytes, 2)
            figures["one"].append(one_request(rig, num_bytes, args.rounds))
        if page_bytes > 8 * KiB:
            figures["worn"] = queued_in_worn_pool(rig, 64 * MiB, args.rounds)
        rig.close()
    about = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kvferry": kvferry.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join(["python", *sys.argv]),
    }
    print(json.dumps(about))
    print(table(figures))
    wrong = sum(row["wrong"] for row in figures["one"]) + figures["worn"]["wrong"]
    print(f"wrong: {wrong}")
    if args.json is not None:
        args.json.write_text(json.dumps({"provenance": about, "figures": figures}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
