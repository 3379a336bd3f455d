"""Hundreds of clients at a busy engine's endpoint: what they cost its thread, and its process.

A playground with 262,144 slots serves chats while another process keeps 200 connections to its
metrics endpoint busy, half of them fast (ask, read, ask again at once) and half of them slow (a
byte now and then, for ever). What is timed is the engine's poll: the call, once a step, in which
copies are settled and questions answered. Rounds with and without clients take turns, so that both
have the same share of whatever else the machine does.

The poll's 99th percentile may be LIMIT more with clients than without; threads and descriptors of
the engine's process have bounds of their own. It exits with 1 where one of these does not hold.
Run it with OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from urllib.parse import urlsplit

import numpy as np

import kvferry
from _chat import serve
from kvferry.telemetry.http import MAX_CONNECTIONS
from kvferry.tools.demo.engine import Engine
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.tools.demo.workload import Chat

LIMIT = 0.001
NUM_SLOTS = 262_144
PATHS = ("/metrics", "/metrics", "/explain", "/explain/nobody", "/", "/nothing")
SHAPE = ModelShape(vocab=256, width=64, num_layers=2, num_heads=2, num_kv_heads=1, hidden=128)


# -- the clients, a process of their own --------------------------------------------------------


async def fast(port: int, number: int, counts: dict[str, int]) -> None:
    path = PATHS[number % len(PATHS)]
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            reply = await asyncio.wait_for(reader.read(-1), 60)
            counts["served" if reply.startswith(b"HTTP/1.0 ") else "dropped"] += 1
            writer.close()
        except (OSError, asyncio.TimeoutError):
            counts["dropped"] += 1
            await asyncio.sleep(0.05)


async def slow(port: int, counts: dict[str, int]) -> None:
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for letter in b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 1000:
                writer.write(bytes([letter]))
                await writer.drain()
                with contextlib.suppress(asyncio.TimeoutError):
                    if not await asyncio.wait_for(reader.read(1), 0.5):
                        break
            counts["cut"] += 1
            writer.close()


async def clients(port: int, num: int) -> None:
    counts = {"served": 0, "dropped": 0, "cut": 0}
    tasks = [asyncio.create_task(fast(port, n, counts)) for n in range(num // 2)]
    tasks += [asyncio.create_task(slow(port, counts)) for _ in range(num - num // 2)]
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    for task in tasks:
        task.cancel()
    print(*counts.values(), flush=True)


# -- the engine ---------------------------------------------------------------------------------


@dataclass
class Seen:
    """What was seen of the engine, in all rounds of one kind."""

    polls: list[float] = field(default_factory=list)
    threads: int = 0
    files: int = 0
    served: int = 0
    dropped: int = 0
    cut: int = 0
    seconds: float = 0.0
    turns: int = 0

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.polls, share))


@contextlib.contextmanager
def besieged(port: int, num: int, seen: Seen) -> Iterator[None]:
    """So many clients at this port, while it lasts."""
    if not num:
        yield
        return
    arguments = [sys.executable, __file__, "--attack", str(port), "--clients", str(num)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        time.sleep(0.5)
        yield
    finally:
        words, _ = process.communicate("end\n", timeout=60)
        served, dropped, cut = map(int, words.split())
        seen.served += served
        seen.dropped += dropped
        seen.cut += cut


@contextlib.contextmanager
def counted(seen: Seen) -> Iterator[None]:
    """The most threads and descriptors of this process, looked at ten times a second."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.1):
            seen.threads = max(seen.threads, threading.active_count())
            seen.files = max(seen.files, len(os.listdir("/proc/self/fd")))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def measure(rounds: int, seconds: float, num_clients: int) -> dict[int, Seen]:
    found = {0: Seen(), num_clients: Seen()}
    settings = {"host": f"{NUM_SLOTS * SHAPE.block_bytes}B", "load_policy": "always"}
    with Engine(Decoder(SHAPE), 256, settings) as engine:
        assert engine.ferry is not None
        port = urlsplit(engine.ferry.serve_metrics(0)).port
        assert port is not None
        poll, polls = engine.ferry.poll, list[float]()

        def timed(*arguments: float) -> list[kvferry.Ticket]:
            start = time.perf_counter()
            try:
                return poll(*arguments)
            finally:
                polls.append(time.perf_counter() - start)

        engine.ferry.poll = timed  # type: ignore[assignment]
        seed = play(engine, 2.0, 0)  # warm
        for _ in range(rounds):
            for num, seen in found.items():
                with besieged(port, num, seen), counted(seen):
                    polls, start = seen.polls, time.perf_counter()
                    before, seed = seed, play(engine, seconds, seed)
                    seen.seconds += time.perf_counter() - start
                    seen.turns += 12 * (seed - before)
    return found


def play(engine: Engine, seconds: float, seed: int) -> int:
    """Serve chats for so long; the next seed."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        serve(engine, Chat(num_conversations=4, num_turns=3, vocab=SHAPE.vocab, seed=seed))
        seed += 1
    return seed


def show(found: dict[int, Seen]) -> None:
    print("| clients | polls | p50 | p99 | p99.9 | worst | turns/s | threads | descriptors |")
    print("|---|---|---|---|---|---|---|---|---|")
    for num, seen in found.items():
        times = [f"{1e3 * seen.percentile(share):.3f} ms" for share in (50, 99, 99.9, 100)]
        print(
            f"| {num} | {len(seen.polls):,} | {' | '.join(times)} "
            f"| {seen.turns / seen.seconds:.1f} | {seen.threads} | {seen.files} |"
        )
    seen = list(found.values())[-1]
    print(
        f"in {seen.seconds:.0f} s: {seen.served:,} requests answered, {seen.dropped:,} fast "
        f"clients turned away, {seen.cut:,} slow ones cut off"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6, help="of each kind")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each round")
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        asyncio.run(clients(arguments.attack, arguments.clients))
        return
    print(
        f"kvferry {kvferry.__version__}, Python {platform.python_version()}, numpy "
        f"{np.__version__}, {os.cpu_count()} CPUs, {platform.machine()}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, load {os.getloadavg()[0]:.1f}"
    )
    found = measure(arguments.rounds, arguments.seconds, arguments.clients)
    show(found)
    alone, besieged = found.values()
    more = besieged.percentile(99) - alone.percentile(99)
    print(f"p99 with clients: {1e3 * more:+.3f} ms; may be {1e3 * LIMIT:+.1f} ms")
    is_bounded = (
        besieged.files - alone.files <= MAX_CONNECTIONS + 4
        and besieged.threads <= alone.threads + 1
    )
    if more > LIMIT or not is_bounded:
        sys.exit("the bound does not hold")


if __name__ == "__main__":
    main()
