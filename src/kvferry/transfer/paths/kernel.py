"""The path ``kernel``: the card's own threads read and write pinned host memory."""

from __future__ import annotations

from kvferry.transfer.driver import Driver
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.kernels.launch import Grid, IdBuffers, Kernels, Launcher, widest
from kvferry.transfer.paths.contract import QUICK_BYTES, Means, Path

GRID = Grid(programs=2, warps=32)
"""Two multiprocessors fill a PCIe Gen5 link; more only take from the model (one NVIDIA H200)."""

MAX_READ_IN_PLACE = 64
"""Up to this many blocks the kernel reads the ids over the link, in less time than a copy takes to
start. Beyond it the reads would delay the bytes."""


class KernelPath(Path):
    """One launch per job; the host memory must be registered with the driver.

    Owns the tables of the layouts it has seen and buffers for ids.
    """

    COMMON = tuple(widest(to_packed=way, warps=GRID.warps) for way in (False, True))

    def __init__(self, driver: Driver, launcher: Launcher) -> None:
        super().__init__(driver)
        self._kernels = Kernels(driver, launcher, GRID)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}

    @classmethod
    def open(cls, means: Means) -> KernelPath:
        assert means.launcher is not None, "opened only where kernels can be launched"
        return cls(means.driver, means.launcher)

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        prepared = self._kernels.get(job)
        ids = self._ids[job.direction]
        try:
            arguments = prepared.begin(job, ids.put(job, stream, in_place=MAX_READ_IN_PLACE))
            arguments.packed_base = job.host_base
            arguments.packed_pitch = job.host_pitch
            self._kernels.launch(prepared, stream)
        finally:
            ids.fence(stream)

    def prepare(self, job: CopyJob) -> None:
        self._kernels.get(job)
        self._ids[job.direction].prepare()

    def is_quick(self, job: CopyJob) -> bool:
        return job.num_bytes <= QUICK_BYTES and self._kernels.find(job) is not None

    def close(self) -> None:
        with self._driver.current():
            for ids in self._ids.values():
                ids.close()
            self._kernels.close()
