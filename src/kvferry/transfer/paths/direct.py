"""Copies by the driver: the paths ``loop`` and ``dma``, and runs of host slots for the ring."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvferry.errors import DriverError
from kvferry.transfer.driver import Addresses, BatchForm, Driver, SourceOrder
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.contract import Means, Path

log = logging.getLogger(__name__)

NO_BATCH = "batch copies are not available (%s); copying one segment per call instead"


def copy_batch(
    driver: Driver,
    dsts: Addresses,
    srcs: Addresses,
    sizes: Addresses,
    order: SourceOrder,
    stream: int,
) -> None:
    """Many copies, as few calls as the driver has: the one place that falls back to a loop."""
    if driver.batch_form is not BatchForm.ABSENT:
        try:
            driver.copy_batch_async(dsts, srcs, sizes, order, stream)
            return
        except DriverError as error:
            # Only "not supported" leaves nothing queued for certain; any other refusal is news.
            if not error.unsupported:
                raise
            driver.batch_form = BatchForm.ABSENT
            log.warning(NO_BATCH, error)
    copy_each(driver, dsts, srcs, sizes, stream)


def copy_each(
    driver: Driver, dsts: Addresses, srcs: Addresses, sizes: Addresses, stream: int
) -> None:
    """One driver call per copy, in stream order."""
    copy = driver.copy_async
    for dst, src, size in zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True):
        copy(dst, src, size, stream)


class Descriptors(NamedTuple):
    """One copy per entry."""

    dsts: Addresses
    srcs: Addresses
    sizes: Addresses


def descriptors(job: CopyJob) -> Descriptors:
    """Every segment of every block of ``job``, block by block."""
    layout = job.layout
    blocks, slots = job.device_blocks[:, None], job.host_slots[:, None]
    device = (layout.bases + blocks * layout.strides).ravel().view(np.uint64)
    host = (job.host_base + slots * job.host_pitch + layout.offsets).ravel().view(np.uint64)
    sizes = np.tile(layout.sizes, len(job.device_blocks)).view(np.uint64)
    if job.direction is Direction.LOAD:
        return Descriptors(device, host, sizes)
    return Descriptors(host, device, sizes)


class LoopPath(Path):
    """One ``copy_async`` per segment: works on every driver and unpinned, with the most calls."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @classmethod
    def open(cls, means: Means) -> LoopPath:
        return cls(means.driver)

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        copy_each(self._driver, *descriptors(job), stream)


class DmaPath(Path):
    """One batch call per job; the driver still takes its time for every descriptor."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        if driver.batch_form is BatchForm.ABSENT:
            log.warning(NO_BATCH, "this driver does not have it")

    @classmethod
    def open(cls, means: Means) -> DmaPath:
        return cls(means.driver)

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        # A store reads live KV: only STREAM keeps the read behind the stream's wait for compute.
        # A load reads a committed host slot, which does not change while it is leased.
        order = SourceOrder.ANY if job.direction is Direction.LOAD else SourceOrder.STREAM
        copy_batch(self._driver, *descriptors(job), order, stream)


FIRST_BYTES, MAX_CALL = 2 << 20, 64
"""Bytes of a job's first batch call, and the most copies of any call. The driver starts no copy
before it has read the whole call, half a microsecond each: so the first call is short, and the next
ones only as long as the link is busy meanwhile (one NVIDIA H200)."""
GROWTH = 4
SINGLE_BYTES, MAX_SINGLES = 512 << 10, 3
"""A load's first runs are copied one by one while the runs after them are still being counted: the
first one always, more as long as each keeps the link busy for longer than its call takes."""


class HostRuns:
    """Maps byte ``n`` of a job's blocks, laid end to end, to its address in host memory."""

    def __init__(self, job: CopyJob) -> None:
        heads = job.run_heads
        self._job = job
        self._first_host = job.host_base + int(job.host_slots[0]) * job.host_pitch
        self._first_end = job.num_bytes
        if len(heads) > 1:
            self._first_end = int(heads[1]) * job.layout.block_bytes
        self._limit = 0  # until the other runs are laid out

    def store(self, driver: Driver, start: int, end: int, ring: int, stream: int) -> None:
        """Queue the copy of bytes ``start`` to ``end`` from the ring to their slots."""
        if end <= self._first_end:
            driver.copy_async(self._first_host + start, ring, end - start, stream)
            return
        host, packed, sizes = self._runs_between(start, end, ring)
        if len(sizes) == 1:
            driver.copy_async(int(host[0]), ring, end - start, stream)
            return
        # The ring is filled by the kernel before: only STREAM keeps the read behind it.
        for part in self._calls(len(sizes)):
            copies = (host[part], packed[part], sizes[part])
            copy_batch(driver, *copies, SourceOrder.STREAM, stream)

    def load(self, driver: Driver, start: int, end: int, ring: int, stream: int) -> None:
        """Queue the copy of bytes ``start`` to ``end`` from their slots to the ring."""
        if start < self._first_end:
            begin, start = start, self._load_first(driver, start, end, ring, stream)
            if start == end:
                return
            ring += start - begin
        host, packed, sizes = self._runs_between(start, end, ring)
        if len(sizes) == 1:
            driver.copy_async(ring, int(host[0]), end - start, stream)
            return
        # A committed host slot does not change while it is leased, so it may be read early.
        for part in self._calls(len(sizes)):
            copies = (packed[part], host[part], sizes[part])
            copy_batch(driver, *copies, SourceOrder.ANY, stream)

    def _load_first(self, driver: Driver, start: int, end: int, ring: int, stream: int) -> int:
        """Queue the first runs, one copy each; returns the byte after the last of them."""
        job, heads = self._job, self._job.run_heads
        block_bytes, at, stop = job.layout.block_bytes, start, min(self._first_end, end)
        host = self._first_host + start
        for run in range(1, MAX_SINGLES + 1):
            driver.copy_async(ring + at - start, host, stop - at, stream)
            at = stop
            if at == end or run == len(heads):
                break
            host = job.host_base + int(job.host_slots[heads[run]]) * job.host_pitch
            stop = int(heads[run + 1]) * block_bytes if run + 1 < len(heads) else job.num_bytes
            if stop - at < SINGLE_BYTES:
                break
            stop = min(stop, end)
        return at

    def _calls(self, num_copies: int) -> Iterator[slice]:
        """Which copies go into one call: few at first, then more and more."""
        start = 0
        while start < num_copies:
            yield slice(start, start + self._limit)
            start += self._limit
            self._limit = min(GROWTH * self._limit, MAX_CALL)

    def _lay_out(self) -> None:
        """Where every run begins, where the last one ends, and the host address of each."""
        job = self._job
        heads = job.run_heads
        self._limit = min(MAX_CALL, max(1, FIRST_BYTES * len(heads) // job.num_bytes))
        self._bounds = np.empty(len(heads) + 1, dtype=np.int64)
        np.multiply(heads, job.layout.block_bytes, out=self._bounds[:-1])
        self._bounds[-1] = job.num_bytes
        self._host = job.host_base + job.host_slots[heads] * job.host_pitch

    def _runs_between(
        self, start: int, end: int, ring: int
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Host address, ring address and size of each run between ``start`` and ``end``."""
        if not self._limit:
            self._lay_out()
        low = int(self._bounds.searchsorted(start, "right")) - 1
        high = int(self._bounds.searchsorted(end))
        host, bounds = self._host[low:high].copy(), self._bounds[low : high + 1].copy()
        host[0] += start - bounds[0]
        bounds[0], bounds[-1] = start, end
        packed, sizes = bounds[:-1] + (ring - start), bounds[1:] - bounds[:-1]
        return host.view(np.uint64), packed.view(np.uint64), sizes.view(np.uint64)


def count_runs(job: CopyJob) -> int:
    """How many copies it takes to reach all host slots of ``job``."""
    return len(job.run_heads) if len(job.host_slots) > 1 else 1
