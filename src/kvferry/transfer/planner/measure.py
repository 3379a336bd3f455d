"""Calibration: time the paths on this very machine, in a second or two.

Each path is timed by direction, segment size and transfer size on an idle card, then beside a
running model. A path that is hopeless for small segments does not copy many of them. A server's
first start waits for all this, so nothing is timed more often than a choice between paths needs.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module, metadata, util

import numpy as np

from kvferry.core.quantities import KiB, MiB
from kvferry.settings.copy_paths import BY_NAME, COPY_PATHS
from kvferry.transfer.driver.base import BatchForm, Driver, Handles, Priority
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.planner.profile import LEAST_GBPS, MOST_LOST_MS, BusyCell, Cell, Profile

log = logging.getLogger(__name__)

GB = 1e9

NOISE_BYTES = 16 * MiB
"""Random bytes that are made, then repeated: more would take longer than the copies."""


@dataclass(frozen=True)
class Timing:
    """Medians: device time of a job, and how long the call took."""

    seconds: float
    submit_seconds: float

    def over(self, count: int) -> Timing:
        """Each one's share of ``count``."""
        return Timing(self.seconds / count, self.submit_seconds / count)


Call = Callable[[int], object]
"""Queues work on the stream it is given."""


class CopyRig:
    """Owns ``host_bytes`` of pinned host memory, device memory, and a stream per direction.

    Jobs have up to ``num_bytes``; the device memory is twice that. Blocks are spread over all of
    it, layer by layer, and picked at random. ``ready`` is an event of an idle compute stream, as an
    engine passes it while no model runs.
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
        self._layouts: dict[tuple[int, int], GroupLayout] = {}
        self._handles = Handles()
        try:
            self._take()
        except Exception:
            self.close()
            raise

    def layout(self, segment_bytes: int, segments: int) -> GroupLayout:
        """Blocks of ``segments`` equal segments, each layer's blocks together."""
        key = (segment_bytes, segments)
        if key not in self._layouts:
            num_blocks = 2 * self.num_bytes // (segment_bytes * segments)
            layers = np.arange(segments, dtype=np.int64)
            self._layouts[key] = GroupLayout(
                bases=self.device + layers * num_blocks * segment_bytes,
                strides=np.full(segments, segment_bytes),
                sizes=np.full(segments, segment_bytes),
                num_blocks=num_blocks,
            )
        return self._layouts[key]

    def job(
        self,
        direction: Direction,
        segment_bytes: int,
        segments: int,
        num_blocks: int,
        *,
        scattered: bool = False,
    ) -> CopyJob:
        """Random blocks, from or to host slots in one run or, ``scattered``, at random too.

        Scattered slots are every second one: no two of them are neighbours.
        """
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

    def time(self, path: Path, job: CopyJob, *, repeats: int, in_flight: int = 1) -> Timing:
        """Device time from an idle stream to the end of the copy, the call itself included.

        With several ``in_flight`` they are queued one after another; the time is the share of one.
        """
        call = self.call(path, job, in_flight)
        return self.time_in_turn([call], job.direction, repeats=repeats)[0].over(in_flight)

    def call(self, path: Path, job: CopyJob, in_flight: int = 1) -> Call:
        """A call that queues ``job`` by ``path``, ``in_flight`` times."""

        def queue(stream: int) -> None:
            for _ in range(in_flight):
                path.enqueue(job, stream, self.ready)

        return queue

    def time_in_turn(
        self, calls: Sequence[Call], direction: Direction, *, repeats: int
    ) -> list[Timing]:
        """Median times of several calls, each once per turn.

        Neighbours of a virtual machine share its link and processors: a disturbance hits all calls
        of a turn, so the ratios stay valid.
        """
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

SEGMENT_BYTES = (4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, 2 * MiB)
NUM_BYTES = (256 * KiB, 1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB)
SEGMENTS_PER_BLOCK = 64
SMALL_REPEATS, REPEATS = 5, 3
LARGE = 16 * MiB
"""From here on three repeats do: what scatters is the start."""
HOPELESS = 2.0
"""A path is not timed on more bytes of the same segments if the last ones it was given alone took
it so many times as long as the best path took for all."""

SCATTERED = (4 * KiB, 16 * KiB)
"""Segment sizes at which paths are timed with host slots that are no neighbours."""
SCATTERED_BYTES = NUM_BYTES[-2:]

BUSY_SEGMENT, BUSY_SEGMENT_IF_PAID = 16 * KiB, 2 * MiB
"""Segment size at which a path is timed beside a model, and one that pays for each segment: sizes
at which it may be chosen."""
BUSY_BYTES = 64 * MiB
BUSY_ROUNDS = 8

Progress = Callable[[str], None]


def calibrate(
    driver: Driver, paths: Mapping[str, Path], *, progress: Progress = lambda _: None
) -> Profile:
    """Time ``paths`` on the device of ``driver``; what cannot be timed is left out.

    Where the driver has the batch copy, a stopgap for it has nothing to offer.
    """
    candidates = dict(paths)
    if driver.batch_form is not BatchForm.ABSENT:
        stopgaps = {path.name for path in COPY_PATHS if path.is_stopgap}
        candidates = {name: paths[name] for name in paths if name not in stopgaps} or candidates
    with driver.current():
        # Half of the host's slots are left out to scatter the others.
        rig = CopyRig(driver, num_bytes=NUM_BYTES[-1], host_bytes=2 * NUM_BYTES[-1])
        try:
            cells = []
            for direction in Direction:
                for segment_bytes in SEGMENT_BYTES:
                    progress(f"{direction.value}, segments of {segment_bytes // KiB} KiB")
                    cells += list(_time_paths(rig, direction, segment_bytes, candidates))
                cells += list(_time_scattered(rig, direction, candidates))
            busy = tuple(_time_beside_model(rig, candidates, progress))
        finally:
            rig.close()
    return Profile(tuple(cells), busy, provenance(driver), paths=frozenset(paths))


def _time_paths(
    rig: CopyRig, direction: Direction, segment_bytes: int, paths: Mapping[str, Path]
) -> Iterator[Cell]:
    """Larger and larger transfers, by each path in turn until it is hopeless.

    In turn, so that a machine that slows down for a while does so for all of them.
    """
    in_race = dict(paths)
    before: dict[str, float] = {}
    for num_bytes in NUM_BYTES:
        if num_bytes < segment_bytes:
            continue
        segments = min(SEGMENTS_PER_BLOCK, num_bytes // segment_bytes)
        job = rig.job(direction, segment_bytes, segments, num_bytes // (segments * segment_bytes))
        repeats = REPEATS if num_bytes >= LARGE else SMALL_REPEATS
        seconds = {
            name: rig.time(path, job, repeats=repeats).seconds for name, path in in_race.items()
        }
        best = min(seconds.values())
        for name, taken in seconds.items():
            yield Cell(direction, name, segment_bytes, num_bytes // segment_bytes, taken)
            if taken - before.get(name, taken) > HOPELESS * best:
                del in_race[name]
        before = seconds


def _time_scattered(
    rig: CopyRig, direction: Direction, paths: Mapping[str, Path]
) -> Iterator[Cell]:
    for segment_bytes, num_bytes in itertools.product(SCATTERED, SCATTERED_BYTES):
        num_blocks = num_bytes // (segment_bytes * SEGMENTS_PER_BLOCK)
        if num_blocks < 2:
            continue
        job = rig.job(direction, segment_bytes, SEGMENTS_PER_BLOCK, num_blocks, scattered=True)
        # The largest come in a row, if they come; then the start of the first hardly counts.
        in_flight = 2 if num_bytes == SCATTERED_BYTES[-1] else 1
        for path in COPY_PATHS:
            if path.name in paths and not path.pays_per_segment:
                found = rig.time(paths[path.name], job, repeats=REPEATS, in_flight=in_flight)
                size = (segment_bytes, num_blocks * SEGMENTS_PER_BLOCK)
                yield Cell(direction, path.name, *size, found.seconds, num_blocks)


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


def _time_beside_model(
    rig: CopyRig, paths: Mapping[str, Path], progress: Progress
) -> Iterator[BusyCell]:
    if util.find_spec("torch") is None:
        log.warning("torch is not installed: what copies cost the model is not measured")
        return
    # Imported here: torch is heavy, and only these loads need it.
    from kvferry.transfer.planner.slowdown import MatmulLoad, WeightLoad, measure_slowdown, release

    for make_load in (MatmulLoad, WeightLoad):
        try:
            load = make_load()
        except RuntimeError as error:
            # Servers fill the card; what is left may not hold the weights.
            log.warning("what copies cost the model is not measured in full: %s", error)
            continue
        for direction in Direction:
            for name, path in paths.items():
                progress(f"{name}, {direction.value}, beside {load.name}")
                is_paid = BY_NAME[name].pays_per_segment
                segment = BUSY_SEGMENT_IF_PAID if is_paid else BUSY_SEGMENT
                segments = min(SEGMENTS_PER_BLOCK, BUSY_BYTES // segment)
                job = rig.job(direction, segment, segments, BUSY_BYTES // (segment * segments))
                idle = max(
                    job.num_bytes / rig.time(path, job, repeats=REPEATS).seconds / GB, LEAST_GBPS
                )
                found = measure_slowdown(
                    rig, load, path, job, rounds=BUSY_ROUNDS, phases=1, warm_up=4
                )
                # Noise makes a copy that costs nothing seem to give time back.
                lost = min(max(found.lost_ms_per_gb, 0.0), MOST_LOST_MS)
                gbps = max(found.gbps, LEAST_GBPS)
                yield BusyCell(direction, name, load.name, gbps, idle, lost)
        del load
        release()
