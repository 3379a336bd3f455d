"""How long `store`, `match` and `load` hold their caller, and when the bytes are there.

    PYTHONPATH=src python bench/call_time.py --other ../kvferry-before/src --json call-time.json

Through the library, in a full pool, by wall clock. A store and then a load of the same request,
beside one large pinned copy of as many bytes; and four requests queued at once in a pool that churn
has worn. Every load is compared with what was stored. With ``--other``, the ``src`` folder of
another checkout is measured too, in turn, each time in a process of its own.

Needs a GPU and torch; exits with 77 without. ``--stand-in`` needs neither: the library runs on a
stand-in for CUDA's driver that moves no byte and whose copies take as long as at 55 GB/s. Its
figures are Python and threads that wait for each other, without the real driver's own time.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SKIPPED = 77
KiB, MiB = 1 << 10, 1 << 20
LAYERS, BLOCK_TOKENS = 32, 16
HOST_BYTES = 6 << 30
SHAPES = {
    "16 MiB in 16 blocks": (32 * KiB, 16, 1),
    "256 MiB in 256 blocks": (32 * KiB, 256, 1),
    "256 MiB in 2,730 blocks": (3 * KiB, 2730, 1),
    "918 MB in 876 blocks": (32 * KiB, 876, 1),
    "four queued of 64 MiB, worn pool": (32 * KiB, 64, 4),
}
"""Bytes of a layer's page, blocks of a request, and requests at once."""
FIGURES = {
    "store call": "`store` holds its caller",
    "store": "store: `Done`",
    "store alone": "one pinned copy to the host",
    "match call": "`match` holds its caller",
    "load call": "`match` and `load` hold their caller",
    "load": "match and load: `Done`",
    "load alone": "one pinned copy to the GPU",
}
Rounds = dict[str, list[float]]
"""Seconds of every round, by figure."""


class Card:
    """KV tensors on a GPU, and a ferry for them."""

    def __init__(self, page_bytes: int, num_blocks: int) -> None:
        import torch

        import kvferry

        self.torch = torch
        shape = (num_blocks, page_bytes // 2)
        self.kv = [torch.zeros(shape, dtype=torch.int16, device="cuda") for _ in range(LAYERS)]
        self.ferry = kvferry.attach(
            self.kv, model="bench", host=HOST_BYTES, block_tokens=BLOCK_TOKENS, load_policy="always"
        )

    def fill(self, blocks: Any) -> Any:
        """Fresh bytes in these blocks; what they are."""
        for layer in self.kv:
            layer[self._index(blocks)] = self.torch.randint(
                -30000, 30000, (len(blocks), layer.shape[1]), dtype=self.torch.int16, device="cuda"
            )
        return self._sums(blocks)

    def poison(self, blocks: Any) -> None:
        for layer in self.kv:
            layer[self._index(blocks)] = 7
        self.torch.cuda.synchronize()

    def wrong(self, blocks: Any, sums: Any) -> int:
        return int((self._sums(blocks) != sums).sum())

    def alone(self, num_bytes: int, *, to_device: bool) -> float:
        """Seconds of one large pinned copy."""
        torch = self.torch
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        dst, src = (device, host) if to_device else (host, device)
        seconds = []
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            dst.copy_(src, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds[-1]

    def _index(self, blocks: Any) -> Any:
        return self.torch.from_numpy(blocks).cuda()

    def _sums(self, blocks: Any) -> Any:
        index = self._index(blocks)
        sums = [layer[index].to(self.torch.int64).sum(1) for layer in self.kv]
        self.torch.cuda.synchronize()
        return self.torch.stack(sums)


class StandIn:
    """A ferry on a card that is only a clock; no bytes are there to compare."""

    def __init__(self, page_bytes: int, num_blocks: int) -> None:
        from kvferry.cache.reach import FullAttention
        from kvferry.config import Config
        from kvferry.core.identity import Namespace
        from kvferry.ferry import Ferry
        from kvferry.rank import RankMemory
        from kvferry.transfer.layout import describe
        from stand_in_card import stand_in

        _, driver = stand_in()
        # Never touched, so it takes no memory.
        kv = {str(at): np.empty((num_blocks, page_bytes), np.uint8) for at in range(LAYERS)}
        layout = describe(kv, block_axis=0)
        config = Config.load(overrides={"host": HOST_BYTES, "load_policy": "always"})
        rank = RankMemory.open([layout], config, driver=driver, compute_stream=lambda: 1)
        namespace = Namespace(
            model="m", dtype="u8", layout=layout.format, geometry="x", block_tokens=BLOCK_TOKENS
        )
        groups = [FullAttention(BLOCK_TOKENS)]
        self.ferry = Ferry([layout], groups, namespace, config, rank, keep_alive=kv)

    def fill(self, blocks: Any) -> None:
        """Nothing to do."""

    def poison(self, blocks: Any) -> None:
        """Nothing to do."""

    def wrong(self, blocks: Any, sums: Any) -> int:
        return 0

    def alone(self, num_bytes: int, *, to_device: bool) -> float:
        from stand_in_card import BYTES_PER_SECOND

        return num_bytes / BYTES_PER_SECOND


class Caller:
    """Asks a ferry for one shape's requests, round after round."""

    def __init__(self, make: Callable[[int, int], Any], shape: str) -> None:
        page_bytes, self.count, self.at_once = SHAPES[shape]
        self.num_bytes = page_bytes * LAYERS * self.count * self.at_once
        self.num_blocks = self.count * self.at_once * 3 // 2
        self.card = make(page_bytes, self.num_blocks)
        self.ferry = self.card.ferry
        stats = self.ferry.host_stats
        while stats().ready_slots < stats().num_slots:
            self.ferry.poll(0.01)
        self.rng = np.random.default_rng(7)
        self.fill_pool()

    def fill_pool(self) -> None:
        """From then on every store evicts. Short requests wear the pool."""
        self.ferry.reset()
        left = self.ferry.host_stats().num_slots * (3 if self.at_once > 1 else 1)
        while left > 0:
            count = int(self.rng.integers(1, 48)) if self.at_once > 1 else self.count
            self.ferry.wait(self.ferry.store(self.keys(count), self.blocks()[:count]))
            left -= count

    def keys(self, count: int) -> Any:
        return self.ferry.keys(self.rng.integers(0, 1 << 40, count * BLOCK_TOKENS))

    def blocks(self) -> Any:
        return self.rng.permutation(self.num_blocks)

    def round(self) -> tuple[dict[str, float], int]:
        """Seconds by figure, and how many blocks came back wrong; none of them if not stored."""
        tables = self.blocks()[: self.count * self.at_once].reshape(self.at_once, -1)
        requests = [(self.keys(self.count), table) for table in tables]
        sums = [self.card.fill(table) for table in tables]
        found = {"store alone": self.card.alone(self.num_bytes, to_device=False)}
        gc.collect(0)
        stored = self._timed("store", requests, self.ferry.store, found)
        if sum(done.num_blocks for done in stored) < self.count * self.at_once:
            self.fill_pool()  # the policy would rather keep what is there
            return {}, 0
        self.card.poison(tables.ravel())
        found["load alone"] = self.card.alone(self.num_bytes, to_device=True)
        matched: list[float] = []

        def load(keys: Any, blocks: Any) -> Any:
            began = time.perf_counter()
            hit = self.ferry.match(keys)
            matched.append(time.perf_counter() - began)
            return self.ferry.load(hit, blocks)

        loaded = self._timed("load", requests, load, found)
        found["match call"] = statistics.mean(matched)
        assert all(done.ok and done.num_blocks == self.count for done in loaded), loaded
        wrong = [self.card.wrong(*pair) for pair in zip(tables, sums, strict=True)]
        return found, sum(wrong)

    def _timed(
        self, name: str, requests: list[Any], call: Callable[..., Any], found: dict[str, float]
    ) -> list[Any]:
        """Every request's end; notes what a call took, and all until the last end."""
        began = time.perf_counter()
        tickets = [call(*request) for request in requests]
        found[f"{name} call"] = (time.perf_counter() - began) / len(requests)
        done = [self.ferry.wait(ticket) for ticket in tickets]
        found[name] = time.perf_counter() - began
        return done


def measure(shape: str, rounds: int, *, stands_in: bool) -> dict[str, Any]:
    caller = Caller(StandIn if stands_in else Card, shape)
    found: Rounds = {name: [] for name in FIGURES}
    num_wrong = 0
    for number in range(rounds + 3):
        times, wrong = caller.round()
        num_wrong += wrong
        for name, seconds in times.items():
            if number >= 3:  # the first ones warm up
                found[name].append(seconds)
    caller.ferry.close()
    return {"seconds": found, "wrong": num_wrong}


def in_a_process(source: Path, shape: str, options: list[str]) -> dict[str, Any]:
    path = [str(source.resolve()), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, __file__, "--child", shape, *options]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if told.returncode:
        raise SystemExit(told.stderr)
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def report(figures: dict[str, dict[str, Any]], *, quartile: bool) -> str:
    """Milliseconds; of another checkout first, then of this one."""
    lines = [f"| ms | {' | '.join(SHAPES)} |", f"|---|{'---:|' * len(SHAPES)}"]
    for name, words in FIGURES.items():
        cells = []
        for shape in SHAPES:
            values = [found[shape]["seconds"][name] for found in figures.values()]
            of = (lambda v: float(np.percentile(v, 25))) if quartile else statistics.median
            cells.append(" → ".join(f"{1e3 * of(each):.2f}" for each in values if each))
        lines.append(f"| {words} | {' | '.join(cells)} |")
    wrong = sum(shape["wrong"] for found in figures.values() for shape in found.values())
    return "\n".join([*lines, "", f"wrong blocks: {wrong}"])


def provenance(*, stands_in: bool) -> dict[str, str]:
    facts = {
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join(["python", *sys.argv]),
    }
    if not stands_in:
        import torch

        facts |= {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    return facts


def can_measure() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", type=Path, metavar="SRC", help="another checkout's src folder")
    parser.add_argument("--turns", type=int, default=2, help="how often each is measured (2)")
    parser.add_argument("--rounds", type=int, default=15, help="of each shape in a turn (15)")
    parser.add_argument("--stand-in", action="store_true", help="no card: the host's time only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(args.child, args.rounds, stands_in=args.stand_in)))
        return 0
    if not args.stand_in and not can_measure():
        print("needs torch and a GPU, or --stand-in")
        return SKIPPED
    own = Path(__file__).resolve().parent.parent / "src"
    if args.other and not (args.other / "kvferry").is_dir():
        parser.error(f"--other {args.other}: there is no kvferry in that folder")
    sources = {**({"other": args.other} if args.other else {}), "here": own}
    options = ["--rounds", str(args.rounds), *(["--stand-in"] if args.stand_in else [])]
    figures: dict[str, dict[str, Any]] = {name: {} for name in sources}
    for _ in range(args.turns):
        for shape in SHAPES:
            for name, source in sources.items():
                found = in_a_process(source, shape, options)
                kept = figures[name].setdefault(shape, {"seconds": {}, "wrong": 0})
                kept["wrong"] += found["wrong"]
                for figure, values in found["seconds"].items():
                    kept["seconds"].setdefault(figure, []).extend(values)
    print(report(figures, quartile=args.stand_in))
    if args.json:
        facts = provenance(stands_in=args.stand_in)
        args.json.write_text(json.dumps({"provenance": facts, "figures": figures}) + "\n")
    return int(any(shape["wrong"] for found in figures.values() for shape in found.values()))


if __name__ == "__main__":
    sys.exit(main())
