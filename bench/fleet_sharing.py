"""What a store that servers share would have found: a public trace played over many servers.

``python bench/fleet_sharing.py --trace FILE`` (JSON lines with ``hash_ids``, as published with the
Mooncake paper; blocks of 512 tokens). Eight servers serve the trace; more servers serve as many
copies of it, each with blocks of its own, so that the load of a server stays the same. Requests go
to a server by chance, or all of a conversation to one. Every server has host memory for so many
blocks and gives as much again to the store; what it stores, it shares at once. The pools are the
real ones; nothing takes time. Prints a table; what a request asks of the store, reads from it and
writes to it is beside what it finds. Without a trace: status 77.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvferry.cache.policies import policy_named
from kvferry.cache.replay import PoolReplay
from kvferry.settings.eviction import DEFAULT_POLICY
from kvferry.sim.simulation import PreviousUses
from kvferry.telemetry.traces import TraceReader, TraceRequest

SKIPPED = 77
SERVERS_PER_COPY = 8
_COPY = np.uint64(1 << 40)
"""Added to a copy's numbers: no trace has so many blocks."""


@dataclass(frozen=True)
class Routed:
    """A request, and what it is routed by."""

    request: TraceRequest
    conversation: int


def copies(trace: list[TraceRequest], count: int) -> Iterator[Routed]:
    """The trace so many times at once, in the order of time, each copy begun a little later."""
    conversation, _ = PreviousUses.of(trace).continuations()
    span = trace[-1].at - trace[0].at

    def one(copy: int) -> Iterator[tuple[float, int, Routed]]:
        shift = span * copy / (SERVERS_PER_COPY * count)
        for at, request in enumerate(trace):
            numbers = request.numbers + np.uint64(copy) * _COPY
            moved = replace(request, at=request.at + shift, numbers=numbers)
            yield moved.at, copy * len(trace) + at, Routed(moved, hash((copy, conversation[at])))

    for _, _, routed in heapq.merge(*(one(copy) for copy in range(count))):
        yield routed


def play(trace: list[TraceRequest], num_servers: int, routing: str, host: int) -> Counter[str]:
    """Counts, in blocks: asked for, found here, found in the store, looked up there, written."""
    lru = policy_named("lru")
    servers = [PoolReplay(host, policy_named(DEFAULT_POLICY)) for _ in range(num_servers)]
    store = PoolReplay(host * num_servers, lru)
    rng = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    for routed in copies(trace, max(1, num_servers // SERVERS_PER_COPY)):
        request = routed.request
        keys, full = request.keys(), request.num_full
        by_chance = int(rng.integers(num_servers))
        server = servers[by_chance if routing == "random" else routed.conversation % num_servers]
        here, there = server.pool.cached(keys), store.pool.cached(keys)
        local = _leading(here)
        both = _leading(here | there)
        counts["requests"] += 1
        counts["blocks"] += len(keys)
        counts["here"] += local
        counts["shared"] += both - local
        counts["looked_up"] += len(keys) - local
        counts["written"] += int(np.count_nonzero(~there[:full]))
        server.serve(keys, full, request.at, None)
        store.serve(keys, full, request.at, None)
    return counts


def _leading(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    return len(flags) if flags.all() else int(flags.argmin())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, default=None)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--host", type=int, default=1000, help="blocks of each server")
    parser.add_argument("--requests", type=int, default=None, help="only so many of the trace")
    options = parser.parse_args()
    if options.trace is None:
        print("give --trace FILE: JSON lines with hash_ids")
        sys.exit(SKIPPED)
    trace = list(TraceReader((options.trace,)))[: options.requests]
    print(f"{len(trace):,} requests of {options.trace.name}, {options.host:,} blocks a server\n")
    print("| servers | routing | alone | with a store | looked up | read | written | s |")
    print("|---|---|---|---|---|---|---|---|")
    for num_servers in options.servers:
        for routing in ("random", "sticky") if num_servers > 1 else ("random",):
            start = time.perf_counter()
            found = play(trace, num_servers, routing, options.host)
            blocks, each = found["blocks"], found["requests"]
            print(
                f"| {num_servers} | {routing} | {found['here'] / blocks:.3f} "
                f"| {(found['here'] + found['shared']) / blocks:.3f} "
                f"| {found['looked_up'] / each:.1f} | {found['shared'] / each:.1f} "
                f"| {found['written'] / each:.1f} | {time.perf_counter() - start:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
