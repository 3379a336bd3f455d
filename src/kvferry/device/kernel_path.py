"""The kernel path: the card's own threads read and write pinned host memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.device.driver import Driver
from kvferry.device.ids import IdBuffers
from kvferry.device.job import CopyJob, Direction
from kvferry.device.launch import CopyArguments, Launcher, Variant
from kvferry.device.tables import DeviceTables, Uploaded
from kvferry.errors import InputError

MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Grid:
    """How much of the card a kernel takes: programs, and the warps of each."""

    programs: int
    warps: int


GRID = Grid(programs=2, warps=32)
"""Two multiprocessors fill a PCIe Gen5 link; more only take from the model (one NVIDIA H200)."""


class KernelPath:
    """One launch per job; the host memory must be registered with the driver.

    Owns the tables of the layouts it has seen and buffers for ids; leaves the launcher to its
    owner.
    """

    name = "kernel"

    def __init__(self, driver: Driver, launcher: Launcher, *, grid: Grid = GRID) -> None:
        self._driver = driver
        self._launcher = launcher
        self._grid = grid
        self._tables = DeviceTables(driver)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}

    def enqueue(self, job: CopyJob, stream: int) -> None:
        table = self._tables.get(job.layout, job.host_base, job.host_pitch)
        variant = self._variant(job, table)
        self._launcher.prepare(variant)
        ids = self._ids[job.direction]
        try:
            arguments = kernel_arguments(job, table, ids.put(job, stream))
            arguments.packed_base = job.host_base
            arguments.packed_pitch = job.host_pitch
            self._launcher.launch(variant, self._programs(arguments), arguments, stream)
        finally:
            ids.fence(stream)

    def is_quick(self, job: CopyJob) -> bool:
        table = self._tables.find(job.layout, job.host_base, job.host_pitch)
        return table is not None and self._launcher.is_ready(self._variant(job, table))

    def close(self) -> None:
        with self._driver.current():
            for ids in self._ids.values():
                ids.close()
            self._tables.close()

    def _variant(self, job: CopyJob, table: Uploaded) -> Variant:
        shape = table.rows.shape
        return Variant(
            to_packed=job.direction is Direction.STORE,
            linear=False,
            uniform=table.rows.is_uniform,
            width=shape.width,
            vector=shape.vector,
            steps=shape.steps,
            warps=self._grid.warps,
        )

    def _programs(self, arguments: CopyArguments) -> int:
        return min(self._grid.programs, -(-arguments.last_row // self._grid.warps))


def kernel_arguments(job: CopyJob, table: Uploaded, ids: int) -> CopyArguments:
    """The arguments every launch for ``job`` shares, for all of its rows."""
    rows = table.rows
    num_blocks = len(job.device_blocks)
    num_rows = num_blocks * rows.rows_per_block
    if num_rows > MAX_ROWS:
        raise InputError(f"a transfer of {num_rows} rows is too large for one kernel; split it")
    return CopyArguments(
        ids=ids,
        num_blocks=num_blocks,
        tables=table.address,
        num_segments=job.layout.num_segments,
        segment_bytes=int(job.layout.sizes[0]),
        rows_per_block=rows.rows_per_block,
        rows_per_segment=int(rows.rows_per_segment[0]),
        last_row=num_rows,
    )
