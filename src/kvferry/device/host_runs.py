"""The host side of a staged job: slots that follow each other are copied as one run."""

from __future__ import annotations

import numpy as np

from kvferry.device.driver import Addresses, Driver, SourceOrder
from kvferry.device.job import CopyJob
from kvferry.device.swap import copy_batch


class HostRuns:
    """Knows where byte ``n`` of a job's blocks, laid end to end, is in host memory."""

    def __init__(self, job: CopyJob) -> None:
        self._block_bytes = job.layout.block_bytes
        places = job.host_slots * job.host_pitch
        self._addresses = job.host_base + places
        follows = np.empty(len(places), dtype=bool)
        follows[:1] = False
        if job.host_pitch == self._block_bytes:
            follows[1:] = np.diff(job.host_slots) == 1
            if job.host_chunk is not None:
                # The driver refuses one copy across two registrations.
                follows[1:] &= np.diff(places // job.host_chunk) == 0
        else:
            follows[1:] = False
        self._follows = follows

    def store(self, driver: Driver, start: int, end: int, ring: int, stream: int) -> None:
        """Queue the copy of bytes ``start`` to ``end`` from the ring to their slots."""
        host, packed, sizes = self._pieces(start, end, ring)
        if len(sizes) == 1:
            driver.copy_async(int(host[0]), ring, end - start, stream)
        else:
            # The ring is filled by the kernel before: only STREAM keeps the read behind it.
            copy_batch(driver, host, packed, sizes, SourceOrder.STREAM, stream)

    def load(self, driver: Driver, start: int, end: int, ring: int, stream: int) -> None:
        """Queue the copy of bytes ``start`` to ``end`` from their slots to the ring."""
        host, packed, sizes = self._pieces(start, end, ring)
        if len(sizes) == 1:
            driver.copy_async(ring, int(host[0]), end - start, stream)
        else:
            # A committed host slot does not change while it is leased, so it may be read early.
            copy_batch(driver, packed, host, sizes, SourceOrder.ANY, stream)

    def _pieces(self, start: int, end: int, ring: int) -> tuple[Addresses, Addresses, Addresses]:
        """Host address, ring address and size of each run between ``start`` and ``end``."""
        first, last = start // self._block_bytes, -(-end // self._block_bytes)
        heads = np.flatnonzero(~self._follows[first + 1 : last]) + first + 1
        begins = np.concatenate(([start], heads * self._block_bytes))
        host = self._addresses[np.concatenate(([first], heads))]
        host[0] += start - first * self._block_bytes
        sizes = np.diff(begins, append=end)
        packed = begins - start + ring
        return host.view(np.uint64), packed.view(np.uint64), sizes.view(np.uint64)
