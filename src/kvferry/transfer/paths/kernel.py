"""The path ``kernel``: the card's own threads read and write pinned host memory."""

from __future__ import annotations

from kvferry.transfer.driver import Driver
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.kernels.launch import Grid, IdBuffers, Kernels, Launcher, widest
from kvferry.transfer.paths.contract import QUICK_BYTES, Means, Path

GRID = Grid(programs=2, warps=32)
"""Two multiprocessors fill a PCIe Gen5 link; more only take from the model (one NVIDIA H200)."""


class KernelPath(Path):
    """One launch per job; the host memory must be registered with the driver.

    Owns the tables of the layouts it has seen and buffers for ids.
    """

    COMMON = tuple(
        widest(to_packed=to_packed, warps=GRID.warps, linear=single, single=single)
        for to_packed in (False, True)
        for single in (False, True)
    )

    def __init__(self, driver: Driver, launcher: Launcher) -> None:
        self._driver = driver
        self._kernels = Kernels(driver, launcher, GRID)
        self._single = Kernels(driver, launcher, GRID, single=True)
        self._ids = {direction: IdBuffers(driver) for direction in Direction}

    @classmethod
    def open(cls, means: Means) -> KernelPath:
        assert means.launcher is not None, "opened only where kernels can be launched"
        return cls(means.driver, means.launcher)

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        if len(job.device_blocks) == 1:
            self._enqueue_one(job, stream)
            return
        prepared = self._kernels.get(job)
        ids = self._ids[job.direction]
        try:
            arguments = prepared.begin(job, ids.put(job, stream))
            arguments.packed_base = job.host_base
            arguments.packed_pitch = job.host_pitch
            self._kernels.launch(prepared, stream)
        finally:
            ids.fence(stream)

    def prepare(self, job: CopyJob) -> None:
        self._kernels.get(job)
        self._single.get(job)
        self._ids[job.direction].prepare()

    def is_quick(self, job: CopyJob) -> bool:
        kernels = self._single if len(job.device_blocks) == 1 else self._kernels
        return job.num_bytes <= QUICK_BYTES and kernels.find(job) is not None

    def close(self) -> None:
        with self._driver.current():
            for ids in self._ids.values():
                ids.close()
            self._kernels.close()
            self._single.close()

    def _enqueue_one(self, job: CopyJob, stream: int) -> None:
        """One block's ids travel with the launch: no buffer, and no read over the link first."""
        prepared = self._single.get(job)
        arguments = prepared.begin(job, int(job.device_blocks[0]))
        arguments.packed_base = job.host_base + int(job.host_slots[0]) * job.host_pitch
        self._single.launch(prepared, stream)
