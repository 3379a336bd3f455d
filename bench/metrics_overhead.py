"""What metrics cost a busy playground.

Measured twice, in two ways that know nothing of each other:

- *Piece by piece*, inside one process: the time spent in counting, call by call, as a share of a
  run; and the CPU time of one scrape over HTTP. These hardly depend on who else uses the machine.
- *Whole runs* in turns, in random order: without any counting, with it, and scraped by another
  process at several rates. Each run is compared with the run of the same round without counting,
  in CPU time of the serving process (that of the scraper is not the engine's) and in wall time.
  Scraping ten times a second is there because the cost of one scrape is then well above the noise.

Run it with OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.request import urlopen

import numpy as np

import kvferry
from _chat import serve
from kvferry.scheduler.journal import Bookkeeper
from kvferry.telemetry.endpoint import Endpoint
from kvferry.telemetry.source import Mailbox, Source
from kvferry.tools.demo.engine import Engine
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.tools.demo.workload import Chat

LIMIT = 0.01
PAUSES = (1.0, 5.0, 15.0)
"""Seconds between scrapes: the most anxious, and what Prometheus installations do."""

SETTINGS = {"host": "48MiB", "load_policy": "always"}

WAYS = {"off": None, "counting": 0.0, "scraped 1/s": 1.0, "scraped 10/s": 10.0}
"""Scrapes per second; None: nothing is even counted."""

SCRAPER = """
import sys, time
from urllib.request import urlopen
url, pause = sys.argv[1], float(sys.argv[2])
due = time.monotonic()
while True:
    with urlopen(url, timeout=10) as reply:
        assert b"kvferry_lookups_total" in reply.read()
    print("scraped", flush=True)
    due += pause
    time.sleep(max(0.0, due - time.monotonic()))
"""

Hook = tuple[type, str]
COUNTING: tuple[Hook, ...] = (
    (Bookkeeper, "drain"),
    (Mailbox, "answer"),
)
"""All that runs only for figures and explanations."""


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


def unread(book: Bookkeeper) -> None:
    book.events.clear()


@contextmanager
def replaced(change: Callable[[Hook, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Every hook of counting replaced by what ``change`` makes of it."""
    originals = [(hook, getattr(*hook)) for hook in COUNTING]
    try:
        for (owner, name), call in originals:
            setattr(owner, name, change((owner, name), call))
        yield
    finally:
        for (owner, name), call in originals:
            setattr(owner, name, call)


def nothing(hook: Hook, call: Callable[..., Any]) -> Callable[..., Any]:
    return unread if hook == (Bookkeeper, "drain") else lambda *_: None


@dataclass(frozen=True)
class Run:
    """One whole run: seconds of wall time, CPU time of this process, and how often scraped."""

    wall: float
    cpu: float
    num_scrapes: int = 0


def run(decoder: Decoder, chat: Chat, per_second: float | None) -> Run:
    with ExitStack() as stack:
        if per_second is None:
            stack.enter_context(replaced(nothing))
        engine = stack.enter_context(Engine(decoder, 96, SETTINGS))
        assert engine.ferry is not None
        scraper = None
        if per_second:
            scraper = start_scraper(engine.ferry.serve_metrics(0), 1 / per_second)
            stack.callback(scraper.kill)
        cpu, start = time.process_time(), time.perf_counter()
        serve(engine, chat)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        return Run(wall, cpu, num_scrapes(scraper))


def start_scraper(url: str, pause: float) -> subprocess.Popen[str]:
    """Another process that asks at a steady pace; it has asked once when this returns."""
    arguments = [sys.executable, "-c", SCRAPER, f"{url}metrics", str(pause)]
    scraper = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert scraper.stdout is not None
    assert scraper.stdout.readline() == "scraped\n"
    return scraper


def num_scrapes(scraper: subprocess.Popen[str] | None) -> int:
    if scraper is None:
        return 0
    assert scraper.poll() is None, "the scraper has ended before the run"
    scraper.kill()
    return scraper.communicate()[0].count("scraped")


def counting_share(decoder: Decoder, chat: Chat) -> tuple[float, int]:
    """The share of a run spent in counting, and how many calls that is."""
    meter = Meter()

    def metered(hook: Hook, call: Callable[..., Any]) -> Callable[..., Any]:
        around = meter.around(call)
        return lambda *arguments: around(*arguments)

    with replaced(metered):
        seconds = run(decoder, chat, 0.0).wall
    return meter.seconds / seconds, meter.num_calls


class Unattended(Mailbox):
    """Answers at once: here no engine comes by that could."""

    def query(self, work: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return work(*args)


def scrape_seconds(decoder: Decoder, chat: Chat, count: int = 300) -> float:
    """CPU time that one scrape over HTTP takes from the process that is scraped."""
    with Engine(decoder, 96, SETTINGS) as engine:
        assert engine.ferry is not None
        serve(engine, chat)
        source = Source(engine.ferry._scheduler.onlooker, Unattended())
        with Endpoint(source, port=0) as endpoint:
            with urlopen(f"{endpoint.url}metrics", timeout=10) as reply:
                reply.read()
            scraper = start_scraper(endpoint.url, 0.0)
            assert scraper.stdout is not None
            start = time.process_time()
            for _ in range(count):
                assert scraper.stdout.readline() == "scraped\n"
            seconds = time.process_time() - start
            scraper.kill()
            scraper.wait()
    return seconds / count


def whole_runs(decoder: Decoder, chat: Chat, rounds: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    order = list(WAYS)
    for _ in range(rounds):
        random.shuffle(order)
        for way in order:
            runs[way].append(run(decoder, chat, WAYS[way]))
    return runs


def interval(values: list[float], draws: int = 4000) -> tuple[float, float, float]:
    """The median, and between what it lies nine times in ten, by drawing again."""
    chooser = random.Random(0)
    medians = sorted(
        statistics.median(chooser.choices(values, k=len(values))) for _ in range(draws)
    )
    return statistics.median(values), medians[draws // 20], medians[-draws // 20]


def show(runs: dict[str, list[Run]]) -> None:
    base = runs["off"]
    wall = statistics.median(one.wall for one in base)
    cpu = statistics.median(one.cpu for one in base)
    print(
        f"whole runs: {len(base)} of each, in turns; without counting {wall:.2f} s, CPU {cpu:.2f} s"
    )
    for way, some in runs.items():
        if way == "off":
            continue
        words = []
        for name in ("cpu", "wall"):
            ratios = [
                getattr(a, name) / getattr(b, name) - 1 for a, b in zip(some, base, strict=True)
            ]
            middle, low, high = (100 * value for value in interval(ratios))
            words.append(f"{name} {middle:+.2f}% (90%: {low:+.2f} to {high:+.2f})")
        scrapes = sum(one.num_scrapes for one in some)
        print(f"  {way:<13} {', '.join(words)}" + (f", {scrapes} scrapes" if scrapes else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description="What metrics cost a busy playground.")
    parser.add_argument("--rounds", type=int, default=5, help="whole runs of each kind")
    rounds = parser.parse_args().rounds
    shape = ModelShape()
    decoder = Decoder(shape)
    chat = Chat(num_conversations=14, num_turns=4, vocab=shape.vocab)
    print(
        f"kvferry {kvferry.__version__}, Python {platform.python_version()}, numpy "
        f"{np.__version__}, {os.cpu_count()} CPUs, {platform.machine()}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, load {os.getloadavg()[0]:.1f}"
    )
    run(decoder, chat, 0.0)  # warm caches
    share, num_calls = counting_share(decoder, chat)
    scrape = scrape_seconds(decoder, chat)
    print(f"counting: {100 * share:.3f}% of a busy run ({num_calls} calls)")
    print(f"a scrape: {1e3 * scrape:.2f} ms of CPU time")
    for pause in PAUSES:
        total = share + scrape / pause
        print(f"  scraped every {pause:g} s: {100 * total:.3f}% in all")
    if rounds:
        show(whole_runs(decoder, chat, rounds))
        print(f"load at the end {os.getloadavg()[0]:.1f}")
    total = share + scrape / min(PAUSES)
    assert total < LIMIT, f"metrics take {100 * total:.2f}% of a run"


if __name__ == "__main__":
    main()
