"""The staged path: a kernel gathers blocks into a ring in device memory, large copies do the rest.

::

    store   slot streams     [gather 1]▲[gather 2]──▲[gather 3]──────▲
            the job's                  [copy 1]─────[copy 2─────────][copy 3─────────]
    load    inbound        [copy 1──────────][copy 2──────────][copy 3]
            slot streams                     └▶[scatter 1]     └▶[scatter 2]└▶[scatter 3]

The copy engines run at the full rate of the link and take nothing from the model. Copies of one
direction share a stream: a copy engine loses some ten microseconds when it turns to another one.
The gathers of a job run while the job before it is copied. Every slot has a stream for its kernels:
beside a model that fills the card, all waiting chunks must go when one of its kernels ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle

from kvferry.core.quantities import MiB
from kvferry.errors import DriverError
from kvferry.transfer.driver import Driver, Handles, Priority
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.kernels.launch import (
    Grid,
    IdBuffers,
    Kernels,
    Launcher,
    Prepared,
    RowTable,
    widest,
)
from kvferry.transfer.paths.contract import Means, Path
from kvferry.transfer.paths.direct import HostRuns

log = logging.getLogger(__name__)

ALIGNMENT = 4096
NUM_LARGE = 2
SMALL_SHARE = 16
"""The small slot is this fraction of a ring: 4 MiB of 64, as long as a kernel takes to start."""


@dataclass(eq=False)
class RingSlot:
    """Memory for one chunk, the stream its kernels run on, and an event for each of its two steps.

    A store gathers into the slot and copies out of it; a load copies into it and scatters.
    """

    address: int
    num_bytes: int
    stream: int
    filled: int
    emptied: int


class Ring:
    """One direction's device memory, streams and events; takes them on ``open``.

    Two large slots are used in turn. What no copy hides goes through the small one.
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

    def next(self) -> RingSlot:
        """The large slot to use next."""
        return next(self._in_turn)

    def close(self) -> None:
        """Give everything back; call only when no copy is in flight. Safe to call twice."""
        self.is_open = False
        self._handles.close()

    def _take_all(self) -> None:
        driver, large = self._driver, self._large_bytes
        size = NUM_LARGE * large + self._small_bytes
        base = self._handles.take(driver.alloc_device(size), driver.free_device)
        self.inbound = self._stream()
        """The stream on which loads are copied into slots."""
        self.for_ids = self._stream()
        """The stream on which ids are sent, so that they do not queue behind bytes."""
        self.begun = self._event()
        self.ids_sent = self._event()
        self._in_turn = cycle(
            [self._slot(base + number * large, large) for number in range(NUM_LARGE)]
        )
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


GRID = Grid(programs=66, warps=8)
"""Half the card for some ten microseconds per chunk (one NVIDIA H200)."""

FIRST, TAIL = 4 * MiB, 3 * MiB
"""A store's first chunk and a load's last one, whose gather and scatter no copy hides."""


class StagedPath(Path):
    """Copies through ``ring_bytes`` of device memory, half for each direction.

    Owns the rings, taken on first use, tables and id buffers.
    """

    COMMON = tuple(widest(to_packed=way, warps=GRID.warps, linear=True) for way in (False, True))

    def __init__(
        self,
        driver: Driver,
        launcher: Launcher,
        *,
        ring_bytes: int,
        edges: tuple[int, int] = (FIRST, TAIL),
    ) -> None:
        super().__init__(driver)
        self._first, self._tail = edges
        self._kernels = Kernels(driver, launcher, GRID, linear=True)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}
        self._rings = {direction: Ring(driver, ring_bytes // 2) for direction in Direction}

    @classmethod
    def open(cls, means: Means) -> StagedPath:
        assert means.launcher is not None, "opened only where kernels can be launched"
        return cls(means.driver, means.launcher, ring_bytes=means.ring_bytes)

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        for _ in self.pieces(job, stream, ready):
            pass

    def pieces(self, job: CopyJob, stream: int, ready: int | None = None) -> Iterator[None]:
        """Queue a chunk per step."""
        prepared, ring = self._kernels.get(job), self._rings[job.direction]
        ring.open()
        trip = _Trip(job, prepared, ring, stream, ready)
        step = self._store_chunk if job.direction is Direction.STORE else self._load_chunk
        try:
            while trip.chunk.num_left:
                if trip.slots:
                    yield
                step(trip)
            if job.direction is Direction.LOAD:
                for slot in trip.slots:
                    self._driver.stream_wait_event(stream, slot.emptied)
        except BaseException:  # an interrupt too: the pieces before it are queued all the same
            self._join_after_fault(trip)
            raise
        finally:
            self._ids[job.direction].fence(stream)

    def prepare(self, job: CopyJob) -> None:
        self._kernels.get(job)
        self._ids[job.direction].prepare()
        self._rings[job.direction].open()

    def close(self) -> None:
        with self._driver.current():
            for direction in Direction:
                self._rings[direction].close()
                self._ids[direction].close()
            self._kernels.close()

    # -- the two directions ------------------------------------------------------------------

    def _store_chunk(self, trip: _Trip) -> None:
        driver, chunk, stream = self._driver, trip.chunk, trip.stream
        if not trip.slots:
            self._begin_kernels(trip)
            slot = trip.take(trip.ring.small)
            chunk.fit(min(slot.num_bytes, self._first))
        else:
            slot = trip.take(trip.ring.next())
            chunk.fit(slot.num_bytes)
        self._wait_until_free(slot, slot.stream)
        self._launch(trip, slot)
        driver.record_event(slot.filled, slot.stream)
        driver.stream_wait_event(stream, slot.filled)
        # After the launch: the card need not wait for it.
        trip.host_runs.copy(driver, chunk.start, chunk.end, slot.address, stream)
        driver.record_event(slot.emptied, stream)

    def _load_chunk(self, trip: _Trip) -> None:
        driver, chunk, ring, inbound = self._driver, trip.chunk, trip.ring, trip.ring.inbound
        is_first, left = not trip.slots, chunk.num_left
        slot = trip.take(ring.small if left <= ring.small.num_bytes else ring.next())
        chunk.fit(slot.num_bytes, keep=self._tail if left > 2 * self._tail else 0)
        self._wait_until_free(slot, inbound)
        # Not behind the job's stream: a leased slot does not change, so it may be read before the
        # stream has finished waiting. Only scatters write blocks that compute may still read.
        trip.host_runs.copy(driver, chunk.start, chunk.end, slot.address, inbound)
        driver.record_event(slot.filled, inbound)
        if is_first:  # after the first copy: the link need not wait for it
            self._begin_kernels(trip)
        driver.stream_wait_event(slot.stream, slot.filled)
        self._launch(trip, slot)
        driver.record_event(slot.emptied, slot.stream)

    def _begin_kernels(self, trip: _Trip) -> None:
        """Send the ids, and mark what the job's kernels must come after."""
        driver, ring, job = self._driver, trip.ring, trip.job
        # Not where the bytes go: between two large copies, a small one and the wait for it cost
        # the link some ten microseconds (one NVIDIA H200).
        trip.prepared.begin(job, self._ids[job.direction].put(job, ring.for_ids))
        driver.record_event(ring.ids_sent, ring.for_ids)
        if trip.ready is None:
            driver.record_event(ring.begun, trip.stream)
            trip.ready = ring.begun

    def _launch(self, trip: _Trip, slot: RingSlot) -> None:
        """Queue the kernel for the chunk at hand, behind the ids and what the job comes after."""
        if not trip.slots[slot]:
            assert trip.ready is not None, "kernels are begun before they are launched"
            for event in (trip.ring.ids_sent, trip.ready):
                self._driver.stream_wait_event(slot.stream, event)
            trip.slots[slot] = True
        arguments, chunk = trip.prepared.arguments, trip.chunk
        # The kernel counts from the job's first byte, the slot from the chunk's.
        arguments.packed_base = slot.address - chunk.start
        arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
        self._kernels.launch(trip.prepared, slot.stream)

    # -- what waits for what -----------------------------------------------------------------

    def _wait_until_free(self, slot: RingSlot, stream: int) -> None:
        # Asking costs no more than waiting, and spares the card a semaphore between copies.
        if not self._driver.event_is_done(slot.emptied):
            self._driver.stream_wait_event(stream, slot.emptied)

    def _join_after_fault(self, trip: _Trip) -> None:
        """Order everything queued already before the failed job's receipt, or wait for it here."""
        driver, ring, stream = self._driver, trip.ring, trip.stream
        streams = (ring.inbound, ring.for_ids, *(slot.stream for slot in trip.slots))
        try:
            self._join(streams, stream, ring.begun)
            for slot in trip.slots:
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

    def _join(self, streams: Iterable[int], stream: int, event: int) -> None:
        """Bring what ``streams`` hold before anything queued on ``stream`` from now on."""
        for other in streams:
            self._driver.record_event(event, other)
            self._driver.stream_wait_event(stream, event)


class ChunkCursor:
    """Goes through a job in chunks: rows ``first_row`` to ``last_row``, ``start`` to ``end``."""

    def __init__(self, job: CopyJob, rows: RowTable) -> None:
        self._rows = rows
        self._total = job.num_bytes
        self.first_row = self.last_row = self.start = self.end = 0

    @property
    def num_left(self) -> int:
        """The bytes after this chunk."""
        return self._total - self.end

    def fit(self, num_bytes: int, *, keep: int = 0) -> None:
        """Go on to the next chunk, of at most ``num_bytes``; leave ``keep`` bytes, or none."""
        self.first_row, self.start = self.last_row, self.end
        left = self._total - self.start
        wanted = left - keep if left > keep else left
        # A chunk ends where a row does, so it may fall short of its size but never exceed it.
        row = self._rows.row_at(self.start + min(wanted, num_bytes))
        self.last_row = max(row, self.first_row + 1)
        self.end = self._rows.position_of(self.last_row)


class _Trip:
    """One job being queued: where it is cut, and what it has queued on the path's own streams."""

    def __init__(
        self, job: CopyJob, prepared: Prepared, ring: Ring, stream: int, ready: int | None
    ) -> None:
        self.job = job
        self.prepared = prepared
        self.ring = ring
        self.stream = stream
        self.ready = ready
        self.chunk = ChunkCursor(job, prepared.rows)
        self.slots: dict[RingSlot, bool] = {}
        """The slots it uses, and whether their streams come after ids and compute."""

    def take(self, slot: RingSlot) -> RingSlot:
        """Count ``slot`` among those it uses, before anything is queued there."""
        self.slots.setdefault(slot, False)
        return slot

    @cached_property
    def host_runs(self) -> HostRuns:
        return HostRuns(self.job)
