"""Memory and streams of one card for timing copies, and where and when they were timed."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module, metadata

import numpy as np

from kvferry.core.quantities import MiB
from kvferry.transfer.driver import Driver, Handles, Priority
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.contract import Path

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


SYSFS = pathlib.Path("/sys/bus/pci/devices")
MODULE_VERSION = pathlib.Path("/sys/module/nvidia/version")


def provenance(driver: Driver) -> dict[str, str]:
    """Where and when a measurement was made, and with what."""
    identity = driver.identity()
    versions = {name: _version(name) for name in ("torch", "triton", "numpy")}
    return {
        "source": "measurements on this machine",
        "gpu": identity.name,
        "driver": _driver_version(identity.driver_version),
        "link": pcie_link(identity.pci_bus_id),
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


def pcie_link(bus_id: str) -> str:
    """The widest link the card can have here, as in ``"32.0 GT/s PCIe x16"``, or ``"unknown"``.

    Not the current one: an idle card lowers its link.
    """
    # The driver may write the domain with eight digits, the kernel uses four.
    domain, _, rest = bus_id.lower().partition(":")
    device = SYSFS / f"{domain[-4:]}:{rest}"
    try:
        speed = (device / "max_link_speed").read_text().strip()
        width = (device / "max_link_width").read_text().strip()
    except OSError:
        return "unknown"
    return f"{speed} x{width}"
