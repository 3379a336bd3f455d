"""The staged path: a kernel gathers blocks into a ring in device memory, large copies do the rest.

::

    store   slot streams   [gather 1][gather 2]─────▲[gather 3]──────▲
            beside           [head by kernel]       │                │
            the job's           ▲[copy 1]───────────[copy 2─────────][copy 3─────────]
    load    inbound        [copy 1──────────][copy 2──────────][copy 3]
            slot streams                     └▶[scatter 1]     └▶[scatter 2]
            the job's                                                  └▶[scatter 3]

The copy engines run at the full rate of the link and take nothing from the model; the kernel works
inside device memory, where a chunk takes a twentieth of the time. Copies of one direction share a
stream, because a copy engine loses some ten microseconds when it turns to another one. A copy that
waits for a kernel, or a kernel for a copy, starts that much later too: so the gathers of a job run
while the job before it is still being copied, and only the first chunk of the first job, kept
small, has anyone wait. Until it can be copied, a kernel writes a few bytes to host memory itself.

Every slot has a stream for its kernels: beside a model that fills the card, kernels get their turn
only when one of the model's ends, and then all chunks that wait must go at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kvferry.device.driver import Driver
from kvferry.device.events import EventPool
from kvferry.device.host_runs import HostRuns
from kvferry.device.ids import IdBuffers
from kvferry.device.job import CopyJob, Direction
from kvferry.device.kernel_path import GRID as DIRECT_GRID
from kvferry.device.launch import CopyArguments, Launcher
from kvferry.device.prepared import Grid, Kernels, Prepared
from kvferry.device.ring import Ring, RingSlot
from kvferry.device.rows import RowTable
from kvferry.errors import DriverError

log = logging.getLogger(__name__)

MiB = 1 << 20

GRID = Grid(programs=66, warps=8)
"""Half the card for some ten microseconds per chunk (one NVIDIA H200)."""

FIRST, HEAD, TAIL = 4 * MiB, 2 * MiB, 3 * MiB
"""A store's first chunk, whose gather no copy hides; what a kernel then writes to host memory by
itself until that chunk can be copied (more would hold the gathers up: writes over the link fill the
way to memory for everyone); and a load's last chunk, whose scatter no copy hides. The first and the
last have the ring's small slot."""

MIN_SENT_IDS = 64
"""From this many blocks on, ids are worth a copy to the device even where it may be late."""


class StagedPath:
    """Copies through a ring of ``ring_bytes`` device memory, taken on first use.

    Owns the ring, tables and id buffers.
    """

    name = "staged"

    def __init__(
        self,
        driver: Driver,
        launcher: Launcher,
        *,
        ring_bytes: int = 64 * MiB,
        grid: Grid = GRID,
        edges: tuple[int, int, int] = (FIRST, HEAD, TAIL),
    ) -> None:
        self._driver = driver
        self._first, self._head, self._tail = edges
        self._kernels = Kernels(driver, launcher, grid, linear=True)
        self._direct = Kernels(driver, launcher, DIRECT_GRID)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}
        self._ring = Ring(driver, ring_bytes)
        self._events = EventPool(driver, timing=False)

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        prepared = self._kernels.get(job)
        self._ring.open()
        used: dict[RingSlot, None] = {}
        fork = _Fork(self._driver, self._events, stream, ready)
        try:
            if job.direction is Direction.STORE:
                self._store(job, prepared, fork, used)
            else:
                self._load(job, prepared, fork, used)
        except BaseException:  # an interrupt too: what it cuts short is queued all the same
            with self._ring.lock:
                self._join_after_fault(used, stream)
            raise
        finally:
            fork.close()
            self._ids[job.direction].fence(stream)

    def is_quick(self, job: CopyJob) -> bool:
        return False

    def close(self) -> None:
        with self._driver.current():
            self._ring.close()
            self._events.close()
            for ids in self._ids.values():
                ids.close()
            self._kernels.close()
            self._direct.close()

    # -- the two directions ------------------------------------------------------------------

    def _store(
        self, job: CopyJob, prepared: Prepared, fork: _Fork, used: dict[RingSlot, None]
    ) -> None:
        driver, ring, stream = self._driver, self._ring, fork.stream
        direct = self._direct.get(job)  # now: what is new takes long, and a turn holds others up
        arguments = prepared.begin(job, self._ids[job.direction].write(job))
        fork.mark()
        sent = _Fork(driver, self._events, ring.inbound)
        chunk = Cutter(job, prepared.rows)
        runs: HostRuns | None = None
        has_head = False
        try:
            while not chunk.is_last:
                is_first = runs is None
                with self._turn(used, stream):
                    slot = ring.next(job.direction, 0 if is_first else None)
                    chunk.fit(min(slot.num_bytes, self._first) if is_first else slot.num_bytes)
                    start, end = chunk.start, chunk.end
                    used[slot] = None
                    self._gather(chunk, prepared, slot, (fork, sent))
                    if is_first:
                        has_head = self._store_head(job, prepared, direct, chunk, stream)
                    driver.stream_wait_event(stream, slot.gathered)
                    runs = runs or HostRuns(job)  # after the launch: the card need not wait
                    runs.store(driver, start, end, slot.address, stream)
                    driver.record_event(slot.copied_out, stream)
                    slot.free_after(slot.copied_out)
                if is_first:
                    self._send_ids_if_idle(job, chunk, arguments, sent)
            if has_head:
                self._join((ring.beside,), stream)
        finally:
            sent.close()

    def _gather(
        self, chunk: Cutter, prepared: Prepared, slot: RingSlot, after: Iterable[_Fork]
    ) -> None:
        for fork in after:
            fork.hold(slot.stream)
        self._wait_until_free(slot, slot.stream)
        _aim(prepared.arguments, chunk, slot)
        self._kernels.launch(prepared, slot.stream)
        self._driver.record_event(slot.gathered, slot.stream)

    def _store_head(
        self, job: CopyJob, prepared: Prepared, direct: Prepared, chunk: Cutter, stream: int
    ) -> bool:
        """Some bytes straight to host memory, if the link would be idle until the first copy.

        An idle ``stream`` also says that all the job must come after is done: no wait is needed.
        """
        if chunk.is_last or not self._driver.stream_is_idle(stream):
            return False
        if direct.rows.shape != prepared.rows.shape:
            return False  # host slots are aligned worse than the ring: rows are counted otherwise
        chunk.fit(self._head)
        arguments = direct.begin(job, prepared.arguments.ids)
        arguments.packed_base, arguments.packed_pitch = job.host_base, job.host_pitch
        arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
        self._direct.launch(direct, self._ring.beside)
        return True

    def _send_ids_if_idle(
        self, job: CopyJob, chunk: Cutter, arguments: CopyArguments, sent: _Fork
    ) -> None:
        """Let the gathers to come read ids on the device, if no load's copies would delay them."""
        inbound = self._ring.inbound
        is_worth_it = len(job.device_blocks) >= MIN_SENT_IDS and not chunk.is_last
        if is_worth_it and self._driver.stream_is_idle(inbound):
            arguments.ids = self._ids[job.direction].send(inbound)
            sent.mark()

    def _load(
        self, job: CopyJob, prepared: Prepared, fork: _Fork, used: dict[RingSlot, None]
    ) -> None:
        driver, ring, stream = self._driver, self._ring, fork.stream
        ids = self._ids[job.direction]
        runs = HostRuns(job)
        arguments: CopyArguments | None = None
        chunk = Cutter(job, prepared.rows)
        while not chunk.is_last:
            with self._turn(used, stream):
                left = chunk.num_left
                slot = ring.next(job.direction, left)
                chunk.fit(slot.num_bytes, keep=self._tail if left > 2 * self._tail else 0)
                used[slot] = None
                self._wait_until_free(slot, ring.inbound)
                # Not behind the fork: a leased slot does not change, so it may be read before what
                # the job's stream still waits for. Only the scatter writes what others may read.
                runs.load(driver, chunk.start, chunk.end, slot.address, ring.inbound)
                if arguments is None:  # after the first copy: the link need not wait for it
                    ids.write(job)
                    arguments = prepared.begin(job, ids.send(ring.inbound))
                    fork.mark()
                driver.record_event(slot.copied_in, ring.inbound)
                # The last kernel is what the job waits for, so it runs where the job does.
                kernel_stream = stream if chunk.is_last else slot.stream
                if not chunk.is_last:
                    fork.hold(slot.stream)
                driver.stream_wait_event(kernel_stream, slot.copied_in)
                _aim(arguments, chunk, slot)
                self._kernels.launch(prepared, kernel_stream)
                driver.record_event(slot.scattered, kernel_stream)
                slot.free_after(slot.scattered)
        for slot in used:
            driver.stream_wait_event(stream, slot.scattered)

    # -- what waits for what -----------------------------------------------------------------

    @contextmanager
    def _turn(self, used: dict[RingSlot, None], stream: int) -> Iterator[None]:
        """The time to queue all work on one slot, while nobody else takes any."""
        with self._ring.lock:
            try:
                yield
            except BaseException:
                # Before the lock goes: to the other direction the slot would look free, and what
                # is queued for it already would run over the bytes that one puts there.
                self._join_after_fault(used, stream)
                raise

    def _wait_until_free(self, slot: RingSlot, stream: int) -> None:
        for event in slot.busy_until():
            # Asking costs no more than waiting, and spares the card a semaphore between copies.
            if not self._driver.event_is_done(event):
                self._driver.stream_wait_event(stream, event)

    def _join(self, streams: Iterable[int], stream: int) -> None:
        """Bring what ``streams`` hold before anything queued on ``stream`` from now on."""
        event = self._events.take()
        try:
            for other in streams:
                self._driver.record_event(event, other)
                self._driver.stream_wait_event(stream, event)
        finally:
            self._events.give(event)

    def _join_after_fault(self, used: dict[RingSlot, None], stream: int) -> None:
        """Whatever is queued already must have run when the failed job's receipt is given.

        Where the driver will not order it, we wait for it here: memory that a stray copy or kernel
        still touches would go to someone else. Afterwards no slot is ``used`` any more.
        """
        driver, ring = self._driver, self._ring
        slots = tuple(used)
        used.clear()
        if not slots:
            return  # nothing was queued, or all of it is in order already
        streams = dict.fromkeys((ring.inbound, ring.beside, *(slot.stream for slot in slots)))
        try:
            self._join(streams, stream)
            for slot in slots:
                # The other direction may have used it since: then it is free after that as well.
                self._wait_until_free(slot, stream)
                driver.record_event(slot.copied_out, stream)
                slot.free_after(slot.copied_out)
            return
        except DriverError as error:
            log.warning("a failed copy cannot be fenced, so it is waited for: %s", error)
        for other in (*streams, stream):
            try:
                driver.synchronize_stream(other)
            except DriverError as error:
                # What refuses this too is a device that is lost: nothing runs on it any more.
                log.error("a failed copy could not be waited for: %s", error)


class _Fork:
    """The point that a job's kernels must come after, on whatever stream they run.

    That is ``ready`` or, where none was given, all that ``stream`` holds at the mark.
    """

    def __init__(
        self, driver: Driver, events: EventPool, stream: int, ready: int | None = None
    ) -> None:
        self.stream = stream
        self._ready = ready
        self._driver = driver
        self._events = events
        self._event: int | None = None
        self._held: set[int] = set()

    def mark(self) -> None:
        """Here, if anything before is still to be waited for."""
        if self._ready is not None:
            self._event = None if self._driver.event_is_done(self._ready) else self._ready
        elif not self._driver.stream_is_idle(self.stream):
            self._event = self._events.take()
            self._driver.record_event(self._event, self.stream)

    def hold(self, stream: int) -> None:
        """Keep what is queued on ``stream`` from now on behind the mark."""
        if self._event is not None and stream not in self._held:
            self._driver.stream_wait_event(stream, self._event)
            self._held.add(stream)

    def close(self) -> None:
        """Every wait has captured the mark, so its event is free for the next job."""
        if self._event is not None and self._ready is None:
            self._events.give(self._event)
        self._event = None


class Cutter:
    """Cuts a job into chunks as large as it is told; its attributes are the chunk at hand.

    Rows ``first_row`` to ``last_row`` of the job are bytes ``start`` to ``end`` of its blocks.
    """

    def __init__(self, job: CopyJob, rows: RowTable) -> None:
        self._rows = rows
        self._total = job.num_bytes
        self.first_row = self.last_row = self.start = self.end = 0

    @property
    def is_last(self) -> bool:
        return self.end == self._total

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
        self.last_row = max(self.first_row + 1, row)
        self.end = self._rows.position_of(self.last_row)


def _aim(arguments: CopyArguments, chunk: Cutter, slot: RingSlot) -> None:
    """Point a launch at one chunk and its slot."""
    # The kernel counts from the job's first byte, the slot from the chunk's.
    arguments.packed_base = slot.address - chunk.start
    arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
