"""Choose the copy path of each direction: kernels if they run here, else copies by the driver."""

from __future__ import annotations

import logging
from importlib import util

from kvferry.errors import DriverError, install
from kvferry.transfer.driver import Driver
from kvferry.transfer.job import Direction
from kvferry.transfer.kernels.launch import CudaLauncher, Launcher
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.paths.direct import DmaPath
from kvferry.transfer.paths.kernel import KernelPath
from kvferry.transfer.paths.staged import StagedPath

log = logging.getLogger(__name__)


def open_launcher(driver: Driver) -> CudaLauncher | None:
    """Return a launcher that has compiled and loaded the common kernels; None if it cannot."""
    if util.find_spec("triton") is None:
        log.warning("Triton is not installed: the driver copies, slowly. %s", install("gpu"))
        return None
    launcher = CudaLauncher(driver)
    try:
        with driver.current():
            for variant in (KernelPath.COMMON, StagedPath.COMMON):  # compiling would delay copies
                launcher.prepare(variant)
    except DriverError as error:
        log.warning("copy kernels cannot be used here, the driver copies, slowly: %s", error)
        launcher.close()
        return None
    return launcher


def open_paths(
    driver: Driver, launcher: Launcher | None, *, ring_bytes: int, is_pinned: bool = True
) -> dict[Direction, Path]:
    """Return the path of each direction.

    One launch queues a load of any size, so compute can be ordered after it at once. A kernel that
    writes host memory slows the model, so stores go through a ring.
    """
    if launcher is None or not is_pinned:
        # A kernel that accesses unregistered host memory breaks the process's CUDA context.
        return dict.fromkeys(Direction, DmaPath(driver, is_pinned=is_pinned))
    return {
        Direction.LOAD: KernelPath(driver, launcher),
        Direction.STORE: StagedPath(driver, launcher, ring_bytes=ring_bytes),
    }
