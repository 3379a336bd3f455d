"""The ways to copy a block between device and host, each described once, as plain data.

Settings, planning, benchmarks and the documentation use these descriptions. A new path
is a file in ``transfer/paths`` and an entry in ``COPY_PATHS``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

AUTO_PATH = "auto"
"""Not a path: pick one for every transfer, by cost."""


@dataclass(frozen=True)
class Cost:
    """What a path costs in one direction.

    Seconds to start, per segment and per run of adjacent host slots, and bytes per second. Beside a
    model copies take ``stretch`` times as long, and each gigabyte takes ``lost_ms_per_gb``
    milliseconds from the model or from the engine's interpreter.
    """

    start: float
    rate: float
    per_segment: float = 0.0
    per_run: float = 0.0
    stretch: float = 1.0
    lost_ms_per_gb: float = 1.0

    def seconds(self, num_bytes: int, num_segments: int, num_runs: int) -> float:
        """How long a copy takes while the card has nothing else to do."""
        work = num_bytes / self.rate + num_segments * self.per_segment
        return self.start + work + (num_runs - 1) * self.per_run

    def lost_seconds(self, num_bytes: int) -> float:
        """What a copy takes from a model that runs beside it."""
        return num_bytes * self.lost_ms_per_gb * 1e-12


@dataclass(frozen=True)
class CopyPath:
    """One way to copy: its name, what it does, what it needs and costs.

    ``title`` is a few words for a plot, ``how`` for tables; ``implementation`` (module:class) is
    imported only when the path is opened.
    """

    name: str
    title: str
    how: str
    implementation: str
    load: Cost
    store: Cost
    needs_kernels: bool = False  # a CUDA card and Triton
    # Without it, copying memory that the driver does not know would fail, or end all GPU work.
    needs_pinned: bool = True
    queues_at_once: bool = False  # a launch or two queue all of a copy, however large it is
    fallback: int = 0  # only picked where there is no path of a lower number


COPY_PATHS = (
    CopyPath(
        "loop",
        title="one copy per segment",
        how="one driver call per segment",
        implementation="kvferry.transfer.paths.direct:LoopPath",
        load=Cost(10e-6, 55e9, per_segment=3e-6),
        store=Cost(10e-6, 55e9, per_segment=3e-6),
        needs_pinned=False,
        fallback=2,
    ),
    CopyPath(
        "dma",
        title="batch DMA",
        how="one batch call for all segments",
        implementation="kvferry.transfer.paths.direct:DmaPath",
        load=Cost(15e-6, 55e9, per_segment=2e-6),
        store=Cost(15e-6, 55e9, per_segment=0.5e-6),
        # Where kernels can be launched it was at best 1.3% faster than they. For small segments it
        # cost the model up to 246 ms per gigabyte: its call holds back the model's launches.
        fallback=1,
    ),
    CopyPath(
        "kernel",
        title="kernel over the link",
        how="threads of the card read or write host memory",
        implementation="kvferry.transfer.paths.kernel:KernelPath",
        load=Cost(15e-6, 50e9, stretch=1.4, lost_ms_per_gb=1.9),
        store=Cost(13e-6, 51e9, stretch=1.2, lost_ms_per_gb=5.9),
        needs_kernels=True,
        queues_at_once=True,
    ),
    CopyPath(
        "staged",
        title="ring on the device",
        how="a kernel gathers blocks into a ring in device memory, large copies do the rest",
        implementation="kvferry.transfer.paths.staged:StagedPath",
        # 3.5 of a load's 4.7 ms are the engine's interpreter: 918 MB are queued by some 300 calls
        # in 3.3 ms. Not counted for stores: by a kernel they cost the card more than that.
        load=Cost(30e-6, 54e9, per_run=0.7e-6, stretch=1.3, lost_ms_per_gb=4.7),
        store=Cost(38e-6, 55e9, per_run=0.4e-6, stretch=1.3, lost_ms_per_gb=0.7),
        needs_kernels=True,
    ),
)
"""All of them. The costs are one NVIDIA H200's (docs/benchmarks/copies.md), rounded. Only
their relations matter."""

BY_NAME = {path.name: path for path in COPY_PATHS}


def path_names(*, with_kernels: bool) -> tuple[str, ...]:
    """The paths there are on a machine that can, or cannot, launch copy kernels."""
    return tuple(path.name for path in COPY_PATHS if with_kernels or not path.needs_kernels)


def candidates(paths: Collection[str]) -> tuple[str, ...]:
    """The names among ``paths`` that are worth choosing from: no fallback where it has a better."""
    least = min((BY_NAME[name].fallback for name in paths), default=0)
    return tuple(name for name in paths if BY_NAME[name].fallback == least)
