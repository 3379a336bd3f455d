"""Copies by the driver: the path ``dma``, and the ring's copies to runs of host slots."""

from __future__ import annotations

import logging

import numpy as np

from kvferry.errors import DriverError
from kvferry.transfer.driver import Addresses, BatchForm, Driver
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.contract import Path

log = logging.getLogger(__name__)

NO_BATCH = "batch copies are not available (%s); copying one segment per call instead"


def copy_batch(
    driver: Driver,
    dsts: Addresses,
    srcs: Addresses,
    sizes: Addresses,
    stream: int,
) -> None:
    """Queue many copies in one driver call, or one by one if the driver has no batch copy."""
    if driver.batch_form is not BatchForm.ABSENT:
        try:
            driver.copy_batch_async(dsts, srcs, sizes, stream)
            return
        except DriverError as error:
            # Only "not supported" means that nothing was queued; other errors must travel on.
            if not error.unsupported:
                raise
            driver.batch_form = BatchForm.ABSENT
            log.warning(NO_BATCH, error)
    copy_each(driver, dsts, srcs, sizes, stream)


def copy_each(
    driver: Driver, dsts: Addresses, srcs: Addresses, sizes: Addresses, stream: int
) -> None:
    """Queue copies in stream order, one driver call each."""
    copy = driver.copy_async
    for dst, src, size in zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True):
        copy(dst, src, size, stream)


def descriptors(job: CopyJob) -> tuple[Addresses, Addresses, Addresses]:
    """Return target, source and size of every segment of every block of ``job``, block by block."""
    layout = job.layout
    blocks, slots = job.device_blocks[:, None], job.host_slots[:, None]
    device = (layout.bases + blocks * layout.strides).ravel().view(np.uint64)
    host = (job.host_base + slots * job.host_pitch + layout.offsets).ravel().view(np.uint64)
    sizes = np.tile(layout.sizes, len(job.device_blocks)).view(np.uint64)
    if job.direction is Direction.LOAD:
        return device, host, sizes
    return host, device, sizes


class DmaPath(Path):
    """Copies by one batch call per job, or by a call per segment if host memory is not pinned.

    The driver spends time on every segment either way.
    """

    name = "dma"

    def __init__(self, driver: Driver, *, is_pinned: bool = True) -> None:
        super().__init__(driver)
        self._is_pinned = is_pinned
        if is_pinned and driver.batch_form is BatchForm.ABSENT:
            log.warning(NO_BATCH, "this driver does not have it")

    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        copy = copy_batch if self._is_pinned else copy_each
        copy(self._driver, *descriptors(job), stream)


MAX_CALL = 16
"""The most copies of one batch call. The driver starts none before it has read all of them."""


class HostRuns:
    """The runs of adjacent host slots of a store; maps bytes of its packed blocks to addresses."""

    def __init__(self, job: CopyJob) -> None:
        starts, block_bytes = job.host_slots * job.host_pitch, job.layout.block_bytes
        is_head = np.empty(len(starts), dtype=bool)  # true where a slot begins a new run
        is_head[0] = True
        np.not_equal(starts[1:] - starts[:-1], block_bytes, out=is_head[1:])
        if job.host_chunk is not None:
            # The driver refuses one copy across two registrations.
            chunks = starts // job.host_chunk
            is_head[1:] |= chunks[1:] != chunks[:-1]
        heads = is_head.nonzero()[0]
        self._bounds = np.empty(len(heads) + 1, dtype=np.int64)
        np.multiply(heads, block_bytes, out=self._bounds[:-1])
        self._bounds[-1] = job.num_bytes
        self._host = starts[heads] + job.host_base

    def copy(self, driver: Driver, start: int, end: int, ring: int, stream: int) -> None:
        """Queue the copy of bytes ``start`` to ``end`` from address ``ring`` to their slots."""
        low = int(self._bounds.searchsorted(start, "right")) - 1
        high = int(self._bounds.searchsorted(end))
        if high - low == 1:
            address = int(self._host[low]) + start - int(self._bounds[low])
            driver.copy_async(address, ring, end - start, stream)
            return
        host, bounds = self._host[low:high].copy(), self._bounds[low : high + 1].copy()
        host[0] += start - bounds[0]
        bounds[0], bounds[-1] = start, end
        each = (host, bounds[:-1] + (ring - start), bounds[1:] - bounds[:-1])
        dsts, srcs, sizes = (array.view(np.uint64) for array in each)
        for first in range(0, len(sizes), MAX_CALL):
            part = slice(first, first + MAX_CALL)
            copy_batch(driver, dsts[part], srcs[part], sizes[part], stream)
