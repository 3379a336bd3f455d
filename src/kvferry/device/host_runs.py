"""The host side of a staged job: slots that follow each other are copied as one run."""

from __future__ import annotations

import numpy as np

from kvferry.device.driver import Addresses, Driver, SourceOrder
from kvferry.device.job import CopyJob
from kvferry.device.layout import Int64s
from kvferry.device.swap import copy_batch


class HostRuns:
    """Knows where byte ``n`` of a job's blocks, laid end to end, is in host memory."""

    def __init__(self, job: CopyJob) -> None:
        self._job = job
        self._block_bytes = job.layout.block_bytes
        self._heads = _heads(job)
        self._one_run: int | None = None
        if not len(self._heads):
            self._one_run = job.host_base + int(job.host_slots[0]) * job.host_pitch

    def store(self, driver: Driver, start: int, end: int, ring: int, stream: int) -> None:
        """Queue the copy of bytes ``start`` to ``end`` from the ring to their slots."""
        if self._one_run is not None:
            driver.copy_async(self._one_run + start, ring, end - start, stream)
            return
        host, packed, sizes = self._pieces(start, end, ring)
        if len(sizes) == 1:
            driver.copy_async(int(host[0]), ring, end - start, stream)
        else:
            # The ring is filled by the kernel before: only STREAM keeps the read behind it.
            copy_batch(driver, host, packed, sizes, SourceOrder.STREAM, stream)

    def load(self, driver: Driver, start: int, end: int, ring: int, stream: int) -> None:
        """Queue the copy of bytes ``start`` to ``end`` from their slots to the ring."""
        if self._one_run is not None:
            driver.copy_async(ring, self._one_run + start, end - start, stream)
            return
        host, packed, sizes = self._pieces(start, end, ring)
        if len(sizes) == 1:
            driver.copy_async(ring, int(host[0]), end - start, stream)
        else:
            # A committed host slot does not change while it is leased, so it may be read early.
            copy_batch(driver, packed, host, sizes, SourceOrder.ANY, stream)

    def _pieces(self, start: int, end: int, ring: int) -> tuple[Addresses, Addresses, Addresses]:
        """Host address, ring address and size of each run between ``start`` and ``end``."""
        job = self._job
        first, last = start // self._block_bytes, -(-end // self._block_bytes)
        low, high = np.searchsorted(self._heads, (first + 1, last))
        heads = self._heads[low:high]
        begins = np.concatenate(([start], heads * self._block_bytes))
        blocks = np.concatenate(([first], heads))
        host = job.host_base + job.host_slots[blocks] * job.host_pitch
        host[0] += start - first * self._block_bytes
        sizes = np.diff(begins, append=end)
        packed = begins - start + ring
        return host.view(np.uint64), packed.view(np.uint64), sizes.view(np.uint64)


def _heads(job: CopyJob) -> Int64s:
    """The blocks of ``job``, after its first, that do not follow the one before them."""
    if job.host_pitch != job.layout.block_bytes:
        return np.arange(1, len(job.host_slots))
    breaks = np.diff(job.host_slots) != 1
    if job.host_chunk is not None:
        # The driver refuses one copy across two registrations.
        breaks |= np.diff(job.host_slots * job.host_pitch // job.host_chunk) != 0
    return np.flatnonzero(breaks) + 1
