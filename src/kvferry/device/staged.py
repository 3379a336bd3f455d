"""The staged path: a kernel gathers blocks into a ring in device memory, large copies do the rest.

::

    store   the job's      [head by kernel][copy 1───────][copy 2───────][copy 3───────]
            slot streams   [gather 1]▲[gather 2]──────────▲    [gather 3]▲
    load    inbound        [copy 0───────][copy 1───────][copy 2─]
            slot streams                 └▶[scatter 0]  └▶[scatter 1]
            the job's                                            └▶[scatter 2]

The copy engines run at the full rate of the link and take nothing from the model; the kernel works
inside device memory, where a chunk takes a twentieth of the time. Copies of one direction share a
stream, because a copy engine loses some ten microseconds when it turns to another one. Every slot
has a stream for its kernels: beside a model that fills the card, kernels get their turn only when
one of the model's ends, and then all chunks that wait must go at once.
"""

from __future__ import annotations

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

MiB = 1 << 20

GRID = Grid(programs=66, warps=8)
"""Half the card for some ten microseconds per chunk (one NVIDIA H200)."""

HEAD, TAIL = 3 * MiB, 2 * MiB
"""What a store's first kernel writes to host memory by itself, while the first gather runs; and the
size of a load's last chunk, whose scatter no copy hides."""

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
        edges: tuple[int, int] = (HEAD, TAIL),
    ) -> None:
        self._driver = driver
        self._edges = edges
        self._kernels = Kernels(driver, launcher, grid, linear=True)
        self._direct = Kernels(driver, launcher, DIRECT_GRID, linear=False)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}
        self._ring = Ring(driver, ring_bytes)
        self._forks = EventPool(driver, timing=False)

    def enqueue(self, job: CopyJob, stream: int) -> None:
        prepared = self._kernels.get(job)
        self._ring.open()
        used: dict[RingSlot, None] = {}
        fork = _Fork(self._driver, self._forks, stream)
        try:
            if job.direction is Direction.STORE:
                self._store(job, prepared, fork, used)
            else:
                self._load(job, prepared, fork, used)
        except Exception:
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
            self._forks.close()
            for ids in self._ids.values():
                ids.close()
            self._kernels.close()
            self._direct.close()

    # -- the two directions ------------------------------------------------------------------

    def _store(
        self, job: CopyJob, prepared: Prepared, fork: _Fork, used: dict[RingSlot, None]
    ) -> None:
        driver, ring, stream = self._driver, self._ring, fork.stream
        ids = self._ids[job.direction]
        arguments = prepared.begin(job, ids.write(job))
        fork.mark()
        chunk = Cutter(job, prepared.rows, self._edges)
        self._store_head(job, prepared, chunk, stream)
        runs: HostRuns | None = None
        sent = self._send_ids_if_idle(job, chunk, arguments)
        try:
            while not chunk.is_last:
                with ring.lock:
                    slot = ring.next(job.direction)
                    chunk.fit(slot.num_bytes)
                    used[slot] = None
                    fork.hold(slot.stream)
                    sent.hold(slot.stream)
                    self._wait_until_free(slot, slot.stream)
                    _aim(arguments, chunk, slot)
                    self._kernels.launch(prepared, slot.stream)
                    driver.record_event(slot.gathered, slot.stream)
                    driver.stream_wait_event(stream, slot.gathered)
                    runs = runs or HostRuns(job)  # after the launch: the card need not wait
                    runs.store(driver, chunk.start, chunk.end, slot.address, stream)
                    driver.record_event(slot.copied_out, stream)
                    slot.free_after(slot.copied_out)
        finally:
            sent.close()

    def _store_head(self, job: CopyJob, prepared: Prepared, chunk: Cutter, stream: int) -> None:
        """The first bytes straight to host memory: the link is busy before anything is gathered."""
        direct = self._direct.get(job)
        if direct.rows.shape != prepared.rows.shape:
            return  # host slots are aligned worse than the ring, so rows are counted differently
        chunk.fit(self._edges[0])
        arguments = direct.begin(job, prepared.arguments.ids)
        arguments.packed_base, arguments.packed_pitch = job.host_base, job.host_pitch
        arguments.last_row = chunk.last_row
        self._direct.launch(direct, stream)

    def _send_ids_if_idle(self, job: CopyJob, chunk: Cutter, arguments: CopyArguments) -> _Fork:
        """Let the gathers to come read ids on the device, if no load's copies would delay them."""
        inbound = self._ring.inbound
        sent = _Fork(self._driver, self._forks, inbound)
        is_worth_it = len(job.device_blocks) >= MIN_SENT_IDS and not chunk.is_last
        if is_worth_it and self._driver.stream_is_idle(inbound):
            arguments.ids = self._ids[job.direction].send(inbound)
            sent.mark()
        return sent

    def _load(
        self, job: CopyJob, prepared: Prepared, fork: _Fork, used: dict[RingSlot, None]
    ) -> None:
        driver, ring, stream = self._driver, self._ring, fork.stream
        ids = self._ids[job.direction]
        runs = HostRuns(job)
        arguments: CopyArguments | None = None
        chunk = Cutter(job, prepared.rows, self._edges)
        while not chunk.is_last:
            with ring.lock:
                slot = ring.next(job.direction)
                chunk.fit(slot.num_bytes)
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

    def _wait_until_free(self, slot: RingSlot, stream: int) -> None:
        for event in slot.busy_until():
            # Asking costs no more than waiting, and spares the card a semaphore between copies.
            if not self._driver.event_is_done(event):
                self._driver.stream_wait_event(stream, event)

    def _join_after_fault(self, used: dict[RingSlot, None], stream: int) -> None:
        """Bring what other streams already hold before anything queued on ``stream`` later."""
        driver, ring = self._driver, self._ring
        with ring.lock:
            for slot in used:
                slot.free_after(slot.copied_out)
                try:
                    driver.record_event(slot.copied_in, ring.inbound)
                    driver.stream_wait_event(stream, slot.copied_in)
                    driver.record_event(slot.scattered, slot.stream)
                    driver.stream_wait_event(stream, slot.scattered)
                    driver.record_event(slot.copied_out, stream)
                except DriverError:
                    # The first fault is the one to tell; the engine's fence meets this one too.
                    continue


class _Fork:
    """The point of a job's stream that its kernels must come after, on whatever stream they run."""

    def __init__(self, driver: Driver, events: EventPool, stream: int) -> None:
        self.stream = stream
        self._driver = driver
        self._events = events
        self._event: int | None = None
        self._held: set[int] = set()

    def mark(self) -> None:
        """Here, if anything before is still to be waited for."""
        if not self._driver.stream_is_idle(self.stream):
            self._event = self._events.take()
            self._driver.record_event(self._event, self.stream)

    def hold(self, stream: int) -> None:
        """Keep what is queued on ``stream`` from now on behind the mark."""
        if self._event is not None and stream not in self._held:
            self._driver.stream_wait_event(stream, self._event)
            self._held.add(stream)

    def close(self) -> None:
        """Every wait has captured the mark, so its event is free for the next job."""
        if self._event is not None:
            self._events.give(self._event)
            self._event = None


class Cutter:
    """Cuts a job into chunks, each told its slot's size; its attributes are the chunk at hand.

    Rows ``first_row`` to ``last_row`` of the job are bytes ``start`` to ``end`` of its blocks. A
    store's first chunk and a load's last are small.
    """

    def __init__(self, job: CopyJob, rows: RowTable, edges: tuple[int, int]) -> None:
        self._rows = rows
        self._total = job.num_bytes
        self._head, self._tail = edges
        self._is_store = job.direction is Direction.STORE
        self.first_row = self.last_row = self.start = self.end = 0

    @property
    def is_last(self) -> bool:
        return self.end == self._total

    def fit(self, num_bytes: int) -> None:
        """Go on to the next chunk, of at most ``num_bytes``."""
        self.first_row, self.start = self.last_row, self.end
        left = self._total - self.start
        if not self._is_store:
            wanted = left - self._tail if left > self._tail else left
        elif self.start == 0:
            wanted = min(self._head, left)
        else:
            wanted = left
        # A chunk ends where a row does, so it may fall short of its size but never exceed it.
        row = self._rows.row_at(self.start + min(wanted, num_bytes))
        self.last_row = max(self.first_row + 1, row)
        self.end = self._rows.position_of(self.last_row)


def _aim(arguments: CopyArguments, chunk: Cutter, slot: RingSlot) -> None:
    """Point a launch at one chunk and its slot."""
    # The kernel counts from the job's first byte, the slot from the chunk's.
    arguments.packed_base = slot.address - chunk.start
    arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
