"""The profile to plan by where nothing could be measured.

Not numbers of a card but the shape all of them share: a kernel starts sooner than anything else, a
ring moves a little more per second, a copy per segment pays for each one, and a kernel that writes
host memory stands in the model's way. The constants are those of a PCIe Gen5 x16 card (one NVIDIA
H200, driver 580), rounded; only their relations matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.device.job import Direction
from kvferry.device.profile import BusyCell, Cell, Profile

KiB, MiB = 1 << 10, 1 << 20

SEGMENT_BYTES = (1 * KiB, 16 * KiB, 256 * KiB, 4 * MiB)
NUM_BYTES = (1 * MiB, 1024 * MiB)
NUM_RUNS = 256


@dataclass(frozen=True)
class _Path:
    """Seconds to start, per segment, bytes per second after that, seconds per run of host slots."""

    name: str
    start: float
    per_segment: float
    rate: float
    per_run: float = 0.0


_PATHS = {
    Direction.LOAD: (
        _Path("loop", 10e-6, 3e-6, 55e9),
        _Path("dma", 15e-6, 2e-6, 55e9),
        _Path("kernel", 25e-6, 0.0, 51e9),
        _Path("staged", 60e-6, 0.0, 54e9, per_run=0.5e-6),
    ),
    Direction.STORE: (
        _Path("loop", 10e-6, 3e-6, 55e9),
        _Path("dma", 15e-6, 0.5e-6, 55e9),
        _Path("kernel", 25e-6, 0.0, 52e9),
        _Path("staged", 60e-6, 0.0, 54e9, per_run=0.5e-6),
    ),
}

_BUSY = (
    # direction, path, GB/s beside the model, GB/s alone, milliseconds of model lost per GB
    (Direction.LOAD, "loop", 4.0, 4.0, 1.0),
    (Direction.LOAD, "dma", 4.5, 4.5, 1.0),
    (Direction.LOAD, "kernel", 40.0, 51.0, 1.5),
    (Direction.LOAD, "staged", 21.0, 54.0, 1.5),
    (Direction.STORE, "loop", 8.0, 8.0, 1.0),
    (Direction.STORE, "dma", 17.0, 20.0, 1.0),
    (Direction.STORE, "kernel", 40.0, 52.0, 7.0),
    (Direction.STORE, "staged", 28.0, 54.0, 1.5),
)


def builtin_profile(reason: str = "nothing was measured on this machine yet") -> Profile:
    """A profile for any card; ``reason`` says why there is no better one."""
    cells = tuple(
        Cell(
            direction,
            path.name,
            segment_bytes,
            num_bytes // segment_bytes,
            path.start
            + path.per_segment * (num_bytes // segment_bytes)
            + path.per_run * num_runs
            + num_bytes / path.rate,
            num_runs,
        )
        for direction, paths in _PATHS.items()
        for path in paths
        for segment_bytes in SEGMENT_BYTES
        for num_bytes in NUM_BYTES
        for num_runs in ((1, NUM_RUNS) if path.per_run else (1,))
        if num_bytes >= segment_bytes
    )
    busy = tuple(
        BusyCell(direction, path, "a model", gbps, idle, lost)
        for direction, path, gbps, idle, lost in _BUSY
    )
    return Profile(cells, busy, {"source": f"the built-in profile, because {reason}"})
