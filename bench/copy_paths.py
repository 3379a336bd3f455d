"""Time every copy path, both ways, against one large copy: the tables of one run.

A minute or two on an otherwise idle GPU. With ``--published`` the design of
``designs/published.py`` is timed in the same run, by the same rig, on the same memory.

Needs an NVIDIA GPU, torch and Triton; exits with 77 without.

    python bench/copy_paths.py --quick --report copy.md --json copy.json
    python bench/copy_paths.py --segments 1234,4096
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from _copy_report import OURS, report
from _copy_rig import GB, Call, CopyRig, provenance
from kvferry.config import Config
from kvferry.core.quantities import MiB
from kvferry.errors import DriverError
from kvferry.transfer.driver import Driver
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.contract import Path as CopyPath
from kvferry.transfer.paths.direct import DmaPath
from kvferry.transfer.paths.opening import open_launcher, open_paths

SKIPPED = 77
KiB = 1 << 10


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    segment_bytes: tuple[int, ...]
    large_bytes: tuple[int, ...]
    repeats: int
    auto_repeats: int
    """Of the engine's path for a large transfer, in turn with the ceiling: enough that a
    processor which stops for a tenth of a second does not decide the row."""
    small_repeats: int
    rounds: int
    phases: int


ODD_SEGMENT = 1234
"""Bytes of a segment that no wide access fits."""

FULL = Effort(
    segment_bytes=(ODD_SEGMENT, *(4 * KiB << power for power in range(10))),
    large_bytes=(64 * MiB, 256 * MiB),
    repeats=11,
    auto_repeats=33,
    small_repeats=25,
    rounds=24,
    phases=4,
)
QUICK = Effort(
    segment_bytes=(ODD_SEGMENT, 4 * KiB, 16 * KiB, 64 * KiB, 2 * MiB),
    large_bytes=(64 * MiB, 256 * MiB),
    repeats=3,
    auto_repeats=5,
    small_repeats=9,
    rounds=12,
    phases=2,
)


@dataclass(frozen=True)
class TimedCopy:
    """One timed copy. ``path`` is ``auto`` for the engine's path, then named in ``chosen``.

    ``gbps`` is the rate with ``in_flight`` transfers queued one after another, ``alone_gbps`` that
    of a single one on an idle stream. ``submit_us`` is the time of the call that queues it.
    """

    direction: str
    segment_bytes: int
    segments_per_block: int
    num_blocks: int
    path: str
    gbps: float
    fraction_of_ceiling: float
    seconds: float
    submit_us: float
    chosen: str = ""
    host_slots: str = "run"
    ceiling_gbps: float = 0.0
    in_flight: int = 1
    alone_gbps: float = 0.0


@dataclass(frozen=True)
class SlowdownRow:
    """A load beside copies of one path; ``chosen`` names the engine's."""

    load: str
    direction: str
    path: str
    gbps: float
    factor: float
    lost_ms_per_gb: float
    chosen: str = ""


@dataclass
class BenchResult:
    """All sections of one run."""

    provenance: dict[str, str]
    designs: dict[str, str] = field(default_factory=dict)
    """What the paths are that are not ours, in words."""
    ceiling: dict[str, float] = field(default_factory=dict)
    rows: list[TimedCopy] = field(default_factory=list)
    small: list[TimedCopy] = field(default_factory=list)
    both_ways: dict[str, dict[str, float]] = field(default_factory=dict)
    slowdown: list[SlowdownRow] = field(default_factory=list)


SEGMENTS = 64

LARGE = 64 * MiB
IN_FLIGHT_BYTES = 256 * MiB
"""Large transfers are queued one after another up to this much, as an engine with several in
flight does; one alone is timed too."""

Progress = Callable[[str], None]


class BenchRig(CopyRig):
    """The rig, and one large copy to compare with."""

    def queued(self, path: CopyPath, job: CopyJob, in_flight: int) -> Call:
        """A call that queues ``job`` by ``path``, ``in_flight`` times."""
        call = self.call(path, job)

        def queue(stream: int) -> None:
            for _ in range(in_flight):
                call(stream)

        return queue

    def ceiling(
        self, direction: Direction, num_bytes: int | None = None, *, in_flight: int = 1
    ) -> float:
        """GB/s of one large copy between pinned and device memory: no path can beat it."""
        num_bytes = num_bytes or self.num_bytes
        call = self.plain_call(direction, num_bytes, in_flight)
        timing = self.time_in_turn([call], direction, repeats=9)[0]
        return in_flight * num_bytes / timing.seconds / GB

    def plain_call(self, direction: Direction, num_bytes: int, in_flight: int = 1) -> Call:
        """A call that queues one large copy, ``in_flight`` times."""
        ends = (self.device, self.host) if direction is Direction.LOAD else (self.host, self.device)

        def queue(stream: int) -> None:
            for _ in range(in_flight):
                self.driver.copy_async(*ends, num_bytes, stream)

        return queue


class CopyBenchmark:
    """Owns the memory and paths of one run, not the other ``designs`` timed in the same run."""

    def __init__(
        self,
        driver: Driver,
        effort: Effort,
        progress: Progress,
        *,
        designs: Mapping[str, CopyPath] | None = None,
    ) -> None:
        self.driver = driver
        self.effort = effort
        self.progress = progress
        self.rig = BenchRig(driver, host_bytes=520 * MiB)  # room for slots that are no neighbours
        self.launcher = open_launcher(driver)
        self.ours = open_paths(driver, self.launcher, ring_bytes=Config().staging_ring)
        self.paths: dict[str, CopyPath] = {
            "loop": DmaPath(driver, is_pinned=False),
            "dma": DmaPath(driver),
            **(designs or {}),
        }

    def run(self, command: str, *, only_large: bool = False) -> BenchResult:
        """All sections, which takes a minute or two, or large transfers only."""
        result = BenchResult({**provenance(self.driver), "command": command})
        self.ceilings: dict[Direction, float] = {}
        seen: dict[Direction, list[float]] = {direction: [] for direction in Direction}
        result.rows = list(self._large(seen))
        result.ceiling = {way.value: median(gbps) for way, gbps in seen.items()}
        if only_large:
            return result
        result.small = list(self._small())
        result.both_ways = self._both_ways()
        result.slowdown = list(self._slowdown())
        return result

    def close(self) -> None:
        for path in self.ours.values():
            path.close()
        if self.launcher is not None:
            self.launcher.close()
        self.rig.close()

    # -- sections ----------------------------------------------------------------------------

    def _large(self, ceilings: dict[Direction, list[float]]) -> Iterator[TimedCopy]:
        for direction in Direction:
            for segment_bytes in self.effort.segment_bytes:
                block_bytes = segment_bytes * SEGMENTS
                # Beside each row, not once: neighbours of a virtual machine share its link. The
                # engine's path, which it is there for, is timed in turn with one of its own.
                self.ceilings[direction] = self.rig.ceiling(direction)
                ceilings[direction].append(self.ceilings[direction])
                for num_bytes in self.effort.large_bytes:
                    if num_bytes < block_bytes:
                        continue
                    self.progress(f"{direction.value}, {_kib(segment_bytes)}, {_mib(num_bytes)}")
                    num_blocks = -(-num_bytes // block_bytes)
                    job = self.rig.job(direction, segment_bytes, SEGMENTS, num_blocks)
                    # A call per segment of a few bytes would take a second each.
                    yield from self._time_all(
                        job, self.effort.repeats, only_ours=segment_bytes < 4 * KiB
                    )
                    if block_bytes > 4 * MiB:
                        continue
                    job = self.rig.job(
                        direction, segment_bytes, SEGMENTS, num_blocks, scattered=True
                    )
                    yield from self._time_all(
                        job, self.effort.repeats, only_ours=True, host_slots="scattered"
                    )

    def _small(self) -> Iterator[TimedCopy]:
        for direction in Direction:
            for segment_bytes in (4 * KiB, 16 * KiB, 64 * KiB):
                for num_blocks in (1, 4, 16):
                    self.progress(
                        f"{direction.value}, {num_blocks} blocks of {SEGMENTS} x "
                        f"{_kib(segment_bytes)}"
                    )
                    job = self.rig.job(direction, segment_bytes, SEGMENTS, num_blocks)
                    yield from self._time_all(job, self.effort.small_repeats)

    def _both_ways(self) -> dict[str, dict[str, float]]:
        """Both directions at once, each from a thread of its own, as the engine does."""
        self.progress("both directions at once")
        jobs = [self.rig.job(way, 16 * KiB, SEGMENTS, 256) for way in Direction]
        plain = [self.rig.plain_call(job.direction, job.num_bytes) for job in jobs]
        chosen = [self.rig.call(self.ours[job.direction], job) for job in jobs]
        return {"ceiling": self._time_both(jobs, plain), OURS: self._time_both(jobs, chosen)}

    def _slowdown(self) -> Iterator[SlowdownRow]:
        # Imported here: it needs torch, whose absence has been reported before.
        from _slowdown import MatmulLoad, WeightLoad, measure_slowdown

        for make_load in (MatmulLoad, WeightLoad):
            load = make_load()
            for direction in Direction:
                job = self.rig.job(direction, 16 * KiB, SEGMENTS, 256)
                for name, path in ((OURS, self.ours[direction]), ("dma", self.paths["dma"])):
                    self.progress(f"{name}, {direction.value}, beside {load.name}")
                    found = measure_slowdown(
                        self.rig,
                        load,
                        path,
                        job,
                        rounds=self.effort.rounds,
                        phases=self.effort.phases,
                    )
                    yield SlowdownRow(
                        load.name,
                        direction.value,
                        name,
                        found.gbps,
                        found.factor,
                        found.lost_ms_per_gb,
                        path.name if name == OURS else "",
                    )
            del load

    # -- one cell ----------------------------------------------------------------------------

    def _time_all(
        self, job: CopyJob, repeats: int, *, only_ours: bool = False, host_slots: str = "run"
    ) -> Iterator[TimedCopy]:
        others = {} if only_ours else self.paths
        for name, path in (*others.items(), (OURS, self.ours[job.direction])):
            yield self._row(job, name, path, repeats, host_slots=host_slots)

    def _row(
        self,
        job: CopyJob,
        name: str,
        path: CopyPath,
        repeats: int,
        *,
        host_slots: str,
    ) -> TimedCopy:
        if len(job.device_blocks) * job.layout.num_segments > 4096 and path.name == "dma":
            repeats = 2  # up to a fifth of a second each, and no doubt about the outcome
        is_large = job.num_bytes >= LARGE
        in_flight = round(IN_FLIGHT_BYTES / job.num_bytes) if is_large else 1
        calls = {"alone": self.rig.call(path, job)}
        if in_flight > 1:
            calls["queued"] = self.rig.queued(path, job, in_flight)
        if is_large and name == OURS:
            calls["ceiling"] = self.rig.plain_call(job.direction, self.rig.num_bytes)
            repeats = self.effort.auto_repeats
        times = self.rig.time_in_turn(list(calls.values()), job.direction, repeats=repeats)
        timed = dict(zip(calls, times, strict=True))
        alone = timed["alone"]
        seconds = timed["queued"].seconds / in_flight if in_flight > 1 else alone.seconds
        ceiling = self.ceilings[job.direction]
        if "ceiling" in timed:
            ceiling = self.rig.num_bytes / timed["ceiling"].seconds / GB
        gbps = job.num_bytes / seconds / GB
        return TimedCopy(
            direction=job.direction.value,
            segment_bytes=int(job.layout.sizes[0]),
            segments_per_block=job.layout.num_segments,
            num_blocks=len(job.device_blocks),
            path=name,
            gbps=gbps,
            fraction_of_ceiling=gbps / ceiling,
            seconds=alone.seconds,
            submit_us=1e6 * alone.submit_seconds,
            chosen=path.name if name == OURS else "",
            host_slots=host_slots,
            ceiling_gbps=ceiling,
            in_flight=in_flight,
            alone_gbps=job.num_bytes / alone.seconds / GB,
        )

    def _time_both(
        self, jobs: Sequence[CopyJob], calls: Sequence[Call], repeats: int = 6
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        for job, call in zip(jobs, calls, strict=True):  # warm up alone
            call(self.rig.streams[job.direction])
            self.driver.synchronize_stream(self.rig.streams[job.direction])
        together = threading.Barrier(len(jobs))

        def work(job: CopyJob, call: Call) -> None:
            with self.driver.current():
                stream = self.rig.streams[job.direction]
                together.wait()
                began = time.perf_counter()
                for _ in range(repeats):
                    call(stream)
                self.driver.synchronize_stream(stream)
                took = time.perf_counter() - began
                found[job.direction.value] = repeats * job.num_bytes / took / GB

        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(jobs, calls, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / KiB:.4g} KiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MiB:.4g} MiB"


def run(
    driver: Driver, effort: Effort, command: str, *, published: bool, only_large: bool
) -> BenchResult:
    """One run, with the published design beside our paths if asked for."""
    designs: dict[str, Any] = {}
    with driver.current():
        if published:
            from designs.published import PublishedPath

            designs["published"] = PublishedPath(driver)
        benchmark = CopyBenchmark(driver, effort, show, designs=designs)
        try:
            result = benchmark.run(command, only_large=only_large)
        finally:
            benchmark.close()
            for design in designs.values():
                design.close()
    result.designs.update({name: design.HOW for name, design in designs.items()})
    return result


def show(line: str) -> None:
    """Progress on standard error."""
    if line:
        print(line, file=sys.stderr)


def main() -> int:
    """Run the benchmark and write what was asked for; 77 where nothing can be measured."""
    parser = argparse.ArgumentParser(description="Time every copy path against one large copy.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--published", action="store_true", help="time a published design too")
    parser.add_argument(
        "--segments",
        type=lambda text: tuple(map(int, text.split(","))),
        metavar="BYTES,BYTES",
        help="only large transfers, in segments of these sizes",
    )
    parser.add_argument("--device", type=int, default=0, help="which GPU")
    for kind in ("json", "report"):
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write the {kind}")
    args = parser.parse_args()
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    try:
        driver = Driver.open(args.device)
    except DriverError as error:
        print(f"no NVIDIA GPU here: {error}")
        return SKIPPED
    if missing:
        print(f"needs {' and '.join(missing)}: pip install 'kvferry[gpu]'")
        driver.close()
        return SKIPPED
    try:
        effort = QUICK if args.quick else FULL
        if args.segments:
            effort = replace(effort, segment_bytes=args.segments)
        command = " ".join(["python", *sys.argv])
        found = run(
            driver,
            effort,
            command,
            published=args.published,
            only_large=args.segments is not None,
        )
        data = asdict(found)
    finally:
        driver.close()
    print(report(data))
    if args.json is not None:
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    if args.report is not None:
        args.report.write_text(report(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
