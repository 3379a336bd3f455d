"""The host side of a staged job: slots that follow each other are copied as one run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvferry.device.driver import Addresses, Driver, SourceOrder
from kvferry.device.job import CopyJob
from kvferry.device.layout import Int64s
from kvferry.device.swap import copy_batch

FIRST_CALL, MAX_CALL = 16, 64
"""Copies per batch call. The driver starts none before it has seen all of them, half a microsecond
each: the first calls of a job are short, so that the link need not wait (one NVIDIA H200)."""


class HostRuns:
    """Knows where byte ``n`` of a job's blocks, laid end to end, is in host memory."""

    def __init__(self, job: CopyJob) -> None:
        self._limit = FIRST_CALL
        heads = _heads(job)
        block_bytes = job.layout.block_bytes
        self._one_run: int | None = None
        if len(heads) == 1:
            self._one_run = job.host_base + int(job.host_slots[0]) * job.host_pitch
            return
        self._begins = heads * block_bytes
        self._ends = np.append(self._begins[1:], job.num_bytes)
        self._host = job.host_base + job.host_slots[heads] * job.host_pitch

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
            for part in self._calls(len(sizes)):
                copies = (host[part], packed[part], sizes[part])
                copy_batch(driver, *copies, SourceOrder.STREAM, stream)

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
            for part in self._calls(len(sizes)):
                copies = (packed[part], host[part], sizes[part])
                copy_batch(driver, *copies, SourceOrder.ANY, stream)

    def _calls(self, num_copies: int) -> Iterator[slice]:
        """Which copies go into one call: few at first, then more and more."""
        start = 0
        while start < num_copies:
            yield slice(start, start + self._limit)
            start += self._limit
            self._limit = min(2 * self._limit, MAX_CALL)

    def _pieces(self, start: int, end: int, ring: int) -> tuple[Addresses, Addresses, Addresses]:
        """Host address, ring address and size of each run between ``start`` and ``end``."""
        low = int(self._begins.searchsorted(start, "right")) - 1
        high = int(self._begins.searchsorted(end))
        begins, ends = self._begins[low:high].copy(), self._ends[low:high].copy()
        host = self._host[low:high].copy()
        host[0] += start - begins[0]
        begins[0] = start
        ends[-1] = end
        packed = begins + (ring - start)
        return host.view(np.uint64), packed.view(np.uint64), (ends - begins).view(np.uint64)


def count_runs(job: CopyJob) -> int:
    """How many copies it takes to reach all host slots of ``job``."""
    return len(_heads(job)) if len(job.host_slots) > 1 else 1


def _heads(job: CopyJob) -> Int64s:
    """The blocks of ``job`` that do not follow the one before them, its first one included."""
    slots = job.host_slots
    if job.host_pitch != job.layout.block_bytes:
        return np.arange(len(slots))
    follows = np.zeros(len(slots), dtype=bool)
    np.equal(slots[1:], slots[:-1] + 1, out=follows[1:])
    if job.host_chunk is not None:
        # The driver refuses one copy across two registrations.
        chunks = slots * job.host_pitch // job.host_chunk
        follows[1:] &= chunks[1:] == chunks[:-1]
    return np.flatnonzero(~follows)
