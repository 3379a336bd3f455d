"""The path ``staged``, for stores: a kernel gathers blocks into a ring, large copies do the rest.

::

    slot streams     [gather 1]▲[gather 2]──▲[gather 3]──────▲
    the job's                  [copy 1]─────[copy 2─────────][copy 3─────────]

The ring is device memory. The copy engines run at the full rate of the link and take nothing from
the model. The gathers of a job run while the job before it is copied. Every slot has a stream for
its kernels: beside a model that fills the card, all waiting chunks must go when one of its kernels
ends.
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
"""The small slot is this fraction of the ring: 4 MiB of 64, as long as a kernel takes to start."""


@dataclass(eq=False)
class RingSlot:
    """Memory for one chunk, the stream its gathers run on, and an event for each of its steps."""

    address: int
    num_bytes: int
    stream: int
    filled: int
    emptied: int


class Ring:
    """Device memory, streams and events; takes them on ``open``.

    Two large slots are used in turn. A job's first gather, which no copy hides, goes through the
    small one.
    """

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        self._small_bytes = _whole_pages(num_bytes // SMALL_SHARE)
        self._large_bytes = _whole_pages((num_bytes - self._small_bytes) // NUM_LARGE)
        self._driver = driver
        self._handles = Handles()
        self.is_open = False

    def open(self) -> None:
        """Take the ring's memory, once; DriverError leaves nothing taken."""
        if not self.is_open:
            try:
                self._take_all()
            except DriverError:
                self.close()
                raise

    def close(self) -> None:
        """Give everything back; call only when no copy is in flight. Safe to call twice."""
        self.is_open = False
        self._handles.close()

    def _take_all(self) -> None:
        driver, large = self._driver, self._large_bytes
        size = NUM_LARGE * large + self._small_bytes
        base = self._handles.take(driver.alloc_device(size), driver.free_device)
        self.for_ids = self._stream()
        """The stream on which ids are sent, so that they do not queue behind bytes."""
        self.ids_sent = self._event()
        self.joined = self._event()
        self.in_turn = cycle(
            [self._slot(base + number * large, large) for number in range(NUM_LARGE)]
        )
        """The large slots, each when its turn comes."""
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
"""The caller queues such a store sooner than another thread gets the interpreter from it. Four
stores of 64 MiB took 6.05 ms so, and 7.42 ms by the thread (one NVIDIA H200, 2026-11-19)."""

GRID = Grid(programs=66, warps=8)
"""Half the card for some ten microseconds per chunk (one NVIDIA H200)."""


class StagedPath(Path):
    """Copies through ``ring_bytes`` of device memory.

    Owns the ring, taken on first use, tables and id buffers.
    """

    name = "staged"
    COMMON = widest(to_packed=True, warps=GRID.warps)
    """The kernel most engines need."""

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
        # Not where the bytes go: between two large copies, a small one and the wait for it cost the
        # link some ten microseconds (one NVIDIA H200).
        self._ids.send(buffer, job, ring.for_ids)
        try:
            arguments = prepared.begin(job, buffer.device)
            driver.record_event(ring.ids_sent, ring.for_ids)
            while chunk.end < chunk.total:
                slot = next(ring.in_turn) if used else ring.small
                chunk.fit(slot.num_bytes)
                self._wait_until_free(slot)
                if slot not in used:
                    used.append(slot)  # before anything is queued there
                    driver.stream_wait_event(slot.stream, ring.ids_sent)
                    driver.stream_wait_event(slot.stream, ready)
                # The kernel counts from the job's first byte, the slot from the chunk's.
                arguments.packed_base = slot.address - chunk.start
                arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
                self._kernels.launch(prepared, slot.stream)
                driver.record_event(slot.filled, slot.stream)
                driver.stream_wait_event(stream, slot.filled)
                # After the launch: the card need not wait for it.
                runs = runs or HostRuns(job)
                runs.copy(driver, chunk.start, chunk.end, slot.address, stream)
                driver.record_event(slot.emptied, stream)
        except BaseException:  # an interrupt too: what is queued is queued all the same
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
        # Asking costs no more than waiting, and spares the card a semaphore between copies.
        if not self._driver.event_is_done(slot.emptied):
            self._driver.stream_wait_event(slot.stream, slot.emptied)

    def _join_after_fault(self, used: list[RingSlot], stream: int) -> None:
        """Order everything queued already before the failed job's receipt, or wait for it here."""
        driver, ring = self._driver, self._ring
        streams = (ring.for_ids, *(slot.stream for slot in used))
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
                # A device that refuses this too is lost: nothing runs on it any more.
                log.error("a copy could not be waited for: %s", error)


class ChunkCursor:
    """Goes through a job in chunks: rows ``first_row`` to ``last_row``, ``start`` to ``end``."""

    def __init__(self, job: CopyJob, rows: RowTable) -> None:
        self._rows = rows
        self.total = job.num_bytes
        self.first_row = self.last_row = self.start = self.end = 0

    def fit(self, num_bytes: int) -> None:
        """Go on to the next chunk, of at most ``num_bytes``."""
        self.first_row, self.start = self.last_row, self.end
        # A chunk ends where a row does, so it may fall short of its size but never exceed it.
        row = self._rows.row_at(min(self.total, self.start + num_bytes))
        self.last_row = max(row, self.first_row + 1)
        self.end = self._rows.position_of(self.last_row)
