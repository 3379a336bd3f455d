"""How much the copy benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

KiB, MiB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    segment_bytes: tuple[int, ...]
    large_bytes: tuple[int, ...]
    repeats: int
    auto_repeats: int
    """Of the planner's choice for a large transfer, in turn with the ceiling: enough that a
    processor which stops for a tenth of a second does not decide the row."""
    small_repeats: int
    rounds: int
    phases: int
    planner_segments: tuple[int, ...]
    planner_bytes: tuple[int, ...]


FULL = Effort(
    segment_bytes=tuple(4 * KiB << power for power in range(10)),
    large_bytes=(64 * MiB, 256 * MiB),
    repeats=11,
    auto_repeats=33,
    small_repeats=25,
    rounds=24,
    phases=4,
    planner_segments=tuple(kib * KiB for kib in (8, 12, 32, 48, 128, 512, 1024)),
    planner_bytes=tuple(mib * MiB for mib in (2, 3, 8, 24, 32, 128, 192)),
)
QUICK = Effort(
    segment_bytes=(4 * KiB, 16 * KiB, 64 * KiB, 2 * MiB),
    large_bytes=(64 * MiB, 256 * MiB),
    repeats=3,
    auto_repeats=5,
    small_repeats=9,
    rounds=12,
    phases=2,
    planner_segments=(8 * KiB, 32 * KiB, 512 * KiB),
    planner_bytes=(2 * MiB, 24 * MiB, 128 * MiB),
)
