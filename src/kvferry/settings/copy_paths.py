"""The ways to copy a block between device and host, each described once, as plain data.

Settings, planning, calibration, benchmarks and the documentation use these descriptions. A new path
is a file in ``transfer/paths`` and an entry in ``COPY_PATHS``.
"""

from __future__ import annotations

from dataclasses import dataclass

AUTO_PATH = "auto"
"""Not a path: pick one for every transfer, by measurement."""


@dataclass(frozen=True)
class Cost:
    """What a path costs in one direction, roughly: for machines that could not be measured.

    Seconds to start, per segment and per run of adjacent host slots, and bytes per second after
    that. Beside a model: its GB/s there and alone, in the copies it is used for, and the
    milliseconds of model time that each gigabyte takes. ``queueing_ms_per_gb`` is the interpreter's
    time: steps of the engine wait for it too, and no model that is timed on the card shows it.
    """

    start: float
    per_segment: float
    rate: float
    beside_gbps: float
    alone_gbps: float
    lost_ms_per_gb: float
    per_run: float = 0.0
    queueing_ms_per_gb: float = 0.0


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
    pays_per_segment: bool = False  # small segments make it slow; adjacent slots do not help
    queues_at_once: bool = False  # a launch or two queue all of a copy, however large it is
    is_stopgap: bool = False  # never the best where the driver has the batch call: not timed there


COPY_PATHS = (
    CopyPath(
        "loop",
        title="one copy per segment",
        how="one driver call per segment",
        implementation="kvferry.transfer.paths.direct:LoopPath",
        load=Cost(10e-6, 3e-6, 55e9, beside_gbps=4.0, alone_gbps=4.0, lost_ms_per_gb=1.0),
        store=Cost(10e-6, 3e-6, 55e9, beside_gbps=8.0, alone_gbps=8.0, lost_ms_per_gb=1.0),
        needs_pinned=False,
        pays_per_segment=True,
        is_stopgap=True,
    ),
    CopyPath(
        "dma",
        title="batch DMA",
        how="one batch call for all segments",
        implementation="kvferry.transfer.paths.direct:DmaPath",
        load=Cost(15e-6, 2e-6, 55e9, beside_gbps=4.5, alone_gbps=4.5, lost_ms_per_gb=1.0),
        store=Cost(15e-6, 0.5e-6, 55e9, beside_gbps=17.0, alone_gbps=20.0, lost_ms_per_gb=1.0),
        pays_per_segment=True,
    ),
    CopyPath(
        "kernel",
        title="kernel over the link",
        how="threads of the card read or write host memory",
        implementation="kvferry.transfer.paths.kernel:KernelPath",
        load=Cost(25e-6, 0.0, 51e9, beside_gbps=40.0, alone_gbps=51.0, lost_ms_per_gb=1.5),
        store=Cost(25e-6, 0.0, 52e9, beside_gbps=40.0, alone_gbps=52.0, lost_ms_per_gb=7.0),
        needs_kernels=True,
        queues_at_once=True,
    ),
    CopyPath(
        "staged",
        title="ring on the device",
        how="a kernel gathers blocks into a ring in device memory, large copies do the rest",
        implementation="kvferry.transfer.paths.staged:StagedPath",
        # 918 MB are queued by some 300 calls in 3.3 ms (one NVIDIA H200, 2026-11-18). Counted for
        # loads alone: a store by a kernel, the other way, costs the card more than that.
        load=Cost(
            60e-6, 0.0, 54e9, 21.0, 54.0, lost_ms_per_gb=1.5, per_run=0.5e-6, queueing_ms_per_gb=3.5
        ),
        store=Cost(60e-6, 0.0, 54e9, 28.0, 54.0, lost_ms_per_gb=1.5, per_run=0.5e-6),
        needs_kernels=True,
    ),
)
"""All of them. The costs are those of a PCIe Gen5 x16 card (one NVIDIA H200, driver 580), rounded;
only their relations matter."""

BY_NAME = {path.name: path for path in COPY_PATHS}


def path_names(*, with_kernels: bool) -> tuple[str, ...]:
    """The paths there are on a machine that can, or cannot, launch copy kernels."""
    return tuple(path.name for path in COPY_PATHS if with_kernels or not path.needs_kernels)
