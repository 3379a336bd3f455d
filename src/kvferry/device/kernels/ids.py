"""Block ids on their way to a kernel: pinned buffers, reused."""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass

import numpy as np

from kvferry.device.driver.base import Driver
from kvferry.device.job import CopyJob
from kvferry.device.layout.base import Int64s
from kvferry.errors import DriverError

log = logging.getLogger(__name__)

MIN_IDS = 512
MAX_BUFFERS = 64
"""Jobs whose ids may be in flight at once; one more waits for the oldest."""

MAX_READ_IN_PLACE = 64
"""Up to this many blocks the kernel reads the ids over the link: a copy would take longer to start
than the kernel takes to read them. Beyond it the reads would get in the way of the bytes."""


@dataclass(eq=False)
class _Buffer:
    host: int
    device: int
    ids: Int64s
    event: int
    is_fenced: bool = False
    """Whether the event says when the buffer is free; until then only its taker may say so."""


class IdBuffers:
    """Owns pinned buffers of ids, each with a copy in device memory; one thread at a time.

    A buffer holds the block ids of a job and then its slot numbers. It is taken by ``write`` and
    free again when the event recorded by ``fence`` is reached. A pageable buffer would make the
    copy to the device wait for the stream, and the caller with it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._count = 0
        self._buffers: list[_Buffer] = []  # the one used last at the end
        self._taken: _Buffer | None = None
        self.was_idle = True
        """Whether all that was fenced before the last ``write`` had been reached by then."""
        self.is_sent = False
        """Whether what was last written has been sent."""

    def put(self, job: CopyJob, stream: int) -> int:
        """Write the ids of ``job``; returns an address kernels queued on ``stream`` may read."""
        address = self.write(job)
        return address if len(job.device_blocks) <= MAX_READ_IN_PLACE else self.send(stream)

    def write(self, job: CopyJob) -> int:
        """Write the ids of ``job``; returns where a kernel may read them over the link."""
        count = len(job.device_blocks)
        buffer = self._taken = self._take(2 * count)
        self._count = 2 * count
        self.is_sent = False
        buffer.is_fenced = False
        ids = buffer.ids
        ids[:count] = job.device_blocks
        ids[count : 2 * count] = job.host_slots
        return buffer.host

    def send(self, stream: int) -> int:
        """Queue the copy of what was last written; returns its address on the device."""
        buffer = self._taken
        assert buffer is not None, "ids are written before they are sent"
        self._driver.copy_async(buffer.device, buffer.host, 8 * self._count, stream)
        self.is_sent = True
        return buffer.device

    def fence(self, stream: int) -> None:
        """What was queued on ``stream`` until now is all that reads the buffer last written."""
        buffer, self._taken = self._taken, None
        if buffer is not None:
            # If the record is refused the buffer is never used again: better than used too early.
            self._driver.record_event(buffer.event, stream)
            buffer.is_fenced = True

    def num_free(self, count: int) -> int:
        """How many jobs of so many blocks could be written now without another buffer.

        May be asked from another thread than that which writes.
        """
        fitting = [buffer for buffer in tuple(self._buffers) if buffer.ids.size >= 2 * count]
        return sum(self._is_free(buffer) for buffer in fitting)

    def close(self) -> None:
        """Give everything back; call only when no copy is in flight. Safe to call twice."""
        buffers, self._buffers, self._taken = self._buffers, [], None
        for buffer in buffers:
            for give, handle in (
                (self._driver.free_host, buffer.host),
                (self._driver.free_device, buffer.device),
                (self._driver.destroy_event, buffer.event),
            ):
                try:
                    give(handle)
                except DriverError as error:
                    log.warning("an id buffer was not given back: %s", error)

    def _take(self, count: int) -> _Buffer:
        """A free buffer of at least ``count`` ids: the one used last, else the one idle longest."""
        last = self._buffers[-1] if self._buffers else None
        self.was_idle = last is None or self._is_free(last)
        if last is not None and self.was_idle and last.ids.size >= count:
            return last
        while True:
            for index, buffer in enumerate(self._buffers):
                if buffer.ids.size >= count and self._is_free(buffer):
                    self._buffers.append(self._buffers.pop(index))
                    return buffer
            fitting = [b for b in self._buffers if b.is_fenced and b.ids.size >= count]
            if len(self._buffers) < MAX_BUFFERS or not fitting:
                self._buffers.append(self._make(count))
                return self._buffers[-1]
            time.sleep(1e-4)

    def _is_free(self, buffer: _Buffer) -> bool:
        return buffer.is_fenced and self._driver.event_is_done(buffer.event)

    def _make(self, count: int) -> _Buffer:
        size = max(MIN_IDS, 1 << (count - 1).bit_length())
        event = self._driver.create_event(timing=False)
        try:
            host = self._driver.alloc_host(8 * size)
        except DriverError:
            self._driver.destroy_event(event)
            raise
        try:
            device = self._driver.alloc_device(8 * size)
        except DriverError:
            self._driver.destroy_event(event)
            self._driver.free_host(host)
            raise
        ids = np.ctypeslib.as_array((ctypes.c_int64 * size).from_address(host))
        return _Buffer(host, device, ids, event)
