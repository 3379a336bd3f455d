"""Copies by the driver: arrays of addresses in one call; the paths ``loop`` and ``dma``; and runs
of host slots that follow each other, for the ring of the staged path.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvferry.errors import DriverError, InputError
from kvferry.transfer.driver.base import UNSAFE_STREAMS, Addresses, BatchForm, Driver, SourceOrder
from kvferry.transfer.driver.opening import open_driver
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.contract import Means, Path

log = logging.getLogger(__name__)

DEBUG_VARIABLE = "KVFERRY_DEBUG"
"""Set to 1 to have every call look for destinations that overlap."""

_told: weakref.WeakSet[Driver] = weakref.WeakSet()


def swap_blocks_batch(
    src_ptrs: Any,
    dst_ptrs: Any,
    sizes: Any,
    *,
    is_src_access_order_any: bool = False,
    stream: Any,
    driver: Driver | None = None,
) -> None:
    """Queue ``sizes[i]`` bytes from ``src_ptrs[i]`` to ``dst_ptrs[i]`` on ``stream``, for all i.

    The arrays are int64 or uint64 vectors (numpy, or torch tensors on the CPU) and may be reused
    when the call returns. ``stream`` is a raw handle or a torch stream, never the default one, of
    the device that is current on this thread. No copies is no call. Without the driver's batch
    copy, copies are queued one by one.

    ``is_src_access_order_any`` lets the driver read the sources before earlier work on ``stream``
    has run, even now. Pass it only for sources that no one can write: host slots being loaded,
    never live KV being stored.
    """
    handle = int(getattr(stream, "cuda_stream", stream))
    _refuse_unsafe_stream(handle)
    srcs, dsts = _addresses(src_ptrs, "src_ptrs"), _addresses(dst_ptrs, "dst_ptrs")
    counts = _addresses(sizes, "sizes")
    if not len(srcs) == len(dsts) == len(counts):
        raise InputError(
            f"{len(srcs)} sources, {len(dsts)} destinations and {len(counts)} sizes; "
            "they must pair up"
        )
    if not len(counts):
        return
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        _refuse_overlap(dsts, counts)
    order = SourceOrder.ANY if is_src_access_order_any else SourceOrder.STREAM
    copy_batch(driver or _process_driver(), dsts, srcs, counts, order, handle)


def copy_batch(
    driver: Driver,
    dsts: Addresses,
    srcs: Addresses,
    sizes: Addresses,
    order: SourceOrder,
    stream: int,
) -> None:
    """The same without the checks; the one place that falls back from the batch call to a loop."""
    limit = driver.max_batch or len(sizes)
    for first in range(0, len(sizes), limit):
        part = slice(first, first + limit)
        if driver.batch_form is not BatchForm.ABSENT:
            try:
                driver.copy_batch_async(dsts[part], srcs[part], sizes[part], order, stream)
                continue
            except DriverError as error:
                # Only "not supported" leaves nothing queued for certain; any other refusal is news.
                if not error.unsupported:
                    raise
                driver.batch_form = BatchForm.ABSENT
                _tell_once(driver, str(error))
        else:
            _tell_once(driver, "this driver does not have it")
        copy_each(driver, dsts[part], srcs[part], sizes[part], stream)


def copy_each(
    driver: Driver, dsts: Addresses, srcs: Addresses, sizes: Addresses, stream: int
) -> None:
    """One driver call per copy, in stream order."""
    copy = driver.copy_async
    for dst, src, size in zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True):
        copy(dst, src, size, stream)


def _refuse_unsafe_stream(stream: int) -> None:
    """InputError for the default stream and its special handles."""
    if stream in UNSAFE_STREAMS:
        raise InputError(
            f"stream {stream} is a default stream, which a batch copy may not use; "
            "create a stream for copies"
        )


def _addresses(values: Any, name: str) -> Addresses:
    """A contiguous uint64 vector of positive numbers; a view where one is possible."""
    array = np.asarray(values.numpy() if hasattr(values, "data_ptr") else values)
    if array.ndim != 1:
        raise InputError(f"{name} must be a vector, got an array of shape {array.shape}")
    if not array.size:
        return np.empty(0, dtype=np.uint64)
    if array.dtype not in (np.int64, np.uint64):
        raise InputError(f"{name} must be int64 or uint64, got {array.dtype}")
    # Compared as int64: a negative number is a huge one in uint64, and no address is that large.
    signed = np.ascontiguousarray(array).view(np.int64)
    worst = int(np.argmin(signed))
    if signed[worst] <= 0:
        raise InputError(f"{name}[{worst}] is {array[worst]}; it must be positive")
    return signed.view(np.uint64)


def _refuse_overlap(dsts: Addresses, sizes: Addresses) -> None:
    order = np.argsort(dsts, kind="stable")
    ends = dsts[order] + sizes[order]
    hits = np.flatnonzero(ends[:-1] > dsts[order][1:])
    if hits.size:
        a, b = int(order[hits[0]]), int(order[hits[0] + 1])
        raise InputError(
            f"destinations {a} ({dsts[a]:#x}, {sizes[a]} bytes) and {b} ({dsts[b]:#x}, "
            f"{sizes[b]} bytes) overlap; a batch has no order of its own"
        )


def _tell_once(driver: Driver, why: str) -> None:
    if driver not in _told:
        _told.add(driver)
        log.warning(
            "batch copies are not available (%s); copying one segment per call instead", why
        )


@functools.cache
def _process_driver() -> Driver:
    return open_driver()


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
