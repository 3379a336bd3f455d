"""What the copy kernel reads: block ids in pinned buffers, and the rows a layout is cut into.

A row is at most ``row_bytes`` contiguous bytes of one segment. Rows never cross a segment, so each
has one device address and one place in the block::

    segment 0 |---- row 0 ----|-- row 1 --|  segment 1 |---- row 2 ----|-- row 3 --|
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.errors import DriverError
from kvferry.transfer.driver.base import Driver, Handles
from kvferry.transfer.job import CopyJob
from kvferry.transfer.layout import GroupLayout, Int64s

log = logging.getLogger(__name__)

MIN_IDS = 512
MAX_BUFFERS = 64
"""Jobs whose ids may be in flight at once; one more waits for the oldest."""

MAX_READ_IN_PLACE = 64
"""Up to this many blocks the kernel reads the ids over the link, in less time than a copy takes to
start. Beyond it the reads would delay the bytes."""


@dataclass(eq=False)
class _Buffer:
    host: int
    device: int
    ids: Int64s
    event: int
    handles: Handles
    is_fenced: bool = False
    """Whether the event marks the end of its use; until then only its taker knows."""


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

        Another thread than the writing one may ask.
        """
        fitting = [buffer for buffer in tuple(self._buffers) if buffer.ids.size >= 2 * count]
        return sum(self._is_free(buffer) for buffer in fitting)

    def close(self) -> None:
        """Give everything back; call only when no copy is in flight. Safe to call twice."""
        buffers, self._buffers, self._taken = self._buffers, [], None
        for buffer in buffers:
            buffer.handles.close()

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
        driver, handles = self._driver, Handles()
        try:
            event = handles.take(driver.create_event(timing=False), driver.destroy_event)
            host = handles.take(driver.alloc_host(8 * size), driver.free_host)
            device = handles.take(driver.alloc_device(8 * size), driver.free_device)
        except DriverError:
            handles.close()
            raise
        ids = np.ctypeslib.as_array((ctypes.c_int64 * size).from_address(host))
        return _Buffer(host, device, ids, event, handles)


LANES = 32
"""Threads that share a row: one warp."""

MAX_STEPS = 8
"""Accesses in flight per thread. Eight of 16 bytes fill a PCIe Gen5 link from two multiprocessors
(one NVIDIA H200); more would not fit the registers of 1024 threads."""


@dataclass(frozen=True)
class RowShape:
    """The accesses that make up a row: what the kernel is compiled for."""

    width: int
    """Bytes of one element."""
    vector: int
    """Elements a thread moves in one access."""
    steps: int
    """Accesses of one thread per row."""

    @cached_property
    def row_bytes(self) -> int:
        return self.width * self.vector * LANES * self.steps


def common_alignment(layout: GroupLayout) -> int:
    """The largest number that divides every address, stride and size of ``layout``."""
    # Offsets are sums of sizes, so what divides the sizes divides them too.
    return math.gcd(*(int(np.gcd.reduce(a)) for a in (layout.bases, layout.strides, layout.sizes)))


def row_shape(layout: GroupLayout, alignment: int) -> RowShape:
    """The widest accesses that ``alignment`` allows, in rows that fit the segments."""
    if alignment % 16 == 0:
        width, vector = 8, 2
    else:
        width, vector = min(8, alignment & -alignment), 1
    step = width * vector * LANES
    total = int(layout.sizes.sum())

    def useful(steps: int) -> tuple[float, int]:
        """Accesses in flight that move bytes: a row longer than its segment idles some threads."""
        rows = -(-layout.sizes // (step * steps))
        return total / (float(rows.sum()) * step), -steps

    choices = [2**power for power in range(MAX_STEPS.bit_length())]
    return RowShape(width, vector, max(choices, key=useful))


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows of one block of a layout, and the tables the kernel finds them by."""

    layout: GroupLayout
    shape: RowShape

    @cached_property
    def rows_per_segment(self) -> Int64s:
        return -(-self.layout.sizes // self.shape.row_bytes)

    @cached_property
    def rows_per_block(self) -> int:
        return int(self.rows_per_segment.sum())

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all segments are equally long, so that a row's segment needs no table."""
        return bool((self.layout.sizes == self.layout.sizes[0]).all())

    @cached_property
    def segments(self) -> Int64s:
        """The segment of each row of a block."""
        return np.repeat(np.arange(self.layout.num_segments), self.rows_per_segment)

    @cached_property
    def starts(self) -> Int64s:
        """Where each row starts within its segment."""
        first = np.cumsum(self.rows_per_segment) - self.rows_per_segment
        return (np.arange(self.rows_per_block) - first[self.segments]) * self.shape.row_bytes

    @cached_property
    def places(self) -> Int64s:
        """Where each row starts within the packed block."""
        return self.layout.offsets[self.segments] + self.starts

    @cached_property
    def is_even(self) -> bool:
        """Whether all rows are full, so that rows and bytes are counted alike."""
        return not (self.layout.sizes % self.shape.row_bytes).any()

    def tables(self) -> Int64s:
        """All the kernel reads, as one array: four numbers per segment, two per row if mixed."""
        layout = self.layout
        parts = [layout.bases, layout.strides, layout.sizes, layout.offsets]
        if not self.is_uniform:
            parts += [self.segments, self.starts]
        return np.concatenate(parts).astype(np.int64)

    def row_at(self, position: int) -> int:
        """The last row that starts at or before byte ``position`` of blocks laid end to end."""
        if self.is_even:
            return position // self.shape.row_bytes
        block, within = divmod(position, self.layout.block_bytes)
        return block * self.rows_per_block + int(np.searchsorted(self.places, within, "right")) - 1

    def position_of(self, row: int) -> int:
        """The byte at which ``row`` starts in blocks laid end to end."""
        if self.is_even:
            return row * self.shape.row_bytes
        block, within = divmod(row, self.rows_per_block)
        return block * self.layout.block_bytes + int(self.places[within])
