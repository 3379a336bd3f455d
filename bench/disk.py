"""The tier on disk against the drive itself, and against a file per block, in one run.

    PYTHONPATH=src python bench/disk.py --folder /mnt/nvme/bench --json disk.json

Every way moves the same blocks between the same host memory and one folder, in turn, round after
round: idle, and beside a thread that keeps the interpreter busy. The drive itself is long O_DIRECT
calls at the best of a few depths, idle, once before and once after every other way: a drive is
faster after a rest. All write, then all read what they wrote. Every other way is given as its share
of the drive, the median of the rounds. All files are past the page cache (O_DIRECT) and were
written once before. vLLM's own ``fs`` tier is among them where vLLM can be imported. Needs a file
system with O_DIRECT; exits with 77 without.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import kvferry
from disks.ways import Blocks, BusyThread, DiskWay, FilePerBlock, Raw, Tier, VllmFs, default_bytes
from kvferry.core.quantities import MiB, format_size, parse_size

SKIPPED = 77
DEPTHS = ((1, 16 * MiB), (2, 16 * MiB), (4, 8 * MiB), (8, 4 * MiB), (16, 1 * MiB))
GOALS = {"read": 0.85, "write": 0.8}
STATES = ("idle", "busy")
REST_SECONDS = 2.0
"""Between writing and reading: a drive that has just been written to reads slowly for a while."""


def timed(call: Callable[[], None], num_bytes: int) -> float:
    """GB/s."""
    start = time.perf_counter()
    call()
    return num_bytes / (time.perf_counter() - start) / 1e9


class Run:
    """Measures blocks of one size: owns the data and the folder."""

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        block_bytes: int,
        rounds: int,
        options: dict[str, float],
    ) -> None:
        self.folder = folder
        self.blocks = Blocks(num_bytes, block_bytes)
        self.rounds = rounds
        self.options = options
        self.speeds: dict[str, list[float]] = {}
        self.shares: dict[str, list[float]] = {}

    def ways(self, stack: ExitStack) -> dict[str, DiskWay]:
        made: dict[str, DiskWay] = {"tier": Tier(self.folder, self.blocks, self.options)}
        if self.blocks.block_bytes == MiB:
            made["tier, encrypted"] = Tier(
                self._sub("sealed"), self.blocks, self.options, os.urandom(32)
            )
        made["file per block"] = FilePerBlock(self.folder, self.blocks)
        if importlib.util.find_spec("vllm") is not None:
            made["vLLM fs"] = VllmFs(self.folder, self.blocks)
        for way in made.values():
            stack.callback(way.close)
        return made

    def _sub(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir()
        return path

    def raw(self, stack: ExitStack) -> Raw:
        """The drive at its best depth, by reading."""
        best, speed = DEPTHS[0], 0.0
        raw = Raw(self.folder, self.blocks, 4, 8 * MiB)
        raw.write()
        raw.close()
        for depth in DEPTHS:
            raw = Raw(self.folder, self.blocks, *depth)
            now = timed(raw.read, self.blocks.num_bytes)
            raw.close()
            if now > speed:
                best, speed = depth, now
        print(f"  the drive at {best[0]} x {format_size(best[1])}: {speed:.2f} GB/s", flush=True)
        raw = Raw(self.folder, self.blocks, *best)
        stack.callback(raw.close)
        return raw

    def go(self) -> None:
        with ExitStack() as stack:
            raw = self.raw(stack)
            ways = self.ways(stack)
            for way in ways.values():
                way.write()  # the first writing of a file is another thing
            for _ in range(self.rounds):
                self.all_write(raw, ways)
                time.sleep(REST_SECONDS)
                self.all_read(raw, ways)

    def all_write(self, raw: Raw, ways: dict[str, DiskWay]) -> None:
        before = self.note("drive, write", raw.write)
        for name, way in ways.items():
            for state in STATES:
                with nullcontext() if state == "idle" else BusyThread():
                    self.note(f"{name}, write, {state}", way.write)
                time.sleep(0.6)  # its last commit is not the next one's burden
                before = self.share(f"{name}, write, {state}", before, raw.write)

    def all_read(self, raw: Raw, ways: dict[str, DiskWay]) -> None:
        self.blocks.poison()
        before = self.note("drive, read", raw.read)
        self.blocks.check()
        for name, way in ways.items():
            for state in STATES:
                self.blocks.poison()
                with nullcontext() if state == "idle" else BusyThread():
                    self.note(f"{name}, read, {state}", way.read)
                self.blocks.check()
                before = self.share(f"{name}, read, {state}", before, raw.read)

    def note(self, name: str, call: Callable[[], None]) -> float:
        speed = timed(call, self.blocks.num_bytes)
        self.speeds.setdefault(name, []).append(speed)
        return speed

    def share(self, name: str, before: float, call: Callable[[], None]) -> float:
        """The last run of ``name`` against the drive before and after; returns the latter."""
        after = self.note("drive, write" if "write" in name else "drive, read", call)
        seconds = (1 / before + 1 / after) / 2
        self.shares.setdefault(name, []).append(self.speeds[name][-1] * seconds)
        return after

    def table(self) -> list[dict[str, Any]]:
        rows = []
        for name, speeds in self.speeds.items():
            rows.append(
                {
                    "block_bytes": self.blocks.block_bytes,
                    "way": name,
                    "gb_s": statistics.median(speeds),
                    "of_drive": statistics.median(self.shares.get(name, [1.0])),
                }
            )
        return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("\n| blocks | way | GB/s | of the drive |\n|---|---|---|---|")
    for row in rows:
        size = format_size(row["block_bytes"])
        print(f"| {size} | {row['way']} | {row['gb_s']:.2f} | {row['of_drive']:.2f} |")
    for row in rows:
        verb = "write" if "write" in row["way"] else "read"
        if row["way"].startswith("tier, " + verb) and row["block_bytes"] == MiB:
            word = "kept" if row["of_drive"] >= GOALS[verb] else "NOT kept"
            print(f"goal {GOALS[verb]:.2f} for {row['way']}: {row['of_drive']:.2f} {word}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--size", type=parse_size, default=None, help="bytes moved each time")
    parser.add_argument("--blocks", default="1MiB,128KiB,4MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="of the tier, each way")
    parser.add_argument("--call", type=parse_size, default=None, help="longest call of the tier")
    parser.add_argument("--commit", type=float, default=None, help="seconds between two commits")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    size = args.size or default_bytes(args.folder)
    tried = {
        "num_threads": args.threads,
        "job_bytes": args.call,
        "commit_seconds": args.commit,
    }
    options = {name: value for name, value in tried.items() if value is not None}
    rows: list[dict[str, Any]] = []
    print(f"{platform.node()}, Python {platform.python_version()}, kvferry {kvferry.__version__}")
    for text in args.blocks.split(","):
        folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-", dir=args.folder))
        try:
            print(f"{format_size(size)} in blocks of {text}", flush=True)
            run = Run(folder, size, parse_size(text), args.rounds, options)
            run.go()
            rows += run.table()
        except OSError as error:
            print(f"no O_DIRECT in {args.folder}: {error}", file=sys.stderr)
            return SKIPPED
        finally:
            shutil.rmtree(folder)
    show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps({"size": size, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
