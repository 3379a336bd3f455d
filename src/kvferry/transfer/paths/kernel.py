"""The path ``kernel``, for loads: GPU threads read pinned host memory."""

from __future__ import annotations

from kvferry.core.quantities import KiB
from kvferry.transfer.driver import Driver
from kvferry.transfer.job import CopyJob
from kvferry.transfer.kernels.launch import Grid, IdBuffers, Kernels, Launcher, widest
from kvferry.transfer.paths.contract import Path

GRID = Grid(programs=2, warps=32, min_bytes=112 * KiB)
"""Two multiprocessors fill a PCIe Gen5 link; more would only slow the model. Short rows need more:
segments of 1,234 bytes reached 0.65 of the link's rate with two, 0.85 with three. Segments of 520
bytes reached 0.33 with two, 0.87 with six (one NVIDIA H200, driver 580, 2026-11-19)."""

MAX_READ_IN_PLACE = 64
"""The most blocks whose ids the kernel reads from host memory, in less time than a copy of the ids
takes to start. With more blocks these reads would delay the load."""


class KernelPath(Path):
    """Copies a job by one kernel launch; host memory must be registered with the driver.

    Owns the device tables of layouts, and id buffers.
    """

    name = "kernel"
    COMMON = widest(to_packed=False, warps=GRID.warps)
    """The kernel variant that most engines need."""

    def __init__(self, driver: Driver, launcher: Launcher) -> None:
        super().__init__(driver)
        self._kernels = Kernels(driver, launcher, GRID, to_packed=False)
        self._ids = IdBuffers(driver)

    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        kernels, ids = self._kernels, self._ids
        prepared, buffer = kernels.get(job), ids.fill(job)
        address = buffer.host
        if len(job.device_blocks) > MAX_READ_IN_PLACE:
            ids.send(buffer, job, stream)
            address = buffer.device
        try:
            arguments = prepared.begin(job, address)
            arguments.packed_base = job.host_base
            arguments.packed_pitch = job.host_pitch
            kernels.launch(prepared, stream)
        finally:
            ids.take_back(buffer, stream)

    def prepare(self, job: CopyJob) -> None:
        self._kernels.get(job)
        self._ids.prepare()

    def is_quick(self, job: CopyJob) -> bool:
        return self._kernels.find(job) is not None

    def close(self) -> None:
        with self._driver.current():
            self._ids.close()
            self._kernels.close()
