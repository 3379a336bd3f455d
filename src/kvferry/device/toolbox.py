"""Everything an engine needs besides memory: the paths of this machine, and a planner for them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import util

from kvferry.device.builtin_profile import builtin_profile
from kvferry.device.calibrate import Progress, calibrate
from kvferry.device.cuda import CudaDriver
from kvferry.device.driver import Driver
from kvferry.device.job import Path
from kvferry.device.kernel_path import GRID as KERNEL_GRID
from kvferry.device.kernel_path import KernelPath
from kvferry.device.launch import CudaLauncher, Launcher, Variant
from kvferry.device.paths import DmaPath, LoopPath
from kvferry.device.planner import MeasuredPlanner
from kvferry.device.profile import Profile, load_profile, profile_file, save_profile
from kvferry.device.staged import GRID as RING_GRID
from kvferry.device.staged import StagedPath
from kvferry.errors import DriverError, KvferryError

log = logging.getLogger(__name__)

AUTO = "auto"

COMMON = tuple(
    Variant(to_packed, linear, True, width=8, vector=2, steps=8, warps=warps, single=single)
    for to_packed in (False, True)
    for linear, warps, single in (
        (False, KERNEL_GRID.warps, False),
        (True, KERNEL_GRID.warps, True),
        (True, RING_GRID.warps, False),
    )
)
"""The kernels most engines need: compiled here, they hold up no transfer."""


@dataclass(eq=False)
class Toolbox:
    """Owns the paths of one device and the launcher they share.

    An engine closes the paths it is given; ``close`` is for the launcher, after the engine.
    """

    paths: dict[str, Path]
    launcher: Launcher | None = None

    def close(self) -> None:
        """Close the paths, if no engine did, and the launcher. Safe to call twice."""
        for path in self.paths.values():
            path.close()
        if self.launcher is not None:
            self.launcher.close()


def open_toolbox(driver: Driver, *, ring_bytes: int) -> Toolbox:
    """The paths this machine can use: without Triton, those that need no kernel."""
    toolbox = Toolbox({"loop": LoopPath(driver), "dma": DmaPath(driver)})
    if not isinstance(driver, CudaDriver):
        log.info("copy kernels are for CUDA only; copying by dma")
    elif util.find_spec("triton") is None:
        log.warning("Triton is not installed: copying by dma. pip install 'kvferry[gpu]'")
    else:
        _add_kernels(toolbox, driver, ring_bytes)
    return toolbox


def _add_kernels(toolbox: Toolbox, driver: CudaDriver, ring_bytes: int) -> None:
    """The paths with kernels, if those compile and load: else every transfer would fail."""
    launcher = CudaLauncher(driver)
    try:
        with driver.current():
            launcher.prepare_all(COMMON)
    except DriverError as error:
        log.warning("copy kernels cannot be used here, copying by dma: %s", error)
        launcher.close()
        return
    toolbox.launcher = launcher
    toolbox.paths["kernel"] = KernelPath(driver, launcher)
    toolbox.paths["staged"] = StagedPath(driver, launcher, ring_bytes=ring_bytes)


def open_planner(
    driver: Driver,
    toolbox: Toolbox,
    *,
    copy_path: str = AUTO,
    may_calibrate: bool = True,
    progress: Progress = lambda _: None,
) -> MeasuredPlanner:
    """A planner for ``toolbox``: pinned, or by this machine's profile, measured if there is none.

    Never fails for want of a measurement: then it plans by the built-in profile.
    """
    if copy_path != AUTO:
        return MeasuredPlanner(builtin_profile(), toolbox.paths, pinned=copy_path)
    return MeasuredPlanner(
        _profile(driver, toolbox, may_calibrate=may_calibrate, progress=progress), toolbox.paths
    )


def _profile(
    driver: Driver, toolbox: Toolbox, *, may_calibrate: bool, progress: Progress
) -> Profile:
    file = profile_file(driver.identity())
    profile = load_profile(file)
    if profile is not None:
        return profile
    if not may_calibrate:
        return builtin_profile(f"there is no {file}")
    try:
        profile = calibrate(driver, toolbox.paths, progress=progress)
        save_profile(profile, file)
    except (KvferryError, OSError, RuntimeError) as error:
        log.warning("this machine could not be measured: %s", error)
        return profile or builtin_profile(f"measuring failed: {error}")
    return profile
