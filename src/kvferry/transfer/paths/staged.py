"""The path ``staged``, for stores: a kernel gathers blocks into a ring, large copies empty it.

::

    slot streams     [gather 1]▲[gather 2]──▲[gather 3]──────▲
    job's stream               [copy 1]─────[copy 2─────────][copy 3─────────]

The ring is device memory. The GPU's DMA engines copy at the full rate of the link and do not slow
the model. The gathers of a job run while the previous job is copied. Every ring slot has a stream
for its gathers: beside a model that fills the GPU, all waiting gathers must start when one of the
model's kernels ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import cycle

from kvferry.core.quantities import MiB
from kvferry.errors import DriverError
from kvferry.transfer.driver import Driver, Handles, Priority
from kvferry.transfer.job import CopyJob
from kvferry.transfer.kernels.launch import Grid, IdBuffers, Kernels, Launcher, RowTable, widest
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.paths.direct import HostRuns

log = logging.getLogger(__name__)

ALIGNMENT = 4096
NUM_LARGE = 2
SMALL_SHARE = 16
"""The small slot is a sixteenth of the ring: copying its 4 MiB takes as long as a kernel start."""


@dataclass(eq=False)
class RingSlot:
    """Device memory for one chunk of a store, the stream of its gathers, and its two events."""

    address: int
    num_bytes: int
    stream: int
    filled: int
    emptied: int


class Ring:
    """Owns the device memory, streams and events of the ring's slots; allocates them on ``open``.

    Two large slots are used in turn. A job's first gather goes to a small slot, as no copy of the
    job runs meanwhile.
    """

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        self._small_bytes = _whole_pages(num_bytes // SMALL_SHARE)
        self._large_bytes = _whole_pages((num_bytes - self._small_bytes) // NUM_LARGE)
        self._driver = driver
        self._handles = Handles()
        self.is_open = False

    def open(self) -> None:
        """Allocate the ring's memory, once; after a DriverError nothing stays allocated."""
        if not self.is_open:
            try:
                self._take_all()
            except DriverError:
                self.close()
                raise

    def close(self) -> None:
        """Release everything; call only when no copy is in flight. Safe to call twice."""
        self.is_open = False
        self._handles.close()

    def _take_all(self) -> None:
        driver, large = self._driver, self._large_bytes
        size = NUM_LARGE * large + self._small_bytes
        base = self._handles.take(driver.alloc_device(size), driver.free_device)
        self.id_stream = self._stream()
        """The stream that copies ids to the device, so that they do not wait for copies of KV."""
        self.ids_sent = self._event()
        self.joined = self._event()
        self.large_slots = cycle(
            [self._slot(base + number * large, large) for number in range(NUM_LARGE)]
        )
        """The large slots, alternating."""
        self.small = self._slot(base + NUM_LARGE * large, self._small_bytes)
        self.is_open = True

    def _slot(self, address: int, num_bytes: int) -> RingSlot:
        return RingSlot(address, num_bytes, self._stream(), self._event(), self._event())

    def _event(self) -> int:
        driver = self._driver
        return self._handles.take(driver.create_event(timing=False), driver.destroy_event)

    def _stream(self) -> int:
        driver = self._driver
        return self._handles.take(driver.create_stream(Priority.HIGH), driver.destroy_stream)


def _whole_pages(num_bytes: int) -> int:
    return max(ALIGNMENT, num_bytes // ALIGNMENT * ALIGNMENT)


QUICK_BYTES = 80 * MiB
"""The largest store queued by its caller: queueing takes less time than handing the interpreter to
a thread. Four of 64 MiB took 6.05 ms, by a thread 7.42 ms (one NVIDIA H200, 2026-11-19)."""

GRID = Grid(programs=66, warps=8)
"""A gather takes half the GPU for some ten microseconds per chunk (one NVIDIA H200)."""


class StagedPath(Path):
    """Copies through ``ring_bytes`` of device memory.

    Owns the ring (allocated on first use), the device tables of layouts, and id buffers.
    """

    name = "staged"
    COMMON = widest(to_packed=True, warps=GRID.warps)
    """The kernel variant that most engines need."""

    def __init__(self, driver: Driver, launcher: Launcher, *, ring_bytes: int) -> None:
        super().__init__(driver)
        self._kernels = Kernels(driver, launcher, GRID, to_packed=True)
        self._ids = IdBuffers(driver)
        self._ring = Ring(driver, ring_bytes)

    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        prepared, ring, driver = self._kernels.get(job), self._ring, self._driver
        ring.open()
        chunk, runs = ChunkCursor(job, prepared.rows), None
        used: list[RingSlot] = []
        buffer = self._ids.fill(job)
        # Not on the job's stream: a small copy between two large ones, and the wait for it, cost
        # the link some ten microseconds (one NVIDIA H200).
        self._ids.send(buffer, job, ring.id_stream)
        try:
            arguments = prepared.begin(job, buffer.device)
            driver.record_event(ring.ids_sent, ring.id_stream)
            while chunk.end < chunk.total:
                slot = next(ring.large_slots) if used else ring.small
                chunk.fit(slot.num_bytes)
                self._wait_until_free(slot)
                if slot not in used:
                    used.append(slot)  # before queueing on its stream, for _join_after_fault
                    driver.stream_wait_event(slot.stream, ring.ids_sent)
                    driver.stream_wait_event(slot.stream, ready)
                # The kernel adds offsets from the job's first byte; the slot begins at the chunk's.
                arguments.packed_base = slot.address - chunk.start
                arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
                self._kernels.launch(prepared, slot.stream)
                driver.record_event(slot.filled, slot.stream)
                driver.stream_wait_event(stream, slot.filled)
                # After the launch, so that the GPU need not wait for this computation.
                runs = runs or HostRuns(job)
                runs.copy(driver, chunk.start, chunk.end, slot.address, stream)
                driver.record_event(slot.emptied, stream)
        except BaseException:  # also after a KeyboardInterrupt queued work runs
            self._join_after_fault(used, stream)
            raise
        finally:
            self._ids.take_back(buffer, stream)

    def prepare(self, job: CopyJob) -> None:
        self._kernels.get(job)
        self._ids.prepare()
        self._ring.open()

    def is_quick(self, job: CopyJob) -> bool:
        is_prepared = self._ring.is_open and self._kernels.find(job) is not None
        return is_prepared and job.num_bytes <= QUICK_BYTES

    def close(self) -> None:
        with self._driver.current():
            self._ring.close()
            self._ids.close()
            self._kernels.close()

    def _wait_until_free(self, slot: RingSlot) -> None:
        # A query costs no more than a wait, and may save the GPU a semaphore between copies.
        if not self._driver.event_is_done(slot.emptied):
            self._driver.stream_wait_event(slot.stream, slot.emptied)

    def _join_after_fault(self, used: list[RingSlot], stream: int) -> None:
        """Order all queued work before the failed job's receipt, or else wait for that work."""
        driver, ring = self._driver, self._ring
        streams = (ring.id_stream, *(slot.stream for slot in used))
        try:
            for other in streams:
                driver.record_event(ring.joined, other)
                driver.stream_wait_event(stream, ring.joined)
            for slot in used:
                driver.record_event(slot.emptied, stream)
            return
        except DriverError as error:
            log.warning("a failed copy cannot be fenced, so it is waited for: %s", error)
        for each in (*streams, stream):
            try:
                driver.synchronize_stream(each)
            except DriverError as error:
                # A device that refuses this too is lost and runs nothing any more.
                log.error("a copy could not be waited for: %s", error)


class ChunkCursor:
    """A job's current chunk: rows ``first_row`` to ``last_row``, bytes ``start`` to ``end``."""

    def __init__(self, job: CopyJob, rows: RowTable) -> None:
        self._rows = rows
        self.total = job.num_bytes
        self.first_row = self.last_row = self.start = self.end = 0

    def fit(self, num_bytes: int) -> None:
        """Advance to the next chunk, of at most ``num_bytes``."""
        self.first_row, self.start = self.last_row, self.end
        # A chunk ends at the end of a row, so it may be smaller than its slot but never larger.
        row = self._rows.row_at(min(self.total, self.start + num_bytes))
        self.last_row = max(row, self.first_row + 1)
        self.end = self._rows.position_of(self.last_row)
