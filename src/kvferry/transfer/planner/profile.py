"""A profile: what paths cost on one machine, kept as a JSON file per card, driver and link.

A file that cannot be used counts as none, and the machine is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.settings.copy_paths import BY_NAME, Cost, candidates
from kvferry.transfer.driver import DeviceIdentity
from kvferry.transfer.job import Direction

log = logging.getLogger(__name__)

FORMAT = 4

MEASURED = {"start": (0.0, 1e3), "rate": (1e3, 1e15), "per_run": (0.0, 1e3)}
"""The fields of a cost that calibration measures, and the numbers a copy can have."""
MOST_LETTERS = 1000
MOST_FILE_BYTES = 1 << 20
"""A profile has some hundreds of bytes."""


@dataclass(frozen=True)
class Profile:
    """What was measured on one machine; what it does not have costs what ``COPY_PATHS`` says."""

    costs: Mapping[tuple[Direction, str], Cost] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def cost(self, direction: Direction, path: str) -> Cost:
        """The measured cost, else the built-in one."""
        return self.costs.get((direction, path)) or builtin_cost(direction, path)

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads it back."""
        costs: dict[str, dict[str, Any]] = {}
        for (way, path), cost in self.costs.items():
            costs.setdefault(way.value, {})[path] = {name: getattr(cost, name) for name in MEASURED}
        return {"format": FORMAT, "provenance": dict(self.provenance), "costs": costs}

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The reverse of ``to_json``; raises for anything a planner could not plan by."""
        if data["format"] != FORMAT:
            raise ValueError(f"profile format {data['format']!r:.20}, ours is {FORMAT}")
        costs = {
            (Direction(way), path): replace(
                builtin_cost(Direction(way), path),
                **{name: _number(numbers[name], *most) for name, most in MEASURED.items()},
            )
            for way, paths in data["costs"].items()
            for path, numbers in paths.items()
        }
        return cls(costs, {_word(k): _word(v) for k, v in data["provenance"].items()})


def builtin_cost(direction: Direction, path: str) -> Cost:
    """What ``path`` costs on a machine that was not measured."""
    return BY_NAME[path].load if direction is Direction.LOAD else BY_NAME[path].store


def builtin_profile(reason: str = "nothing was measured on this machine yet") -> Profile:
    """A profile for any card; ``reason`` says why there is no better one."""
    return Profile(provenance={"source": f"the built-in profile, because {reason}"})


def _number(value: Any, least: float, most: float) -> float:
    # A bool is no number here, and NaN is never within.
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(f"expected a number from {least:g} to {most:g}")
    return float(value)


def _word(value: Any) -> str:
    # Shown to users as it is: so it must be printable and short.
    if not isinstance(value, str) or len(value) > MOST_LETTERS or not value.isprintable():
        raise ValueError(f"expected a plain text of at most {MOST_LETTERS} letters")
    return value


def cache_directory() -> Path:
    """Where profiles are kept: ``$XDG_CACHE_HOME/kvferry`` or ``~/.cache/kvferry``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "kvferry"


def profile_file(identity: DeviceIdentity) -> Path:
    """The file for one card, driver and link."""
    key = "|".join((identity.name, str(identity.driver_version), identity.link))
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
    """The profile in ``file``; None where it lacks one of the ``paths`` to choose from."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MOST_FILE_BYTES + 1)
        if len(text) > MOST_FILE_BYTES:
            raise ValueError(f"it has more than {MOST_FILE_BYTES} bytes")
        profile = Profile.from_json(json.loads(text))
        for direction in Direction:
            for path in candidates(paths):
                if (direction, path) not in profile.costs:
                    raise ValueError(f"it does not say what a {direction.value} by {path} costs")
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is in the file
        words = f"{type(error).__name__}: {error}"
        log.warning("profile %s cannot be used (%.500s); measuring again replaces it", file, words)
        return None
    return profile


def has_profile(identity: DeviceIdentity, paths: Collection[str]) -> bool:
    """Whether nothing is left to measure: there is a profile, or no choice between paths."""
    if len(candidates(paths)) < 2:
        return True
    return load_profile(profile_file(identity), paths) is not None
