"""Kernels made ready: tables on the device, code loaded, arguments filled in as far as known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvferry.device.driver.base import Driver
from kvferry.device.job import CopyJob, Direction
from kvferry.device.kernels.base import CopyArguments, Launch, Launcher, Variant
from kvferry.device.kernels.rows import RowTable
from kvferry.device.kernels.uploaded_tables import UploadedTables
from kvferry.errors import InputError

MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Grid:
    """How much of the card a kernel takes: programs, and the warps of each."""

    programs: int
    warps: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """All of a launch that does not change from job to job.

    ``arguments`` is filled in anew for each job: by one thread at a time, as a path is used.
    """

    rows: RowTable
    launch: Launch
    arguments: CopyArguments

    def begin(self, job: CopyJob, ids: int) -> CopyArguments:
        """The arguments for all rows of ``job``; where the packed side is, the path says.

        ``ids`` is where the ids are or, of a single block, its number.
        """
        arguments = self.arguments
        num_blocks = len(job.device_blocks)
        num_rows = num_blocks * self.rows.rows_per_block
        if num_rows > MAX_ROWS:
            raise InputError(f"a transfer of {num_rows} rows is too large for one kernel; split it")
        arguments.ids = ids
        arguments.num_blocks = num_blocks
        arguments.first_row = 0
        arguments.last_row = num_rows
        return arguments


class Kernels:
    """Owns what is prepared, per layout and direction; leaves the launcher to its owner.

    ``linear`` for packed memory without slot numbers, a ring or (``single``) the one slot of a
    job of one block.
    """

    def __init__(
        self,
        driver: Driver,
        launcher: Launcher,
        grid: Grid,
        *,
        linear: bool = False,
        single: bool = False,
    ) -> None:
        self._launcher = launcher
        self._grid = grid
        self._linear = linear or single
        self._single = single
        self._is_ring = linear and not single
        self._tables = UploadedTables(driver)
        self._prepared: dict[tuple[int, Direction, int], Prepared] = {}

    def find(self, job: CopyJob) -> Prepared | None:
        """What ``get`` would return, if it is ready."""
        return self._prepared.get(self._key(job))

    def get(self, job: CopyJob) -> Prepared:
        """Upload and compile what ``job`` needs; the first time this may take a second."""
        key = self._key(job)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._prepare(job, key[2])
        return prepared

    def launch(self, prepared: Prepared, stream: int) -> None:
        """Queue the kernel for the rows its arguments name."""
        arguments, grid = prepared.arguments, self._grid
        tiles = -(-(arguments.last_row - arguments.first_row) // grid.warps)
        programs = min(grid.programs, tiles)
        prepared.launch(programs, arguments, stream)

    def close(self) -> None:
        """Free the tables; call only when no copy is in flight. Safe to call twice."""
        self._prepared.clear()
        self._tables.close()

    def _key(self, job: CopyJob) -> tuple[int, Direction, int]:
        # Only host slots can be aligned worse than the layout; a ring never is.
        alignment = 0 if self._is_ring else math.gcd(job.host_base, job.host_pitch)
        return id(job.layout), job.direction, alignment

    def _prepare(self, job: CopyJob, alignment: int) -> Prepared:
        table = self._tables.get(job.layout, alignment)
        rows = table.rows
        variant = Variant(
            to_packed=job.direction is Direction.STORE,
            linear=self._linear,
            uniform=rows.is_uniform,
            width=rows.shape.width,
            vector=rows.shape.vector,
            steps=rows.shape.steps,
            warps=self._grid.warps,
            single=self._single,
        )
        arguments = CopyArguments(
            tables=table.address,
            num_segments=job.layout.num_segments,
            segment_bytes=int(job.layout.sizes[0]),
            packed_pitch=job.layout.block_bytes,
            rows_per_block=rows.rows_per_block,
            rows_per_segment=int(rows.rows_per_segment[0]),
        )
        return Prepared(rows, self._launcher.prepare(variant), arguments)
