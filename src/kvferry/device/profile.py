"""A profile: what calibration measured on one machine, kept as a small JSON file.

One file per card, driver and link, in the user's cache directory. A file we cannot read is as good
as none: the machine is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry.device.driver import DeviceIdentity
from kvferry.device.job import Direction

log = logging.getLogger(__name__)

FORMAT = 2


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
    """All that was measured on one machine, and how."""

    cells: tuple[Cell, ...]
    busy: tuple[BusyCell, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads it back."""
        return {
            "format": FORMAT,
            "provenance": self.provenance,
            "cells": [_plain(cell) for cell in self.cells],
            "busy": [_plain(cell) for cell in self.busy],
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The reverse of ``to_json``; ValueError, KeyError or TypeError for anything else."""
        if data["format"] != FORMAT:
            raise ValueError(f"profile format {data['format']}, ours is {FORMAT}")
        return cls(
            cells=tuple(Cell(**_typed(cell)) for cell in data["cells"]),
            busy=tuple(BusyCell(**_typed(cell)) for cell in data["busy"]),
            provenance={str(k): str(v) for k, v in data["provenance"].items()},
        )


def cache_directory() -> Path:
    """Where profiles are kept: ``$XDG_CACHE_HOME/kvferry`` or ``~/.cache/kvferry``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "kvferry"


def profile_file(identity: DeviceIdentity, directory: Path | None = None) -> Path:
    """The file for one card, driver and link."""
    key = f"{identity.name}|{identity.driver_version}|{identity.link}"
    slug = re.sub(r"[^a-z0-9]+", "-", identity.name.lower()).strip("-")
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    directory = cache_directory() if directory is None else directory
    return directory / f"profile-{slug}-{digest}.json"


def save_profile(profile: Profile, file: Path) -> None:
    """Write whole or not at all: another process may be reading."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps(profile.to_json(), indent=1) + "\n")
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def load_profile(file: Path) -> Profile | None:
    """The profile in ``file``, or None where there is none we can read."""
    try:
        return Profile.from_json(json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("profile %s is not readable (%s); measuring again will replace it", file, error)
        return None


def _plain(cell: Cell | BusyCell) -> dict[str, Any]:
    return {**asdict(cell), "direction": cell.direction.value}


def _typed(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "direction": Direction(data["direction"])}
