"""What a copy path must offer, and which paths a device can open."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, util
from typing import ClassVar

from kvferry.errors import DriverError, install
from kvferry.settings.copy_paths import BY_NAME, COPY_PATHS, CopyPath, path_names
from kvferry.transfer.driver import Driver
from kvferry.transfer.job import CopyJob
from kvferry.transfer.kernels.launch import CudaLauncher, Launcher, Variant

QUICK_BYTES = 8 << 20
"""A larger job is never queued on the thread of ``submit``: its copy takes so long that the hand
over to another thread does not show."""


@dataclass(frozen=True)
class Means:
    """What a path may copy with. Owns none of it."""

    driver: Driver
    launcher: Launcher | None
    """None where no kernel can be launched."""
    ring_bytes: int
    """Device memory a path may take for a ring of its own."""


class Path(ABC):
    """One way to copy. Enqueues on a stream and returns; the engine's event marks completion.

    One thread at a time per direction calls a path, but both directions may call it at once: what
    it keeps between calls must be kept per direction.
    """

    COMMON: ClassVar[Sequence[Variant]] = ()
    """The kernels most engines need of it: compiled when paths open, they delay no transfer."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @classmethod
    def open(cls, means: Means) -> Path:
        """The path on one device; takes memory only when it is first used."""
        return cls(means.driver)

    @abstractmethod
    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        """Queue the whole job on ``stream`` (a raw driver handle); DriverError on refusal.

        ``stream`` comes after everything the job must wait for. ``ready`` is the event after which
        the job's blocks may be read or written, whatever earlier jobs still do on ``stream``; a
        path with streams of its own may begin there. The caller may record the event anew when
        this returns. Without ``ready`` only ``stream`` knows.

        If this raises, everything queued before the raise (also on streams of the path) comes
        before anything queued on ``stream`` from then on. The engine relies on it: it gives the
        failed receipt only when that part has run, because the memory is reused afterwards.
        """

    def pieces(self, job: CopyJob, stream: int, ready: int | None = None) -> Iterator[None]:
        """Queue the same piece by piece, one for each step of the iterator.

        Steps may come from different threads. Closing the iterator early fences what it has queued,
        as after a raise.
        """
        self.enqueue(job, stream, ready)
        yield from ()

    def prepare(self, job: CopyJob) -> None:  # noqa: B027
        """Take the memory and load the kernels that jobs like this one need."""

    def is_quick(self, job: CopyJob) -> bool:
        """Whether ``enqueue`` returns within some tens of microseconds.

        Then the engine calls it on the thread of ``submit``, for jobs of up to ``QUICK_BYTES``.
        """
        return False

    def close(self) -> None:  # noqa: B027
        """Give back staging memory and pinned buffers. Safe to call twice."""


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
    if util.find_spec("triton") is None:
        log.warning("Triton is not installed: copying by %s. %s", WITHOUT_KERNELS, install("gpu"))
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
