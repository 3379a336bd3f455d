"""The loop path: one driver call per segment. Works on every driver, also unpinned."""

from __future__ import annotations

from kvferry.device.driver.base import Driver
from kvferry.device.driver.swap import copy_each
from kvferry.device.job import CopyJob
from kvferry.device.paths.base import Means
from kvferry.device.paths.descriptors import DescriptorTable


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
