"""What metrics cost a busy playground, in one process and one run.

Three figures. *Counting* always happens: the time spent in it is measured inside a run, call by
call, as a share of it. *A scrape* happens when someone asks: its CPU time, as a share of the time
between two scrapes. And, as a check on both, the same run *alone and scraped* once a second, in
turns; on a machine that others use too, that difference drowns in theirs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any
from urllib.request import urlopen

import numpy as np

import kvferry
from kvferry.metrics.collector import exposition
from kvferry.metrics.desk import Desk
from kvferry.metrics.endpoint import Endpoint
from kvferry.metrics.samples import Snapshot
from kvferry.playground.engine import Engine, Limits
from kvferry.playground.model import Decoder, ModelShape
from kvferry.playground.offload import Offloader
from kvferry.playground.runner import Runner
from kvferry.playground.threads import limit_matrix_threads
from kvferry.playground.workload import Chat, serve
from kvferry.scheduler.journal import Journal
from kvferry.stats import TrafficCounts

SCRAPES_PER_SECOND = 1.0
USUAL_PAUSE = 15.0
"""Seconds between scrapes in most Prometheus installations."""
LIMIT = 0.01


class Meter:
    """Sums the time spent in a few calls; what the clock itself costs is taken off."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_calls = 0
        start = time.perf_counter()
        for _ in range(10_000):
            time.perf_counter()
        self._clock_cost = (time.perf_counter() - start) / 10_000

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.perf_counter() - start - self._clock_cost
                self.num_calls += 1

        return metered


class Scraper:
    """Scrapes an endpoint at a steady pace until closed."""

    def __init__(self, url: str, per_second: float) -> None:
        self.num_scrapes = 0
        self._url = f"{url}metrics"
        self._pause = 1 / per_second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with urlopen(self._url, timeout=10) as reply:
                assert b"kvferry_queries_total" in reply.read()
            self.num_scrapes += 1
            self._stop.wait(self._pause)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def run(decoder: Decoder, chat: Chat, per_second: float) -> tuple[float, float, int]:
    """Seconds of wall time and of CPU time of one run, and how often it was scraped."""
    with ExitStack() as stack:
        runner = stack.enter_context(Runner(decoder, num_blocks=96))
        offloader = stack.enter_context(Offloader(runner, host_bytes=48 << 20))
        scraper = None
        if per_second:
            endpoint = stack.enter_context(Endpoint(offloader.source(), port=0))
            scraper = Scraper(endpoint.url, per_second)
            stack.callback(scraper.close)
        engine = Engine(runner, limits=Limits(), offloader=offloader)
        cpu, start = time.process_time(), time.perf_counter()
        serve(engine, chat)
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        engine.drain()
        return seconds, cpu, scraper.num_scrapes if scraper is not None else 0


def counting_share(decoder: Decoder, chat: Chat) -> tuple[float, int]:
    """The share of a run spent in counting, and how many calls that is."""
    meter = Meter()
    hooks = ((TrafficCounts, "add"), (Journal, "ended"), (Journal, "explained"), (Desk, "answer"))
    originals = [(owner, name, getattr(owner, name)) for owner, name in hooks]
    try:
        for owner, name, call in originals:
            metered = meter.around(call)
            setattr(owner, name, lambda *a, metered=metered: metered(*a))
        seconds, _, _ = run(decoder, chat, 0)
    finally:
        for owner, name, call in originals:
            setattr(owner, name, call)
    return meter.seconds / seconds, meter.num_calls


def scrape_seconds(decoder: Decoder, chat: Chat, count: int = 50) -> float:
    """CPU time of one scrape, of an engine that has something to tell."""
    with Runner(decoder, num_blocks=96) as runner, Offloader(runner, host_bytes=48 << 20) as ferry:
        engine = Engine(runner, limits=Limits(), offloader=ferry)
        serve(engine, chat)
        engine.drain()
        start = time.thread_time()
        for _ in range(count):
            exposition(Snapshot(ferry.stats(), kvferry.__version__))
        return (time.thread_time() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    limit_matrix_threads(1)
    shape = ModelShape()
    decoder = Decoder(shape)
    chat = Chat(num_conversations=8, num_turns=4, vocab=shape.vocab)
    print(
        f"kvferry {kvferry.__version__}, Python {platform.python_version()}, numpy "
        f"{np.__version__}, {os.cpu_count()} CPUs, {platform.machine()}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    )
    run(decoder, chat, 0)  # warm caches
    share, num_calls = counting_share(decoder, chat)
    print(f"counting: {100 * share:.3f}% of a busy run ({num_calls} calls)")
    scrape = scrape_seconds(decoder, chat)
    print(
        f"a scrape: {1e3 * scrape:.2f} ms of CPU time, {100 * scrape / USUAL_PAUSE:.3f}% of one "
        f"processor when asked every {USUAL_PAUSE:g} s"
    )

    quiet, scraped, num_scrapes = [], [], 0
    for _ in range(rounds):
        quiet.append(run(decoder, chat, 0))
        scraped.append(run(decoder, chat, SCRAPES_PER_SECOND))
        num_scrapes += scraped[-1][2]
    for what, column in (("wall time", 0), ("CPU time", 1)):
        a, b = min(r[column] for r in quiet), min(r[column] for r in scraped)
        medians = [statistics.median(r[column] for r in runs) for runs in (quiet, scraped)]
        print(
            f"{what}: {a:.3f} s alone, {b:.3f} s scraped {SCRAPES_PER_SECOND:g} times a "
            f"second ({100 * (b / a - 1):+.2f}%; medians {medians[0]:.3f} and {medians[1]:.3f} s)"
        )
    print(f"scraped {num_scrapes} times in all, {rounds} runs each, load {os.getloadavg()[0]:.1f}")
    total = share + scrape / USUAL_PAUSE
    print(f"in all {100 * total:.3f}% (the bound is {100 * LIMIT:g}%)")
    assert total < LIMIT, f"metrics take {100 * total:.2f}% of a run"


if __name__ == "__main__":
    main()
