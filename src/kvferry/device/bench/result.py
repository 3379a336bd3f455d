"""What a run of the copy benchmark found, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class TimedCopy:
    """One timed copy. ``path`` is ``auto`` for the planner's choice, then named in ``chosen``.

    ``gbps`` is the rate with ``in_flight`` transfers queued one after another, ``alone_gbps`` that
    of a single one on an idle stream. ``submit_us`` is the time of ``GpuEngine.submit`` for
    ``auto``, and of the bare call for a path by itself.
    """

    direction: str
    segment_bytes: int
    segments_per_block: int
    num_blocks: int
    path: str
    gbps: float
    fraction_of_ceiling: float
    seconds: float
    submit_us: float
    chosen: str = ""
    host_slots: str = "run"
    ceiling_gbps: float = 0.0
    in_flight: int = 1
    alone_gbps: float = 0.0


@dataclass(frozen=True)
class OneCopy:
    """One pinned copy, timed as paths are: queued ``in_flight`` times, and alone."""

    direction: str
    num_bytes: int
    gbps: float
    alone_gbps: float
    ceiling_gbps: float
    in_flight: int


@dataclass(frozen=True)
class SlowdownRow:
    """A load beside copies of one path; ``chosen`` names the planner's choice."""

    load: str
    direction: str
    path: str
    gbps: float
    factor: float
    lost_ms_per_gb: float
    chosen: str = ""


@dataclass(frozen=True)
class PlannerCell:
    """The planner's choice against the best path, where calibration did not measure."""

    direction: str
    segment_bytes: int
    num_bytes: int
    chosen: str
    best: str
    times_best: float
    host_slots: str = "run"


@dataclass
class BenchResult:
    """All sections of one run."""

    provenance: dict[str, str]
    designs: dict[str, str] = field(default_factory=dict)
    """What the paths are that are not ours, in words."""
    ceiling: dict[str, float] = field(default_factory=dict)
    one_copy: list[OneCopy] = field(default_factory=list)
    rows: list[TimedCopy] = field(default_factory=list)
    small: list[TimedCopy] = field(default_factory=list)
    submit: list[dict[str, Any]] = field(default_factory=list)
    both_ways: dict[str, dict[str, float]] = field(default_factory=dict)
    slowdown: list[SlowdownRow] = field(default_factory=list)
    planner: list[PlannerCell] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        close = [cell.times_best <= 1.05 for cell in self.planner]
        data["planner_within_5_percent"] = sum(close) / len(close) if close else None
        return data
