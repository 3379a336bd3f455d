"""Where profiles are kept: a small JSON file for each card, driver, link and set of paths.

A file we cannot read, or would not plan by, is as good as none: the machine is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

from kvferry.device.driver.base import DeviceIdentity
from kvferry.device.planning.profile import Profile

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
