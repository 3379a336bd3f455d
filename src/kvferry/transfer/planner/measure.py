"""Calibration: time the paths on this very machine, in a fraction of a second.

Each path is timed by direction and size on an idle card, with host slots in one run and scattered.
The costs that fit best are kept.
"""

from __future__ import annotations

import ctypes
import gc
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import import_module, metadata

import numpy as np
import numpy.typing as npt

from kvferry.core.quantities import KiB, MiB
from kvferry.settings.copy_paths import Cost, candidates
from kvferry.transfer.driver import Driver, Handles, Priority
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.planner.profile import Profile, builtin_cost

GB = 1e9

NOISE_BYTES = 16 * MiB
"""Random bytes that are made, then repeated: more would take longer than the copies."""


@dataclass(frozen=True)
class Timing:
    """Medians: device time of a job, and how long the call took."""

    seconds: float
    submit_seconds: float


Call = Callable[[int], object]
"""Queues work on the stream it is given."""


class CopyRig:
    """Owns ``host_bytes`` of pinned host memory, device memory, and a stream per direction.

    Jobs have up to ``num_bytes``; the device memory is twice that. ``ready`` is an event of an idle
    compute stream.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        num_bytes: int = 256 * MiB,
        host_bytes: int | None = None,
    ) -> None:
        self.driver = driver
        self.num_bytes = num_bytes
        self.host_bytes = host_bytes or num_bytes
        self._rng = np.random.default_rng(0)
        self._handles = Handles()
        try:
            self._take()
        except Exception:
            self.close()
            raise

    def layout(self, segment_bytes: int, segments: int) -> GroupLayout:
        """Blocks of ``segments`` equal segments, each layer's blocks together."""
        num_blocks = 2 * self.num_bytes // (segment_bytes * segments)
        bases = self.device + np.arange(segments) * num_blocks * segment_bytes
        sizes = np.full(segments, segment_bytes)
        return GroupLayout(bases, sizes, sizes, num_blocks)

    def job(
        self,
        direction: Direction,
        segment_bytes: int,
        segments: int,
        num_blocks: int,
        *,
        scattered: bool = False,
    ) -> CopyJob:
        """Random blocks, from or to host slots in one run or ``scattered``: no two neighbours."""
        layout = self.layout(segment_bytes, segments)
        slots = np.arange(self.host_bytes // layout.block_bytes)
        if scattered:
            slots = self._rng.permutation(slots[::2])
        return CopyJob(
            direction,
            layout,
            device_blocks=self._rng.permutation(layout.num_blocks)[:num_blocks].astype(np.int64),
            host_slots=slots[:num_blocks].astype(np.int64),
            host_base=self.host,
            host_pitch=layout.block_bytes,
        )

    def call(self, path: Path, job: CopyJob) -> Call:
        """A call that queues ``job`` by ``path``."""
        return lambda stream: path.enqueue(job, stream, self.ready)

    def time_in_turn(
        self, calls: Sequence[Call], direction: Direction, *, repeats: int
    ) -> list[Timing]:
        """Median times of several calls, in turn: what disturbs one disturbs all."""
        found: list[list[tuple[float, float]]] = [[] for _ in calls]
        collecting = gc.isenabled()
        gc.disable()
        try:
            for number in range(1 + repeats):  # the first is a warm-up
                for call, times in zip(calls, found, strict=True):
                    timed = self._once(call, direction)
                    if number:
                        times.append(timed)
        finally:
            if collecting:
                gc.enable()
        return [Timing(*map(statistics.median, zip(*times, strict=True))) for times in found]

    def _once(self, call: Call, direction: Direction) -> tuple[float, float]:
        """Seconds on the device, and seconds of the call."""
        driver, stream = self.driver, self.streams[direction]
        start, end = self._events
        driver.synchronize_stream(stream)
        driver.record_event(start, stream)
        began = time.perf_counter()
        call(stream)
        held = time.perf_counter() - began
        driver.record_event(end, stream)
        driver.synchronize_stream(stream)
        return driver.elapsed_seconds(start, end), held

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        self._handles.close()

    def _take(self) -> None:
        driver, take = self.driver, self._handles.take
        self.host = take(driver.alloc_host(self.host_bytes), driver.free_host)
        self.device = take(driver.alloc_device(2 * self.num_bytes), driver.free_device)
        priorities = {Direction.LOAD: Priority.HIGH, Direction.STORE: Priority.LOW}
        self.streams = {
            direction: take(driver.create_stream(priority), driver.destroy_stream)
            for direction, priority in priorities.items()
        }
        start, end, self.ready = (
            take(driver.create_event(timing=timing), driver.destroy_event)
            for timing in (True, True, False)
        )
        self._events = start, end
        driver.record_event(self.ready, self.streams[Direction.LOAD])
        self._fill()

    def _fill(self) -> None:
        """Random bytes on both sides: a copy of zeros may run faster than yours will."""
        noise = self._rng.bytes(min(NOISE_BYTES, self.host_bytes))
        for start in range(0, self.host_bytes, len(noise)):
            ctypes.memmove(self.host + start, noise, min(len(noise), self.host_bytes - start))
        stream = self.streams[Direction.LOAD]
        for half in range(2):
            at = self.device + half * self.num_bytes
            self.driver.copy_async(at, self.host, self.num_bytes, stream)
        self.driver.synchronize_stream(stream)


MODULE_VERSION = pathlib.Path("/sys/module/nvidia/version")

SEGMENT_BYTES = (4 * KiB, 16 * KiB)
"""What a kernel does costs the same for larger ones."""
NUM_BYTES = (256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB)
SCATTERED_BYTES = NUM_BYTES[-2:]
SEGMENTS_PER_BLOCK = 64
SMALL_REPEATS, REPEATS = 5, 3
LARGE = 16 * MiB
"""From here on three repeats do: what scatters is the start."""

Progress = Callable[[str], None]


def calibrate(
    driver: Driver, paths: Mapping[str, Path], *, progress: Progress = lambda _: None
) -> Profile:
    """Time those of ``paths`` that there is a choice between, on the device of ``driver``."""
    names = candidates(paths)
    with driver.current():
        # Half of the host's slots are left out to scatter the others.
        rig = CopyRig(driver, num_bytes=NUM_BYTES[-1], host_bytes=2 * NUM_BYTES[-1])
        try:
            costs = {}
            for direction in Direction:
                jobs = list(_jobs(rig, direction))
                taken = []
                for job in jobs:
                    runs = len(job.run_heads)
                    progress(f"{direction.value}, {job.num_bytes / MiB:g} MiB, host runs: {runs}")
                    repeats = REPEATS if job.num_bytes >= LARGE else SMALL_REPEATS
                    calls = [rig.call(paths[name], job) for name in names]
                    taken.append(rig.time_in_turn(calls, direction, repeats=repeats))
                for index, name in enumerate(names):
                    seconds = np.array([times[index].seconds for times in taken])
                    costs[direction, name] = _fit(builtin_cost(direction, name), jobs, seconds)
        finally:
            rig.close()
    return Profile(costs, provenance(driver))


def _jobs(rig: CopyRig, direction: Direction) -> Iterator[CopyJob]:
    """Larger and larger transfers, the largest with scattered host slots too."""
    for segment_bytes in SEGMENT_BYTES:
        for num_bytes in NUM_BYTES:
            segments = min(SEGMENTS_PER_BLOCK, num_bytes // segment_bytes)
            num_blocks = num_bytes // (segments * segment_bytes)
            yield rig.job(direction, segment_bytes, segments, num_blocks)
            if num_bytes in SCATTERED_BYTES and num_blocks > 1:
                yield rig.job(direction, segment_bytes, segments, num_blocks, scattered=True)


def _fit(cost: Cost, jobs: Sequence[CopyJob], seconds: npt.NDArray[np.float64]) -> Cost:
    """``cost`` with the start, rate and seconds per run that fit the timings best, none negative.

    Errors count by their share of the time, so that small copies weigh as much as large ones.
    """
    rows = [(1.0, job.num_bytes / GB, len(job.run_heads) - 1) for job in jobs]
    table = np.array(rows) / np.maximum(seconds, 1e-9)[:, None]
    found, used = np.zeros(3), [0, 1, 2]
    while used:
        best = np.linalg.lstsq(table[:, used], np.ones(len(rows)), rcond=None)[0]
        if (best >= 0).all():
            found[used] = best
            break
        used = [column for column, value in zip(used, best, strict=True) if value >= 0]
    start, per_gb, per_run = found.tolist()
    return replace(cost, start=start, rate=GB / max(per_gb, 1e-6), per_run=per_run)


def provenance(driver: Driver) -> dict[str, str]:
    """Where and when a measurement was made, and with what."""
    identity = driver.identity()
    versions = {name: _version(name) for name in ("torch", "triton", "numpy")}
    return {
        "source": "measurements on this machine",
        "gpu": identity.name,
        "driver": _driver_version(identity.driver_version),
        "link": identity.link,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "kvferry": str(import_module("kvferry").__version__),
        "python": platform.python_version(),
        **versions,
    }


def _driver_version(api: int) -> str:
    """``580.95.05 (CUDA 13.0)``, or without the first where the kernel does not tell."""
    cuda = f"CUDA {api // 1000}.{api % 1000 // 10}"
    try:
        return f"{MODULE_VERSION.read_text().strip()} ({cuda})"
    except OSError:
        return cuda


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
