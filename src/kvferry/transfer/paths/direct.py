"""The loop path: one driver call per segment. Works on every driver, also unpinned."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import numpy as np

from kvferry.transfer.driver.base import Addresses, Driver, SourceOrder
from kvferry.transfer.driver.swap import copy_batch, copy_each
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.layout import GroupLayout, Int64s
from kvferry.transfer.paths.contract import Means


class Descriptors(NamedTuple):
    """One copy per entry."""

    dsts: Addresses
    srcs: Addresses
    sizes: Addresses


class DescriptorTable:
    """Builds descriptors from block ids; owns the parts that do not change from job to job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: weakref.WeakKeyDictionary[GroupLayout, Int64s] = weakref.WeakKeyDictionary()

    def build(self, job: CopyJob) -> Descriptors:
        """Every segment of every block of ``job``, block by block."""
        layout = job.layout
        blocks, slots = job.device_blocks[:, None], job.host_slots[:, None]
        device = (layout.bases + blocks * layout.strides).ravel().view(np.uint64)
        host = (job.host_base + slots * job.host_pitch + layout.offsets).ravel().view(np.uint64)
        sizes = self._sizes_of(layout, len(job.device_blocks)).view(np.uint64)
        if job.direction is Direction.LOAD:
            return Descriptors(device, host, sizes)
        return Descriptors(host, device, sizes)

    def _sizes_of(self, layout: GroupLayout, num_blocks: int) -> Int64s:
        wanted = num_blocks * layout.num_segments
        with self._lock:
            known = self._sizes.get(layout)
            if known is None or len(known) < wanted:
                # Doubled, so that a slowly growing batch does not rebuild the table every time.
                known = np.tile(layout.sizes, 2 * num_blocks)
                self._sizes[layout] = known
        return known[:wanted]


# ------------------------------------------------------------------------------------------------
# The loop path: one driver call per segment. Works on every driver, also unpinned.


class LoopPath:
    """One ``copy_async`` per segment: works on every driver, and costs the most calls."""

    COMMON = ()

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._table = DescriptorTable()

    @classmethod
    def open(cls, means: Means) -> LoopPath:
        return cls(means.driver)

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        copy_each(self._driver, *self._table.build(job), stream)

    def is_quick(self, job: CopyJob) -> bool:
        return False

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------
# The dma path: one batch call of the driver for all segments of a job.


class DmaPath:
    """One batch call per job; the driver still takes its time for every descriptor."""

    COMMON = ()

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._table = DescriptorTable()

    @classmethod
    def open(cls, means: Means) -> DmaPath:
        return cls(means.driver)

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        # A store reads live KV: only STREAM keeps the read behind the stream's wait for compute.
        # A load reads a committed host slot, which nobody writes while it is leased.
        order = SourceOrder.ANY if job.direction is Direction.LOAD else SourceOrder.STREAM
        copy_batch(self._driver, *self._table.build(job), order, stream)

    def is_quick(self, job: CopyJob) -> bool:
        return False

    def close(self) -> None:
        pass
