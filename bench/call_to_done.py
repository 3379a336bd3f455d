"""What a caller of the library waits for: from the call to `Done`, by wall clock.

    PYTHONPATH=src python bench/call_to_done.py --json call-to-done.json

Stores and loads of one request through `kvferry.attach`, against one large pinned copy of as many
bytes in the same run, in turn; how long `load` and `store` themselves hold their caller; four
requests queued in a pool that churn has worn; small requests, look-up included. Each is done in two
ways in turn: as it is now, and as it was before callers began copies themselves, compute could wait
for loads that are still being queued, and sleeps ended on time. Every load is compared with what
was stored. Needs a GPU and torch; exits with 77 without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import kvferry
from _card import about, what_is_missing
from kvferry.core.quantities import KiB, MiB, parse_size
from kvferry.transfer.kernels.launch import Kernels

SKIPPED = 77
LAYERS = 28
BLOCK_TOKENS = 16


def kernels_of(engine: Any) -> Iterator[Any]:
    """Whatever a path launches kernels with."""
    for path in engine._paths.values():
        yield from (each for each in vars(path).values() if isinstance(each, Kernels))


class Rig:
    """KV tensors of one page size, a ferry for them, and fresh keys for every request."""

    def __init__(self, page_bytes: int, num_blocks: int, host: int, **settings: Any) -> None:
        import torch

        self.torch = torch
        self.page_bytes = page_bytes
        self.block_bytes = page_bytes * LAYERS
        self.num_blocks = num_blocks
        shape = (num_blocks, page_bytes // 2)
        self.kv = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
        settings = {"host": host, "block_tokens": BLOCK_TOKENS, **settings}
        self.ferry = kvferry.attach(self.kv, model="bench", **settings)
        while self.ferry.host_stats().ready_slots < self.ferry.host_stats().num_slots:
            self.ferry.poll()
            time.sleep(0.01)
        self.rng = np.random.default_rng(7)
        self.kept: list[Any] = []
        self.wait_began = 0.0
        self.last_receipt: Any = None
        self.first_copy = self.end_seen = 0.0
        self._watch(self.ferry._rank.engine)

    def _watch(self, engine: Any) -> None:
        """Note when the first bytes of a call are queued, when their end is seen, and receipts."""
        driver, poll, wait_for_end = engine._driver, engine.poll, engine.wait_for_end
        launch = Kernels.launch

        def noting(queue: Callable[..., None]) -> Callable[..., None]:
            def queued(*args: Any, **named: Any) -> None:
                self.first_copy = self.first_copy or time.perf_counter()
                queue(*args, **named)

            return queued

        def noting_poll() -> list[Any]:
            receipts: list[Any] = poll()
            if receipts:
                self.last_receipt = receipts[-1]
            return receipts

        def noting_news(seconds: float) -> None:
            wait_for_end(seconds)
            self.end_seen = time.perf_counter()

        engine.poll, engine.wait_for_end = noting_poll, noting_news
        for name in ("copy_async", "copy_batch_async"):
            setattr(driver, name, noting(getattr(driver, name)))
        for kernels in kernels_of(engine):
            kernels.launch = noting(launch.__get__(kernels))

    def wait(self, ticket: Any) -> kvferry.Done:
        self.wait_began = time.monotonic()
        return self.ferry.wait(ticket)

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


@contextmanager
def as_before(rig: Rig) -> Iterator[None]:
    """Threads queue all copies, callers wait until that is done, and rest as they used to."""
    engine: Any = rig.ferry._rank.engine

    def rest(_: float) -> None:
        waited = time.monotonic() - rig.wait_began
        time.sleep(min(5e-4, max(2e-5, waited / 50)))
        rig.end_seen = time.perf_counter()

    @contextmanager
    def begun_by_threads(*, compute_waits: bool = False) -> Iterator[None]:
        yield
        if compute_waits:
            engine.order_compute_after_loads()

    replaced = {
        "starting_here": begun_by_threads,
        "_shut_gate": lambda *_: False,
        "wait_for_end": rest,
    }
    kept = dict(vars(engine))
    vars(engine).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(engine)[name]
        vars(engine).update({name: kept[name] for name in replaced if name in kept})


WAYS: dict[str, Callable[[Rig], AbstractContextManager[Any]]] = {
    "now": nullcontext,
    "before": as_before,
}


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


class Times:
    """Seconds by name; the median of each."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def note(self, name: str, seconds: float) -> None:
        self._seconds.setdefault(name, []).append(seconds)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(each) for name, each in self._seconds.items()}


def one_request(rig: Rig, num_bytes: int, rounds: int) -> dict[str, Any]:
    """One request at a time, store then load, each beside the same bytes in one pinned copy."""
    count = max(1, num_bytes // rig.block_bytes)
    out, back = (pinned_copy(count * rig.block_bytes, way) for way in (False, True))
    times = {way: Times() for way in WAYS}
    wrong = 0
    for _ in range(rounds):
        for way, entered in WAYS.items():
            with entered(rig):
                wrong += store_and_load(rig, count, times[way], out, back)
    return {
        "bytes": count * rig.block_bytes,
        "page_bytes": rig.page_bytes,
        "wrong": wrong,
        "load_path": rig.last_receipt.path,
        **{way: each.medians() for way, each in times.items()},
    }


def store_and_load(
    rig: Rig, count: int, times: Times, out: Callable[[], float], back: Callable[[], float]
) -> int:
    keys, blocks = rig.keys(count), rig.blocks(count)
    sums = rig.fill(blocks)
    times.note("pin_out", out())
    rig.first_copy = rig.end_seen = 0.0
    began = time.perf_counter()
    ticket = rig.ferry.store(keys, blocks)
    called = time.perf_counter()
    done = rig.wait(ticket)
    stored = time.perf_counter()
    assert done.ok
    if done.num_blocks < count:  # the policy would rather keep what is there
        rig.ferry.reset()
        return 0
    times.note("store_call", called - began)
    times.note("store", stored - began)
    times.note("store_device", rig.last_receipt.seconds)
    times.note("store_first", rig.first_copy - began)
    times.note("store_seen", (rig.end_seen or stored) - began)
    rig.poison(blocks)
    times.note("pin_in", back())
    rig.first_copy = rig.end_seen = 0.0
    began = time.perf_counter()
    hit = rig.ferry.match(keys)
    called = time.perf_counter()
    ticket = rig.ferry.load(hit, blocks)
    returned = time.perf_counter()
    done = rig.wait(ticket)
    loaded = time.perf_counter()
    times.note("load", loaded - began)
    times.note("load_first", rig.first_copy - began)
    times.note("load_seen", (rig.end_seen or loaded) - began)
    times.note("match", called - began)
    times.note("load_call", returned - called)
    times.note("load_device", rig.last_receipt.seconds)
    assert done.ok, done
    assert done.num_blocks == count, done
    return rig.wrong(blocks, sums)


def queued_in_worn_pool(rig: Rig, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Four requests at once in a pool whose slots churn has scattered."""
    count = max(1, num_bytes // rig.block_bytes)
    wear(rig)
    out, back = (pinned_copy(4 * count * rig.block_bytes, way) for way in (False, True))
    times = {way: Times() for way in WAYS}
    wrong = 0
    for _ in range(rounds):
        for way, entered in WAYS.items():
            with entered(rig):
                wrong += four_at_once(rig, count, times[way], out, back)
            wear(rig, 0.1)
    return {
        "bytes": 4 * count * rig.block_bytes,
        "wrong": wrong,
        **{way: each.medians() for way, each in times.items()},
    }


def four_at_once(
    rig: Rig, count: int, times: Times, out: Callable[[], float], back: Callable[[], float]
) -> int:
    requests = [(rig.keys(count), blocks) for blocks in rig.blocks(4 * count).reshape(4, -1)]
    sums = [rig.fill(blocks) for _, blocks in requests]
    times.note("pin_out", out())
    began = time.perf_counter()
    for ticket in [rig.ferry.store(keys, blocks) for keys, blocks in requests]:
        assert rig.wait(ticket).ok
        times.note("store_runs", rig.last_receipt.num_runs)
    times.note("store", time.perf_counter() - began)
    for _, blocks in requests:
        rig.poison(blocks)
    times.note("pin_in", back())
    began = time.perf_counter()
    hits, tickets = [], []
    for keys, blocks in requests:
        hits.append(rig.ferry.match(keys))
        tickets.append(rig.ferry.load(hits[-1], blocks[: len(hits[-1])]))
    for ticket in tickets:
        assert rig.wait(ticket).ok
        times.note("load_runs", rig.last_receipt.num_runs)
    times.note("load", time.perf_counter() - began)
    return sum(
        rig.wrong(blocks[: len(hit)], expected[:, : len(hit)])
        for hit, (_, blocks), expected in zip(hits, requests, sums, strict=True)
    )


def wear(rig: Rig, turnovers: float = 3.0) -> None:
    """Requests of many lengths, some asked for again, until the pool has turned over so often."""
    num_slots = rig.ferry.host_stats().num_slots
    stored = 0
    while stored < turnovers * num_slots:
        count = int(rig.rng.integers(1, 48))
        keys = rig.keys(count)
        rig.wait(rig.ferry.store(keys, rig.blocks(count)))
        stored += count
        rig.kept.append(keys)
        if len(rig.kept) > 64:
            old = rig.kept.pop(int(rig.rng.integers(len(rig.kept))))
            rig.ferry.release(rig.ferry.match(old))


def table(figures: dict[str, Any]) -> str:
    """A line for each of what is wanted: now, before, and the wish."""
    by_size = {(row["page_bytes"] // KiB, row["bytes"] // 10**6): row for row in figures["one"]}
    large, larger, small, smaller = (
        next(row for (_, size), row in by_size.items() if abs(size - wanted) < wanted / 10)
        for wanted in (268, 918, 64, 16)
    )
    lines = [
        "| wall clock, call to `Done` | now | before, in the same run | wanted |",
        "|---|---|---|---|",
        *(
            share_line(f"one request of {name}", row, way, wish)
            for name, row, wish in (("268 MB", large, 0.88), ("918 MB", larger, 0.94))
            for way in ("store", "load")
        ),
        *(
            share_line("four queued of 67 MB in a worn pool", figures["worn"], way, 0.90)
            for way in ("store", "load")
        ),
        *(
            time_line(f"match and load, {name} of 8 KiB pages", row, ("load",), wish)
            for name, row, wish in (("64 MB", small, 1.8), ("16 MB", smaller, 0.8))
        ),
        time_line("`load()` holds its caller, 918 MB", larger, ("load_call",), 0.3),
    ]
    return "\n".join([*lines, "", *timelines(figures["one"])])


def share_line(what: str, row: dict[str, Any], way: str, wish: float) -> str:
    limit = {"store": "pin_out", "load": "pin_in"}[way]
    cells = [
        f"{row[when][limit] / row[when][way]:.2f} "
        f"({row[when][way] * 1e3:.2f} of {row[when][limit] * 1e3:.2f} ms)"
        for when in WAYS
    ]
    if f"{way}_runs" in row["now"]:
        cells[0] += f", {row['now'][f'{way}_runs']:.0f} runs"
    return f"| {way}, {what} | {' | '.join(cells)} | {wish:.2f} of one pinned copy |"


def time_line(what: str, row: dict[str, Any], names: tuple[str, ...], wish: float) -> str:
    cells = [f"{sum(row[when][name] for name in names) * 1e3:.2f} ms" for when in WAYS]
    return f"| {what} | {' | '.join(cells)} | {wish} ms |"


def timelines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Where the time of each goes: what has happened by when after the call."""
    columns = ["pinned copy", "look-up", "first copy queued", "call returns", "end seen", "`Done`"]
    columns += ["copied, by the device's clock"]
    yield f"| ms after the call | {' | '.join(columns)} |"
    yield f"|{'---|' * (len(columns) + 1)}"
    for row in rows:
        for way, pin in (("store", "pin_out"), ("load", "pin_in")):
            for when in WAYS:
                at = row[when]
                look = at["match"] if way == "load" else 0.0
                cells = [at[pin], look, at[f"{way}_first"], look + at[f"{way}_call"]]
                cells += [at[f"{way}_seen"], at[way], at[f"{way}_device"]]
                told = " | ".join(f"{1e3 * cell:.2f}" for cell in cells)
                yield f"| {way}, {row['bytes'] / 1e6:.0f} MB, {when} | {told} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--host", type=parse_size, default=6 << 30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    missing = what_is_missing()
    if missing:
        print(missing)
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
    facts = about()
    print(json.dumps(facts))
    print(table(figures))
    wrong = sum(row["wrong"] for row in figures["one"]) + figures["worn"]["wrong"]
    print(f"wrong: {wrong}")
    if args.json is not None:
        args.json.write_text(json.dumps({"provenance": facts, "figures": figures}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
