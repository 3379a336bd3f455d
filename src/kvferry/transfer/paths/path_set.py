"""All the paths that this machine can use, opened and closed together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, util

from kvferry.errors import DriverError
from kvferry.settings.copy_paths import BY_NAME, COPY_PATHS, CopyPath, path_names
from kvferry.transfer.driver.base import Driver
from kvferry.transfer.driver.cuda import CudaDriver
from kvferry.transfer.kernels.launch import CudaLauncher, Variant
from kvferry.transfer.paths.contract import Means, Path

log = logging.getLogger(__name__)

WITHOUT_KERNELS = " or ".join(path_names(with_kernels=False))


@dataclass(eq=False)
class PathSet:
    """Owns the paths of one device, by name, and the launcher they share.

    An engine closes the paths it is given; ``close`` is for the launcher, after the engine.
    """

    paths: dict[str, Path]
    launcher: CudaLauncher | None = None

    def close(self) -> None:
        """Close the paths, if no engine did, and the launcher. Safe to call twice."""
        for path in self.paths.values():
            path.close()
        if self.launcher is not None:
            self.launcher.close()


def open_paths(driver: Driver, *, ring_bytes: int) -> PathSet:
    """The paths this machine can use: without Triton, those that need no kernel."""
    launcher = _open_launcher(driver)
    means = Means(driver, launcher, ring_bytes)
    names = path_names(with_kernels=launcher is not None)
    return PathSet({name: class_of(BY_NAME[name]).open(means) for name in names}, launcher)


def class_of(path: CopyPath) -> type[Path]:
    """The class that implements ``path``."""
    module, _, name = path.implementation.partition(":")
    found: type[Path] = getattr(import_module(module), name)
    return found


def common_variants() -> Sequence[Variant]:
    """The kernels most engines need, of all paths."""
    return tuple(dict.fromkeys(variant for path in COPY_PATHS for variant in class_of(path).COMMON))


def _open_launcher(driver: Driver) -> CudaLauncher | None:
    """With kernels that compile and load: else every transfer by one of them would fail."""
    if not isinstance(driver, CudaDriver):
        log.info("copy kernels are for CUDA only; copying by %s", WITHOUT_KERNELS)
        return None
    if util.find_spec("triton") is None:
        log.warning(
            "Triton is not installed: copying by %s. pip install 'kvferry[gpu]'", WITHOUT_KERNELS
        )
        return None
    launcher = CudaLauncher(driver)
    try:
        with driver.current():
            launcher.prepare_all(common_variants())
    except DriverError as error:
        log.warning("copy kernels cannot be used here, copying by %s: %s", WITHOUT_KERNELS, error)
        launcher.close()
        return None
    return launcher
