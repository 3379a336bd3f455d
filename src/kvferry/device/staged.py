"""The staged path: a kernel gathers blocks into a ring in device memory, large copies do the rest.

::

    store   slot streams   [gather 0][gather 1]      [gather 2]
            the job's          └▶[copy 0───────]└▶[copy 1───────][copy 2───────]
    load    the job's      [copy 0───────][copy 1───────][copy 2─]
            slot streams                 └▶[scatter 0]  └▶[scatter 1]└▶[scatter 2]

The copy engines run at the full rate of the link and take nothing from the model; the kernel works
inside device memory, where a chunk takes a twentieth of the time. Every ring slot has a stream of
its own: beside a model that fills the card, kernels get their turn only when one of the model's
ends, and then all waiting chunks must go at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.device.driver import Driver
from kvferry.device.events import EventPool
from kvferry.device.host_runs import HostRuns
from kvferry.device.ids import IdBuffers
from kvferry.device.job import CopyJob, Direction
from kvferry.device.launch import Launcher
from kvferry.device.prepared import Grid, Kernels, Prepared
from kvferry.device.ring import Ring, RingSlot
from kvferry.device.rows import RowTable
from kvferry.errors import DriverError

MiB = 1 << 20

GRID = Grid(programs=66, warps=8)
"""Half the card for some ten microseconds per chunk (one NVIDIA H200)."""

NUM_SLOTS = 4

RAMP = (4 * MiB,)
"""Sizes of the first chunks of a store, and of a load's last ones: only they are not hidden
behind the copies, so they are small."""


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
        ramp: tuple[int, ...] = RAMP,
    ) -> None:
        self._driver = driver
        self._ramp = ramp
        self._kernels = Kernels(driver, launcher, grid, linear=True)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}
        self._ring = Ring(driver, ring_bytes, num_slots=num_slots)
        self._forks = EventPool(driver, timing=False)

    def enqueue(self, job: CopyJob, stream: int) -> None:
        prepared = self._kernels.get(job)
        self._ring.open()
        used: list[RingSlot] = []
        try:
            if job.direction is Direction.STORE:
                self._store(job, prepared, stream, used)
            else:
                self._load(job, prepared, stream, used)
        except Exception:
            self._join_after_fault(used, stream)
            raise
        finally:
            self._ids[job.direction].fence(stream)

    def is_quick(self, job: CopyJob) -> bool:
        if self._kernels.find(job) is None or not self._ring.is_open:
            return False
        return job.num_bytes <= sum(self._ramp)

    def close(self) -> None:
        with self._driver.current():
            self._ring.close()
            self._forks.close()
            for ids in self._ids.values():
                ids.close()
            self._kernels.close()

    # -- the two directions ------------------------------------------------------------------

    def _store(self, job: CopyJob, prepared: Prepared, stream: int, used: list[RingSlot]) -> None:
        driver, ring = self._driver, self._ring
        arguments = prepared.begin(job, self._ids[job.direction].put(job, stream))
        fork = self._forks.take()
        try:
            driver.record_event(fork, stream)
            runs: HostRuns | None = None
            for chunk in _chunks(job, prepared.rows, ring.slot_bytes, self._ramp):
                with ring.lock:
                    slot = ring.next()
                    used.append(slot)
                    driver.stream_wait_event(slot.stream, fork)
                    driver.stream_wait_event(slot.stream, slot.copied_out)
                    # The kernel counts from the job's first byte, the slot from the chunk's.
                    arguments.packed_base = slot.address - chunk.start
                    arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
                    self._kernels.launch(prepared, slot.stream)
                    driver.record_event(slot.gathered, slot.stream)
                    driver.stream_wait_event(stream, slot.gathered)
                    runs = runs or HostRuns(job)  # after the launch: the card need not wait for it
                    runs.store(driver, chunk.start, chunk.end, slot.address, stream)
                    driver.record_event(slot.copied_out, stream)
        finally:
            # Every wait has captured the record, so the event is free for the next job.
            self._forks.give(fork)

    def _load(self, job: CopyJob, prepared: Prepared, stream: int, used: list[RingSlot]) -> None:
        driver, ring = self._driver, self._ring
        runs = HostRuns(job)
        arguments = None
        for chunk in _chunks(job, prepared.rows, ring.slot_bytes, self._ramp):
            with ring.lock:
                slot = ring.next()
                used.append(slot)
                driver.stream_wait_event(stream, slot.copied_out)
                driver.stream_wait_event(stream, slot.scattered)
                runs.load(driver, chunk.start, chunk.end, slot.address, stream)
                if arguments is None:  # after the first copy: the link need not wait for it
                    arguments = prepared.begin(job, self._ids[job.direction].put(job, stream))
                driver.record_event(slot.copied_in, stream)
                driver.stream_wait_event(slot.stream, slot.copied_in)
                arguments.packed_base = slot.address - chunk.start
                arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
                self._kernels.launch(prepared, slot.stream)
                driver.record_event(slot.scattered, slot.stream)
        for slot in dict.fromkeys(used):
            driver.stream_wait_event(stream, slot.scattered)

    def _join_after_fault(self, used: list[RingSlot], stream: int) -> None:
        """Bring what the slot streams already hold before anything queued on ``stream`` later."""
        driver = self._driver
        with self._ring.lock:
            for slot in dict.fromkeys(used):
                try:
                    driver.record_event(slot.scattered, slot.stream)
                    driver.stream_wait_event(stream, slot.scattered)
                    driver.record_event(slot.copied_out, stream)
                except DriverError:
                    # The first fault is the one to tell; the engine's fence meets this one too.
                    continue


def _chunks(
    job: CopyJob, rows: RowTable, slot_bytes: int, ramp: tuple[int, ...]
) -> Iterator[Chunk]:
    wanted = store_size if job.direction is Direction.STORE else load_size
    total = job.num_bytes
    first_row, start, number = 0, 0, 0
    while start < total:
        size = wanted(number, total - start, ramp)
        # A chunk ends where a row does, so it may fall short of its size but never exceed it.
        last_row = max(first_row + 1, rows.row_at(start + min(size, slot_bytes)))
        end = rows.position_of(last_row)
        yield Chunk(first_row, last_row, start, end)
        first_row, start, number = last_row, end, number + 1


def store_size(number: int, left: int, ramp: tuple[int, ...]) -> int:
    """The size of chunk ``number`` of a store with ``left`` bytes to go: the ramp, then all."""
    return min(ramp[number], left) if number < len(ramp) else left


def load_size(number: int, left: int, ramp: tuple[int, ...]) -> int:
    """The size of a load's next chunk: as much as leaves the ramp, in reverse, for the end."""
    for length in range(len(ramp), 0, -1):
        tail = sum(ramp[:length])
        if left > tail:
            return left - tail
    return left
