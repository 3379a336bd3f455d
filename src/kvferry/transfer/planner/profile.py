"""A profile: the measurements of one machine for one set of paths, kept as a small JSON file.

There is one file per card, driver, link and set of paths. A file may come from anywhere: a number
that no copy can have taken would make the planner fail, or choose by nonsense, for as long as the
profile is kept. So a file that cannot be used counts as none, and the machine is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry.core.quantities import KiB, MiB
from kvferry.settings.copy_paths import BY_NAME, COPY_PATHS, Cost
from kvferry.transfer.driver.base import DeviceIdentity
from kvferry.transfer.job import Direction

log = logging.getLogger(__name__)

FORMAT = 3

MOST_CELLS = 4096
MOST_BYTES = 1 << 50
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6
LEAST_GBPS, MOST_GBPS = 1e-3, 1e6
MOST_LOST_MS = 1e9
"""Of model time, per gigabyte; for a copy that makes no progress beside a model."""
MOST_LETTERS = 1000
MOST_FILE_BYTES = 4 << 20
"""A profile has some ten kilobytes."""


@dataclass(frozen=True)
class Cell:
    """One timed copy: ``num_segments`` segments of ``segment_bytes`` in ``seconds``.

    ``num_runs`` is how many runs of neighbours its host slots made up.
    """

    direction: Direction
    path: str
    segment_bytes: int
    num_segments: int
    seconds: float
    num_runs: int = 1

    @property
    def num_bytes(self) -> int:
        return self.segment_bytes * self.num_segments


@dataclass(frozen=True)
class BusyCell:
    """One path beside a running model: its speed, and what each gigabyte took from the model."""

    direction: Direction
    path: str
    load: str
    gbps: float
    idle_gbps: float
    lost_ms_per_gb: float


@dataclass(frozen=True)
class Profile:
    """All that was measured on one machine, how, and which ``paths`` there were to measure."""

    cells: tuple[Cell, ...]
    busy: tuple[BusyCell, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)
    paths: frozenset[str] = field(kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads it back."""
        return {
            "format": FORMAT,
            "paths": sorted(self.paths),
            "provenance": self.provenance,
            "cells": [_plain(cell) for cell in self.cells],
            "busy": [_plain(cell) for cell in self.busy],
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The reverse of ``to_json``; ValueError for anything a planner could not plan by."""
        (version,) = _fields("profile", data, ("format",))
        if version != FORMAT:
            raise ValueError(f"profile format {version!r}, ours is {FORMAT}")
        names = ("provenance", "paths", "cells", "busy")
        provenance, paths, cells, busy = _fields("profile", data, names)
        if not isinstance(provenance, Mapping):
            raise ValueError("provenance: expected an object")
        known = frozenset(_word("paths", name) for name in _list("paths", paths))
        return cls(
            cells=_checked((_cell(each) for each in _list("cells", cells)), known),
            busy=tuple(_busy_cell(each) for each in _list("busy", busy)),
            provenance={
                _word("provenance", k): _word("provenance", v) for k, v in provenance.items()
            },
            paths=known,
        )


def _plain(cell: Cell | BusyCell) -> dict[str, Any]:
    return {**asdict(cell), "direction": cell.direction.value}


def _cell(data: Any) -> Cell:
    names = ("direction", "path", "segment_bytes", "num_segments", "seconds", "num_runs")
    direction, path, segment_bytes, num_segments, seconds, num_runs = _fields("cells", data, names)
    return Cell(
        Direction(direction),
        _word("cells: path", path),
        _count("cells: segment_bytes", segment_bytes),
        _count("cells: num_segments", num_segments),
        _number("cells: seconds", seconds, LEAST_SECONDS, MOST_SECONDS),
        _count("cells: num_runs", num_runs),
    )


def _busy_cell(data: Any) -> BusyCell:
    names = ("direction", "path", "load", "gbps", "idle_gbps", "lost_ms_per_gb")
    direction, path, load, gbps, idle_gbps, lost = _fields("busy", data, names)
    return BusyCell(
        Direction(direction),
        _word("busy: path", path),
        _word("busy: load", load),
        _number("busy: gbps", gbps, LEAST_GBPS, MOST_GBPS),
        _number("busy: idle_gbps", idle_gbps, LEAST_GBPS, MOST_GBPS),
        _number("busy: lost_ms_per_gb", lost, 0.0, MOST_LOST_MS),
    )


def _checked(cells: Iterable[Cell], paths: Collection[str]) -> tuple[Cell, ...]:
    """Every path that was timed has a curve, and no two of its points are at one place."""
    kept: dict[tuple[Direction, str, int, int, int], Cell] = {}
    for cell in cells:
        if cell.path not in paths:
            raise ValueError(f"cells: {cell.path} is none of the paths there were")
        at = (cell.direction, cell.path, cell.segment_bytes, cell.num_segments, cell.num_runs)
        if kept.setdefault(at, cell) is not cell:
            raise ValueError(f"cells: {cell.path} was timed twice for one and the same copy")
    curves = {(cell.direction, cell.path) for cell in kept.values() if cell.num_runs == 1}
    for cell in kept.values():
        if (cell.direction, cell.path) not in curves:
            raise ValueError(f"cells: {cell.path} was timed with scattered host slots only")
    if {direction for direction, _ in curves} != set(Direction):
        raise ValueError("cells: not both directions were timed")
    return tuple(kept.values())


def _fields(what: str, data: Any, names: Collection[str]) -> list[Any]:
    """The named fields of a JSON object; ValueError where one is missing."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what}: expected an object, got {type(data).__name__}")
    for name in names:
        if name not in data:
            raise ValueError(f"{what}: {name} is missing")
    return [data[name] for name in names]


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_CELLS:
        raise ValueError(f"{what}: expected a list of at most {MOST_CELLS}")
    return value


def _count(what: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_BYTES:  # a bool is no number here
        raise ValueError(f"{what} is not a count")
    return value


def _number(what: str, value: Any, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:  # NaN is never within
        raise ValueError(f"{what} is not a number from {least:g} to {most:g}")
    return float(value)


def _word(what: str, value: Any) -> str:
    # Shown to users as it is: so it must be printable and short.
    if not isinstance(value, str) or len(value) > MOST_LETTERS or not value.isprintable():
        raise ValueError(f"{what} is not a plain text of at most {MOST_LETTERS} letters")
    return value


def cache_directory() -> Path:
    """Where profiles are kept: ``$XDG_CACHE_HOME/kvferry`` or ``~/.cache/kvferry``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "kvferry"


def profile_file(identity: DeviceIdentity, paths: Collection[str]) -> Path:
    """The file for one card, driver and link, and the set of paths there are to choose from."""
    key = "|".join(
        (identity.name, str(identity.driver_version), identity.link, ",".join(sorted(paths)))
    )
    slug = re.sub(r"[^a-z0-9]+", "-", identity.name.lower()).strip("-")
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return cache_directory() / f"profile-{slug}-{digest}.json"


def save_profile(profile: Profile, file: Path) -> None:
    """Write whole or not at all: another process may be reading."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps(profile.to_json(), indent=1) + "\n")
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def load_profile(file: Path, paths: Collection[str]) -> Profile | None:
    """The profile in ``file``, or None where there is none that was measured for ``paths``."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MOST_FILE_BYTES + 1)
        if len(text) > MOST_FILE_BYTES:
            raise ValueError(f"it has more than {MOST_FILE_BYTES} bytes")
        profile = Profile.from_json(json.loads(text))
        if profile.paths != frozenset(paths):
            raise ValueError(
                f"it was measured for {', '.join(sorted(profile.paths))}; "
                f"here are {', '.join(sorted(paths))}"
            )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # the last one for JSON without a bottom
        log.warning("profile %s cannot be used (%s); measuring again replaces it", file, error)
        return None
    return profile


SEGMENT_BYTES = (1 * KiB, 16 * KiB, 256 * KiB, 4 * MiB)
NUM_BYTES = (1 * MiB, 1024 * MiB)
NUM_RUNS = 256


def builtin_profile(reason: str = "nothing was measured on this machine yet") -> Profile:
    """A profile for any card; ``reason`` says why there is no better one.

    Not the numbers of one card but the relations all cards share: see ``COPY_PATHS``.
    """
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
