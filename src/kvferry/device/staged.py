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
from kvferry.device.host_runs import HostRuns
from kvferry.device.ids import IdBuffers
from kvferry.device.job import CopyJob, Direction
from kvferry.device.kernel_path import Grid, kernel_arguments
from kvferry.device.launch import CopyArguments, Launcher, Variant
from kvferry.device.ring import Ring, RingSlot
from kvferry.device.tables import DeviceTables, Uploaded
from kvferry.errors import DriverError

MiB = 1 << 20

GRID = Grid(programs=32, warps=8)
"""Enough to empty a slot in a few tens of microseconds without taking the whole card."""

RAMP = (1 * MiB, 3 * MiB)
"""Sizes of the first chunks of a store, and of a load's last ones: only they are not hidden
behind the copies, so they are small."""

QUICK_CHUNKS = 2
"""Jobs of up to this many chunks are queued on the caller's thread."""


@dataclass(frozen=True)
class Chunk:
    """Rows ``first_row`` to ``last_row`` of a job; bytes ``start`` to ``end`` of its blocks."""

    first_row: int
    last_row: int
    start: int
    end: int


class StagedPath:
    """Copies through a ring. Owns the ring, the streams of its slots, tables and ids.

    ``ring_bytes`` is the device memory of both directions together; it is taken on first use.
    """

    name = "staged"

    def __init__(
        self,
        driver: Driver,
        launcher: Launcher,
        *,
        ring_bytes: int = 64 * MiB,
        grid: Grid = GRID,
        ramp: tuple[int, ...] = RAMP,
    ) -> None:
        self._driver = driver
        self._launcher = launcher
        self._grid = grid
        self._ramp = ramp
        self._tables = DeviceTables(driver)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}
        # Stores wait for a gap between the model's kernels, so they need the longer ring.
        self._rings = {
            Direction.STORE: Ring(driver, ring_bytes // 4, num_slots=3),
            Direction.LOAD: Ring(driver, ring_bytes // 8, num_slots=2),
        }

    def enqueue(self, job: CopyJob, stream: int) -> None:
        table = self._tables.get(job.layout)
        variant = self._variant(job.direction, table)
        self._launcher.prepare(variant)
        ring = self._rings[job.direction]
        ring.open()
        ids = self._ids[job.direction]
        used: list[RingSlot] = []
        try:
            arguments = kernel_arguments(job, table, ids.put(job, stream))
            arguments.packed_pitch = job.layout.block_bytes
            runs = HostRuns(job)
            fork = ring.fork
            self._driver.record_event(fork, stream)
            for chunk in self._chunks(job, table, ring.slot_bytes):
                slot = ring.next()
                used.append(slot)
                # The kernel counts from the job's first byte, the slot from the chunk's.
                arguments.packed_base = slot.address - chunk.start
                arguments.first_row, arguments.last_row = chunk.first_row, chunk.last_row
                if job.direction is Direction.STORE:
                    self._store_chunk(slot, fork, runs, chunk, variant, arguments, stream)
                else:
                    self._load_chunk(slot, fork, runs, chunk, variant, arguments, stream)
            if job.direction is Direction.LOAD:
                self._join(used, stream)
        except Exception:
            self._join_after_fault(used, stream)
            raise
        finally:
            ids.fence(stream)

    def is_quick(self, job: CopyJob) -> bool:
        table = self._tables.find(job.layout)
        if table is None or not self._rings[job.direction].is_open:
            return False
        if not self._launcher.is_ready(self._variant(job.direction, table)):
            return False
        return job.num_bytes <= sum(self._ramp[:QUICK_CHUNKS])

    def close(self) -> None:
        with self._driver.current():
            for ring in self._rings.values():
                ring.close()
            for ids in self._ids.values():
                ids.close()
            self._tables.close()

    # -- one chunk ---------------------------------------------------------------------------

    def _store_chunk(
        self,
        slot: RingSlot,
        fork: int,
        runs: HostRuns,
        chunk: Chunk,
        variant: Variant,
        arguments: CopyArguments,
        stream: int,
    ) -> None:
        driver = self._driver
        driver.stream_wait_event(slot.stream, fork)
        driver.stream_wait_event(slot.stream, slot.copied)  # the slot's last bytes have left
        self._launch(variant, arguments, slot.stream)
        driver.record_event(slot.kernel_done, slot.stream)
        driver.stream_wait_event(stream, slot.kernel_done)
        runs.store(driver, chunk.start, chunk.end, slot.address, stream)
        driver.record_event(slot.copied, stream)

    def _load_chunk(
        self,
        slot: RingSlot,
        fork: int,
        runs: HostRuns,
        chunk: Chunk,
        variant: Variant,
        arguments: CopyArguments,
        stream: int,
    ) -> None:
        driver = self._driver
        driver.stream_wait_event(stream, slot.kernel_done)  # the slot's last bytes are scattered
        runs.load(driver, chunk.start, chunk.end, slot.address, stream)
        driver.record_event(slot.copied, stream)
        driver.stream_wait_event(slot.stream, slot.copied)
        self._launch(variant, arguments, slot.stream)
        driver.record_event(slot.kernel_done, slot.stream)

    def _launch(self, variant: Variant, arguments: CopyArguments, stream: int) -> None:
        num_rows = arguments.last_row - arguments.first_row
        programs = min(self._grid.programs, -(-num_rows // self._grid.warps))
        self._launcher.launch(variant, programs, arguments, stream)

    # -- the whole job -----------------------------------------------------------------------

    def _chunks(self, job: CopyJob, table: Uploaded, slot_bytes: int) -> Iterator[Chunk]:
        rows = table.rows
        wanted = store_sizes if job.direction is Direction.STORE else load_sizes
        first_row, start, number = 0, 0, 0
        while start < job.num_bytes:
            size = wanted(number, job.num_bytes - start, self._ramp)
            # A chunk ends where a row does, so it may fall short of its size but never exceed it.
            last_row = max(first_row + 1, rows.row_at(start + min(size, slot_bytes)))
            end = rows.position_of(last_row)
            yield Chunk(first_row, last_row, start, end)
            first_row, start, number = last_row, end, number + 1

    def _join(self, used: list[RingSlot], stream: int) -> None:
        for slot in dict.fromkeys(used):
            self._driver.stream_wait_event(stream, slot.kernel_done)

    def _join_after_fault(self, used: list[RingSlot], stream: int) -> None:
        """Bring what the slot streams already hold before anything queued on ``stream`` later."""
        for slot in dict.fromkeys(used):
            try:
                self._driver.record_event(slot.kernel_done, slot.stream)
                self._driver.stream_wait_event(stream, slot.kernel_done)
                self._driver.record_event(slot.copied, stream)
            except DriverError:
                # The first fault is the one to tell; the engine's fence fails of this one too.
                continue

    def _variant(self, direction: Direction, table: Uploaded) -> Variant:
        shape = table.rows.shape
        return Variant(
            to_packed=direction is Direction.STORE,
            linear=True,
            uniform=table.rows.is_uniform,
            width=shape.width,
            vector=shape.vector,
            steps=shape.steps,
            warps=self._grid.warps,
        )


def store_sizes(number: int, left: int, ramp: tuple[int, ...]) -> int:
    """The size of chunk ``number`` of a store with ``left`` bytes to go: the ramp, then all."""
    return min(ramp[number], left) if number < len(ramp) else left


def load_sizes(number: int, left: int, ramp: tuple[int, ...]) -> int:
    """The size of a load's next chunk: as much as leaves the ramp, in reverse, for the end."""
    for length in range(len(ramp), 0, -1):
        tail = sum(ramp[:length])
        if left > tail:
            return left - tail
    return left
