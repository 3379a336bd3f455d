"""The paths ``loop`` and ``dma``: the driver copies segment by segment, without kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvferry.transfer.driver.base import Addresses, Driver, SourceOrder
from kvferry.transfer.driver.swap import copy_batch, copy_each
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.contract import Means, Path


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
