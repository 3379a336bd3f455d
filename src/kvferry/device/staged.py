"""The staged path: a kernel gathers blocks into a ring in device memory, large copies do the rest.

::

    store   slot streams   [gather 0][gather 1]      [gather 2]
            the job's          └▶[copy 0───────]└▶[copy 1───────][copy 2───────]
    load    inbound        [copy 0───────][copy 1───────][copy 2─]
            slot streams                 └▶[scatter 0]  └▶[scatter 1]└▶[scatter 2]
            the job's                                                            └▶

The copy engines run at the full rate of the link and take nothing from the model; the kernel works
inside device memory, where a chunk takes a twentieth of the time. Copies of one direction share a
stream, because a copy engine loses some ten microseconds when it turns to another one. Every slot
has a stream for its kernels: beside a model that fills the card, kernels get their turn only when
one of the model's ends, and then all chunks that wait must go at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.device.driver import Driver
from kvferry.device.events import EventPool
from kvferry.device.host_runs import HostRuns
from kvferry.device.ids import IdBuffers
from kvferry.device.job import CopyJob, Direction
from kvferry.device.launch import CopyArguments, Launcher
from kvferry.device.prepared import Grid, Kernels, Prepared
from kvferry.device.ring import Ring, RingSlot
from kvferry.device.rows import RowTable
from kvferry.errors import DriverError

MiB = 1 << 20

GRID = Grid(programs=66, warps=8)
"""Half the card for some ten microseconds per chunk (one NVIDIA H200)."""

NUM_SLOTS = 4

HEAD, TAIL = 4 * MiB, 2 * MiB
"""Sizes of a store's first chunk and of a load's last: only their kernels are not hidden behind
copies, so they are small."""


@dataclass(frozen=True)
class Chunk:
    """Rows ``first_row`` to ``last_row`` of a job; bytes ``start`` to ``end`` of its blocks."""

    first_row: int
    last_row: int
    start: int
    end: int


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
        num_slots: int = NUM_SLOTS,
        grid: Grid = GRID,
        edges: tuple[int, int] = (HEAD, TAIL),
    ) -> None:
        self._driver = driver
        self._edges = edges
        self._kernels = Kernels(driver, launcher, grid, linear=True)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}
        self._ring = Ring(driver, ring_bytes, num_slots=num_slots)
        self._forks = EventPool(driver, timing=False)

    def enqueue(self, job: CopyJob, stream: int) -> None:
        prepared = self._kernels.get(job)
        self._ring.open()
        fork = self._forks.take()
        used: dict[RingSlot, None] = {}
        try:
            if job.direction is Direction.STORE:
                self._store(job, prepared, stream, fork, used)
            else:
                self._load(job, prepared, stream, fork, used)
        except Exception:
            self._join_after_fault(used, stream)
            raise
        finally:
            # Every wait has captured the fork, so its event is free for the next job.
            self._forks.give(fork)
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

    # -- the two directions ------------------------------------------------------------------

    def _store(
        self,
        job: CopyJob,
        prepared: Prepared,
        stream: int,
        fork: int,
        used: dict[RingSlot, None],
    ) -> None:
        driver, ring = self._driver, self._ring
        arguments = self._begin(job, prepared, stream, fork)
        runs: HostRuns | None = None
        for chunk in _chunks(job, prepared.rows, ring.slot_bytes, self._edges):
            with ring.lock:
                slot = ring.next(job.direction)
                if slot not in used:
                    used[slot] = None
                    driver.stream_wait_event(slot.stream, fork)
                if slot.freed_by is not None:
                    driver.stream_wait_event(slot.stream, slot.freed_by)
                _aim(arguments, chunk, slot)
                self._kernels.launch(prepared, slot.stream)
                driver.record_event(slot.gathered, slot.stream)
                driver.stream_wait_event(stream, slot.gathered)
                runs = runs or HostRuns(job)  # after the launch: the card need not wait for it
                runs.store(driver, chunk.start, chunk.end, slot.address, stream)
                driver.record_event(slot.copied_out, stream)
                slot.freed_by = slot.copied_out

    def _load(
        self,
        job: CopyJob,
        prepared: Prepared,
        stream: int,
        fork: int,
        used: dict[RingSlot, None],
    ) -> None:
        driver, ring = self._driver, self._ring
        runs = HostRuns(job)
        arguments: CopyArguments | None = None
        for chunk in _chunks(job, prepared.rows, ring.slot_bytes, self._edges):
            with ring.lock:
                slot = ring.next(job.direction)
                is_first = slot not in used
                used[slot] = None
                if slot.freed_by is not None:
                    driver.stream_wait_event(ring.inbound, slot.freed_by)
                # Not behind the fork: a leased slot does not change, so it may be read before what
                # the job's stream still waits for. Only the scatter writes what others may read.
                runs.load(driver, chunk.start, chunk.end, slot.address, ring.inbound)
                driver.record_event(slot.copied_in, ring.inbound)
                if arguments is None:  # after the first copy: the link need not wait for it
                    arguments = self._begin(job, prepared, stream, fork)
                if is_first:
                    driver.stream_wait_event(slot.stream, fork)
                driver.stream_wait_event(slot.stream, slot.copied_in)
                _aim(arguments, chunk, slot)
                self._kernels.launch(prepared, slot.stream)
                driver.record_event(slot.scattered, slot.stream)
                slot.freed_by = slot.scattered
        for slot in used:
            driver.stream_wait_event(stream, slot.scattered)

    def _begin(self, job: CopyJob, prepared: Prepared, stream: int, fork: int) -> CopyArguments:
        """Send the ids and mark the point of the job's stream that kernels must come after."""
        arguments = prepared.begin(job, self._ids[job.direction].put(job, stream))
        self._driver.record_event(fork, stream)
        return arguments

    def _join_after_fault(self, used: dict[RingSlot, None], stream: int) -> None:
        """Bring what other streams already hold before anything queued on ``stream`` later."""
        driver, ring = self._driver, self._ring
        with ring.lock:
            for slot in used:
                slot.freed_by = slot.copied_out
                try:
                    driver.record_event(slot.copied_in, ring.inbound)
                    driver.stream_wait_event(stream, slot.copied_in)
                    driver.record_event(slot.scattered, slot.stream)
                    driver.stream_wait_event(stream, slot.scattered)
                    driver.record_event(slot.copied_out, stream)
                except DriverError:
                    # The first fault is the one to tell; the engine's fence meets this one too.
                    continue


def _aim(arguments: CopyArguments, chunk: Chunk, slot: RingSlot) -> None:
    """Point a launch at one chunk and its slot."""
    # The kernel counts from the job's first byte, the slot from the chunk's.
    arguments.packed_base = slot.address - chunk.start
    arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row


def _chunks(
    job: CopyJob, rows: RowTable, slot_bytes: int, edges: tuple[int, int]
) -> Iterator[Chunk]:
    """Cut a job into chunks that fit a slot: a store's first one small, a load's last one."""
    head, tail = edges
    total = job.num_bytes
    first_row, start = 0, 0
    while start < total:
        left = total - start
        if job.direction is Direction.STORE:
            size = min(head, left) if start == 0 else left
        else:
            size = left - tail if left > tail else left
        # A chunk ends where a row does, so it may fall short of its size but never exceed it.
        last_row = max(first_row + 1, rows.row_at(start + min(size, slot_bytes)))
        end = rows.position_of(last_row)
        yield Chunk(first_row, last_row, start, end)
        first_row, start = last_row, end
