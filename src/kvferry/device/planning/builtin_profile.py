"""The profile to plan by where nothing could be measured.

Not numbers of a card but the shape all of them share, from what every path says of itself: a kernel
starts sooner than anything else, a ring moves a little more per second, a copy per segment pays for
each one, and a kernel that writes host memory stands in the model's way.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.copy_paths import BY_NAME, COPY_PATHS, Cost
from kvferry.device.job import Direction
from kvferry.device.planning.profile import BusyCell, Cell, Profile

KiB, MiB = 1 << 10, 1 << 20

SEGMENT_BYTES = (1 * KiB, 16 * KiB, 256 * KiB, 4 * MiB)
NUM_BYTES = (1 * MiB, 1024 * MiB)
NUM_RUNS = 256


def builtin_profile(reason: str = "nothing was measured on this machine yet") -> Profile:
    """A profile for any card; ``reason`` says why there is no better one."""
    costs = [
        (direction, path.name, path.load if direction is Direction.LOAD else path.store)
        for direction in Direction
        for path in COPY_PATHS
    ]
    busy = (
        BusyCell(way, name, "a model", cost.beside_gbps, cost.alone_gbps, cost.lost_ms_per_gb)
        for way, name, cost in costs
    )
    return Profile(
        cells=tuple(cell for way, name, cost in costs for cell in _cells(way, name, cost)),
        busy=tuple(busy),
        provenance={"source": f"the built-in profile, because {reason}"},
        paths=frozenset(BY_NAME),
    )


def _cells(direction: Direction, path: str, cost: Cost) -> Iterator[Cell]:
    for segment_bytes in SEGMENT_BYTES:
        for num_bytes in NUM_BYTES:
            if num_bytes < segment_bytes:
                continue
            num_segments = num_bytes // segment_bytes
            seconds = cost.start + cost.per_segment * num_segments + num_bytes / cost.rate
            yield Cell(direction, path, segment_bytes, num_segments, seconds)
            if cost.per_run:
                scattered = seconds + cost.per_run * NUM_RUNS
                yield Cell(direction, path, segment_bytes, num_segments, scattered, NUM_RUNS)
