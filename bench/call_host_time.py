"""The host's own time between a caller's call and its bytes, and between their end and `Done`.

    python bench/call_host_time.py --other ../kvferry-before/src

Needs no card: the library runs on a stand-in for CUDA's driver (``stand_in_card.py``) that moves no
byte and whose copies take as long as at 55 GB/s. So these are microseconds of Python and of threads
that wait for each other, without the time that the real driver's calls take; what a card makes of
it, ``call_to_done.py`` says. For each size: how long the look-up takes, when the first copy is
queued and when the call returns, both counted from the call (of a load: from its look-up's, which
may begin with the copy), when the last copy ends (less the time that so many bytes take: what is
left is time without a copy), how long after the end of the last copy the caller has its ``Done``
(by ``wait``, ``poll`` with a timeout, and ``await``), and how many Python functions are called on
the way. With ``--other`` the ``src`` folder of another
checkout is measured too, in turn, each time in a process of its own. The lower quartile of all
rounds counts: a busy machine adds to the others.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

KiB, MiB = 1 << 10, 1 << 20
LAYERS, BLOCK_TOKENS = 28, 16
SHAPES = {
    "16 MB, pages of 8 KiB": (8 * KiB, 16_000_000),
    "64 MB, pages of 8 KiB": (8 * KiB, 64_000_000),
    "268 MB, pages of 32 KiB": (32 * KiB, 256 * MiB),
    "918 MB, pages of 32 KiB": (32 * KiB, 918_000_000),
}
HOST_BYTES = 3 << 30
"""Of the pool: the share of it that is kept free is that of a small one."""
ENDS = ("wait", "poll", "await")
FIGURES = {
    "match": "look-up",
    "load first": "look-up and load: first copy queued",
    "load returns": "look-up and load: returns",
    "load copied": "look-up and load: last copy's end, less the copy's own time",
    **{f"load {end}": f"load: last copy's end to `Done`, {end}" for end in ENDS},
    "load calls": "look-up and load: Python calls until the first copy is queued",
    "load ends": "load: Python calls from the last copy's end to `Done`",
    "store first": "store: first copy queued",
    "store returns": "store: returns",
    "store copied": "store: last copy's end, less the copy's own time",
    "store wait": "store: last copy's end to `Done`, wait",
    "store whole": "store: `Done`, less the copy's own time",
    "store calls": "store: Python calls until the first copy is queued",
}
COUNTS = ("load calls", "load ends", "store calls")
Figures = dict[str, dict[str, list[float]]]
"""Every round's, by shape and name: microseconds, or how many."""


class Rig:
    """A ferry on a card that is only a clock, and fresh keys for every request."""

    def __init__(self, page_bytes: int, num_bytes: int) -> None:
        from kvferry.cache.reach import FullAttention
        from kvferry.config import Config
        from kvferry.core.identity import Namespace
        from kvferry.ferry import Ferry
        from kvferry.rank import open_on_gpu
        from kvferry.transfer.layout import describe
        from stand_in_card import BYTES_PER_SECOND, stand_in

        self.card, driver = stand_in()
        self.seconds = num_bytes // (page_bytes * LAYERS) * page_bytes * LAYERS / BYTES_PER_SECOND
        self.count = num_bytes // (page_bytes * LAYERS)
        self.num_blocks = self.count * 3 // 2
        # Never touched, so it takes no memory.
        kv = {str(at): np.empty((self.num_blocks, page_bytes), np.uint8) for at in range(LAYERS)}
        layout = describe(kv, block_axis=0)
        num_slots = max(self.count * 3 // 2, HOST_BYTES // layout.block_bytes)
        host = str(num_slots * layout.block_bytes)
        config = Config.load(overrides={"host": host, "load_policy": "always"})
        rank = open_on_gpu([layout], config, driver=driver, compute_stream=lambda: 1)
        namespace = Namespace(
            model="m", dtype="u8", layout=layout.format, geometry="x", block_tokens=BLOCK_TOKENS
        )
        groups = [FullAttention(BLOCK_TOKENS)]
        self.ferry = Ferry([layout], groups, namespace, config, rank, keep_alive=kv)
        while self.ferry.host_stats().ready_slots < self.ferry.host_stats().num_slots:
            self.ferry.poll(0.01)
        self.rng = np.random.default_rng(7)
        self._num_slots = num_slots
        self.begin_anew()
        self.loop = asyncio.new_event_loop()

    def begin_anew(self) -> None:
        """Fill the pool with other requests: from then on every store evicts."""
        self.ferry.reset()
        for _ in range(self._num_slots // self.count + 1):
            self.ferry.wait(self.ferry.store(*self.request()))

    def request(self) -> tuple[Any, Any]:
        tokens = self.rng.integers(0, 1 << 40, self.count * BLOCK_TOKENS)
        return self.ferry.keys(tokens), self.rng.permutation(self.num_blocks)[: self.count]

    def timed(self, call: Callable[[], Any], end: str) -> tuple[dict[str, float], Any]:
        """Microseconds of one call and its end."""
        if end == "await":
            return self.loop.run_until_complete(self._awaited(call))
        self.card.watch()
        began = time.perf_counter()
        ticket = call()
        returned = time.perf_counter()
        done = self.ferry.wait(ticket) if end == "wait" else self.ferry.poll(10.0)[0]
        return self._moments(end, began, returned, time.perf_counter()), done

    async def _awaited(self, call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
        self.card.watch()
        began = time.perf_counter()
        ticket = call()
        returned = time.perf_counter()
        done = await ticket
        return self._moments("await", began, returned, time.perf_counter()), done

    def _moments(self, end: str, began: float, returned: float, ended: float) -> dict[str, float]:
        first: Any = self.card.first
        moments = {"first": first - began, "returns": returned - began}
        moments["copied"] = self.card.last - began - self.seconds
        moments[end] = ended - self.card.last
        return {name: 1e6 * seconds for name, seconds in moments.items()}


class Counted:
    """Within it calls of Python functions by this thread are counted, until a copy is queued."""

    def __init__(self, card: Any) -> None:
        self._card = card

    def __enter__(self) -> None:
        self.num_calls = 0
        self._card.watch()
        sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, _: object, event: str, __: object) -> None:
        self.num_calls += event == "call" and self._card.first is None


def measure(page_bytes: int, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    rig = Rig(page_bytes, num_bytes)
    ferry = rig.ferry
    for number in range(rounds + 3):
        end = ENDS[number % 3]
        keys, blocks = rig.request()
        gc.collect(0)
        time.sleep(1e-3)
        store, done = rig.timed(partial(ferry.store, keys, blocks), "wait")
        if done.num_blocks < rig.count:  # the policy would rather keep what is there
            rig.begin_anew()
            continue
        time.sleep(1e-3)
        looked: list[float] = []
        load, done = rig.timed(partial(_look_up_and_load, ferry, keys, blocks, looked), end)
        assert done.num_blocks == rig.count
        store["whole"] = store["copied"] + store["wait"]
        if number >= 3:  # the first ones make kernels, buffers and threads
            found["match"] += looked
            for verb, times in (("load", load), ("store", store)):
                for name, value in times.items():
                    found[f"{verb} {name}"].append(value)
    for _ in range(4):
        _count(rig, found)
    ferry.close()
    return found


def _look_up_and_load(ferry: Any, keys: Any, blocks: Any, looked: list[float]) -> Any:
    began = time.perf_counter()
    hit = ferry.match(keys)
    looked.append(1e6 * (time.perf_counter() - began))
    return ferry.load(hit, blocks)


def _count(rig: Rig, found: dict[str, list[float]]) -> None:
    ferry, counted = rig.ferry, Counted(rig.card)
    keys, blocks = rig.request()
    with counted:
        ticket = ferry.store(keys, blocks)
    if ferry.wait(ticket).num_blocks < rig.count:
        rig.begin_anew()
        return
    found["store calls"].append(counted.num_calls)
    with counted:
        ticket = ferry.load(ferry.match(keys), blocks)
    found["load calls"].append(counted.num_calls)
    if ferry.poll():  # as who waits does, while it is copied; on a busy machine that is over now
        return
    time.sleep(0.05)
    with counted:
        ferry.wait(ticket)
    found["load ends"].append(counted.num_calls)


def in_a_process(source: Path, shape: str, rounds: int) -> dict[str, list[float]]:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, __file__, "--child", shape, "--rounds", str(rounds)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    if told.returncode:
        raise SystemExit(told.stderr)
    found: dict[str, list[float]] = json.loads(told.stdout.splitlines()[-1])
    return found


def least(values: list[float], name: str) -> float:
    if not values:
        return float("nan")
    return float(np.median(values) if name in COUNTS else np.percentile(values, 25))


def report(figures: dict[str, Figures], out: Any = sys.stdout) -> None:
    sources = list(figures)
    told = ", ".join(f"{len(figures[s][next(iter(SHAPES))]['match'])} rounds" for s in sources[:1])
    print(f"host time only, without a card: microseconds, lower quartiles of {told}\n", file=out)
    print(f"| | {' | '.join(SHAPES)} |\n|---|{'---|' * len(SHAPES)}", file=out)
    for name, words in FIGURES.items():
        cells = []
        for shape in SHAPES:
            values = [least(figures[source][shape][name], name) for source in sources]
            cells.append(" → ".join(f"{value:.0f}" for value in reversed(values)))
        print(f"| {words} | {' | '.join(cells)} |", file=out)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, metavar="SRC", help="another checkout's src folder")
    parser.add_argument("--turns", type=int, default=3, help="how often each is measured (3)")
    parser.add_argument("--rounds", type=int, default=24, help="requests of each size a turn (24)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(measure(*SHAPES[arguments.child], arguments.rounds)))
        return 0
    own = Path(__file__).resolve().parent.parent / "src"
    if arguments.other and not (arguments.other / "kvferry").is_dir():
        parser.error(f"--other {arguments.other}: there is no kvferry in that folder")
    sources = {"here": own, **({"other": arguments.other} if arguments.other else {})}
    figures: dict[str, Figures] = {
        name: {shape: {figure: [] for figure in FIGURES} for shape in SHAPES} for name in sources
    }
    for _ in range(arguments.turns):
        for shape in SHAPES:
            for name, source in sources.items():
                for figure, values in in_a_process(source, shape, arguments.rounds).items():
                    figures[name][shape][figure] += values
    report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
