"""A planner for the paths of this machine, measured first if nobody has yet."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvferry.errors import KvferryError
from kvferry.settings.copy_paths import AUTO_PATH
from kvferry.transfer.driver.base import Driver
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.planning.calibrate import calibrate
from kvferry.transfer.planning.planner import MeasuredPlanner
from kvferry.transfer.planning.profile import (
    Profile,
    builtin_profile,
    load_profile,
    profile_file,
    save_profile,
)

log = logging.getLogger(__name__)


def open_planner(
    driver: Driver, paths: Mapping[str, Path], *, copy_path: str = AUTO_PATH
) -> MeasuredPlanner:
    """A planner for ``paths``: pinned, or by this machine's profile, measured if there is none.

    Never fails for want of a measurement: then it plans by the built-in profile.
    """
    if copy_path != AUTO_PATH:
        return MeasuredPlanner(builtin_profile(), paths, pinned=copy_path)
    return MeasuredPlanner(_profile(driver, paths), paths)


def _profile(driver: Driver, paths: Mapping[str, Path]) -> Profile:
    file = profile_file(driver.identity(), paths)
    profile = load_profile(file, paths)
    if profile is not None:
        return profile
    try:
        profile = calibrate(driver, paths)
        save_profile(profile, file)
    except (KvferryError, OSError, RuntimeError) as error:
        log.warning("this machine could not be measured: %s", error)
        return profile or builtin_profile(f"measuring failed: {error}")
    return profile
