"""A profile: what calibration measured on one machine, for one set of paths.

What is read back may come from anywhere: a number that no copy can have taken would make the
planner fail, or choose by nonsense, for as long as the profile is kept.
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

from kvferry.settings.copy_paths import BY_NAME, COPY_PATHS, Cost
from kvferry.transfer.driver.base import DeviceIdentity
from kvferry.transfer.job import Direction

FORMAT = 3

MOST_CELLS = 4096
MOST_BYTES = 1 << 50
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6
LEAST_GBPS, MOST_GBPS = 1e-3, 1e6
MOST_LOST_MS = 1e9
"""Of model time, per gigabyte; a copy that does not get on beside a model is given this."""
MOST_LETTERS = 1000


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
        known = _ProfileFields("profile", data)
        if known.get("format") != FORMAT:
            raise ValueError(f"profile format {known.get('format')!r}, ours is {FORMAT}")
        provenance = _ProfileFields("provenance", known.get("provenance"))
        paths = frozenset(_word("paths", name) for name in known.all("paths"))
        return cls(
            cells=_checked((_cell(each) for each in known.all("cells")), paths),
            busy=tuple(_busy_cell(each) for each in known.all("busy")),
            provenance={_word("provenance", name): provenance.word(name) for name in provenance},
            paths=paths,
        )


def _plain(cell: Cell | BusyCell) -> dict[str, Any]:
    return {**asdict(cell), "direction": cell.direction.value}


def _cell(data: Any) -> Cell:
    cell = _ProfileFields("cells", data)
    return Cell(
        Direction(cell.get("direction")),
        cell.word("path"),
        cell.count("segment_bytes"),
        cell.count("num_segments"),
        cell.number("seconds", LEAST_SECONDS, MOST_SECONDS),
        cell.count("num_runs"),
    )


def _busy_cell(data: Any) -> BusyCell:
    cell = _ProfileFields("busy", data)
    return BusyCell(
        Direction(cell.get("direction")),
        cell.word("path"),
        cell.word("load"),
        cell.number("gbps", LEAST_GBPS, MOST_GBPS),
        cell.number("idle_gbps", LEAST_GBPS, MOST_GBPS),
        cell.number("lost_ms_per_gb", 0.0, MOST_LOST_MS),
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


class _ProfileFields:
    """Fields of a JSON object, each of the type and within the bounds that its reader names."""

    def __init__(self, what: str, data: Any) -> None:
        if not isinstance(data, Mapping):
            raise ValueError(f"{what}: expected an object, got {type(data).__name__}")
        self._what = what
        self._data = data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def get(self, name: str) -> Any:
        if name not in self._data:
            raise ValueError(f"{self._what}: {name} is missing")
        return self._data[name]

    def all(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list) or len(value) > MOST_CELLS:
            raise ValueError(f"{name}: expected a list of at most {MOST_CELLS}")
        return value

    def word(self, name: str) -> str:
        return _word(f"{self._what}: {name}", self.get(name))

    def count(self, name: str) -> int:
        value = self.get(name)
        if type(value) is not int or not 1 <= value <= MOST_BYTES:  # a bool is no number here
            raise ValueError(f"{self._what}: {name} is no number of anything")
        return value

    def number(self, name: str, least: float, most: float) -> float:
        value = self.get(name)
        if type(value) not in (int, float) or not least <= value <= most:  # NaN is never within
            raise ValueError(f"{self._what}: {name} is no number from {least:g} to {most:g}")
        return float(value)


def _word(what: str, value: Any) -> str:
    # Not to be printed raw by whoever shows the profile, and not without end.
    if not isinstance(value, str) or len(value) > MOST_LETTERS or not value.isprintable():
        raise ValueError(f"{what} is no plain text of at most {MOST_LETTERS} letters")
    return value


# ------------------------------------------------------------------------------------------------
# Where profiles are kept: a small JSON file for each card, driver, link and set of paths.
#
# A file we cannot read, or would not plan by, is as good as none: the machine is measured again.

log = logging.getLogger(__name__)

MOST_FILE_BYTES = 4 << 20
"""A profile has some ten kilobytes."""


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


# ------------------------------------------------------------------------------------------------
# The profile to plan by where nothing could be measured.
#
# Not numbers of a card but the shape all of them share, from what every path says of itself: a
# kernel
# starts sooner than anything else, a ring moves a little more per second, a copy per segment
# pays for
# each one, and a kernel that writes host memory stands in the model's way.

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
