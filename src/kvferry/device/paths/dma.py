"""The dma path: one batch call of the driver for all segments of a job."""

from __future__ import annotations

from kvferry.device.driver.base import Driver, SourceOrder
from kvferry.device.driver.swap import copy_batch
from kvferry.device.job import CopyJob, Direction
from kvferry.device.paths.base import Means
from kvferry.device.paths.descriptors import DescriptorTable


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
