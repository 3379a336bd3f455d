"""Memory, streams and jobs to time paths with: what calibration and benchmarks share."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvferry.device.driver.base import Driver, Priority
from kvferry.device.job import CopyJob, Direction
from kvferry.device.layout.base import GroupLayout
from kvferry.device.paths.base import Path

MiB = 1 << 20
GB = 1e9

NOISE_BYTES = 16 * MiB
"""As many random bytes are made, and then repeated: more would take longer than the copies."""


@dataclass(frozen=True)
class Timing:
    """Medians: device time of a job, and how long its caller was held."""

    seconds: float
    submit_seconds: float

    def over(self, count: int) -> Timing:
        """Each one's share of ``count``."""
        return Timing(self.seconds / count, self.submit_seconds / count)


Call = Callable[[int], object]
"""Queues work on the stream it is given."""


class CopyRig:
    """Owns ``host_bytes`` of pinned host memory, device memory, and a stream per way.

    Jobs have up to ``num_bytes``; the device memory is twice that. Blocks are spread over all of
    it, layer by layer, and picked at random. ``ready`` is an event of an idle compute stream: what
    an engine tells a path while no model runs.
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
        self._give_back: list[Callable[[], None]] = []
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
                offsets=layers * segment_bytes,
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

        With several ``in_flight`` they are queued one after another and the time is each one's
        share.
        """
        call = self.call(path, job, in_flight)
        return self.time_call(call, job.direction, repeats=repeats).over(in_flight)

    def time_call(self, call: Call, direction: Direction, *, repeats: int) -> Timing:
        """The same for anything that queues work on a stream."""
        return self.time_in_turn([call], direction, repeats=repeats)[0]

    def time_in_turn(
        self, calls: Sequence[Call], direction: Direction, *, repeats: int
    ) -> list[Timing]:
        """The same for several, one after another and over again.

        Neighbours of a virtual machine share its link and its processors: what they do for a
        moment hits all of the calls, and their ratios are none the worse.
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

    def ceiling(
        self, direction: Direction, num_bytes: int | None = None, *, in_flight: int = 1
    ) -> float:
        """GB/s of one large copy between pinned and device memory: what no path can beat."""
        num_bytes = num_bytes or self.num_bytes
        call = self.plain_call(direction, num_bytes, in_flight)
        timing = self.time_call(call, direction, repeats=9)
        return in_flight * num_bytes / timing.seconds / GB

    def call(self, path: Path, job: CopyJob, in_flight: int = 1) -> Call:
        """Queues ``job`` by ``path``, so often."""

        def queue(stream: int) -> None:
            for _ in range(in_flight):
                path.enqueue(job, stream, self.ready)

        return queue

    def plain_call(self, direction: Direction, num_bytes: int, in_flight: int = 1) -> Call:
        """Queues one large copy, so often."""
        ends = (self.device, self.host) if direction is Direction.LOAD else (self.host, self.device)

        def queue(stream: int) -> None:
            for _ in range(in_flight):
                self.driver.copy_async(*ends, num_bytes, stream)

        return queue

    def _once(self, call: Call, direction: Direction) -> tuple[float, float]:
        """Seconds on the device, and seconds that the caller was held."""
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
        while self._give_back:
            self._give_back.pop()()

    def _take(self) -> None:
        driver = self.driver
        self.host = driver.alloc_host(self.host_bytes)
        self._give_back.append(partial(driver.free_host, self.host))
        self.device = driver.alloc_device(2 * self.num_bytes)
        self._give_back.append(partial(driver.free_device, self.device))
        self.streams: dict[Direction, int] = {}
        for direction, priority in (
            (Direction.LOAD, Priority.HIGH),
            (Direction.STORE, Priority.LOW),
        ):
            stream = driver.create_stream(priority)
            self.streams[direction] = stream
            self._give_back.append(partial(driver.destroy_stream, stream))
        self._events = (driver.create_event(timing=True), driver.create_event(timing=True))
        self.ready = driver.create_event(timing=False)
        for event in (*self._events, self.ready):
            self._give_back.append(partial(driver.destroy_event, event))
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
