"""The planner: which path for which transfer, by what paths cost on this machine.

A copy costs a start, then so much per byte, per segment and per run of adjacent host slots. By such
costs, fitted to the timings of an H200, every choice was within 5% of the best path
(docs/benchmarks/copy-h200.json, 74 copies in each of two runs).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvferry.errors import InputError, KvferryError
from kvferry.settings.copy_paths import AUTO_PATH, BY_NAME, candidates
from kvferry.transfer.driver import Driver
from kvferry.transfer.job import Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.planner.measure import calibrate
from kvferry.transfer.planner.profile import (
    Profile,
    builtin_profile,
    load_profile,
    profile_file,
    save_profile,
)

log = logging.getLogger(__name__)

MODEL_WEIGHT = 8.0
"""One millisecond of model time counts as so many of copy time while the model runs: every request
in the batch waits for the model, only a few for a copy."""

GB = 1e9


class Estimate(NamedTuple):
    """What one path would cost one transfer; the seconds it takes from the model weigh more."""

    score: float
    path: str
    seconds: float
    lost_seconds: float


class Planner:
    """Chooses by a profile among the ``paths`` an engine has; ``pinned`` overrules it."""

    def __init__(
        self, profile: Profile, paths: Collection[str], *, pinned: str | None = None
    ) -> None:
        if pinned is not None and pinned not in paths:
            raise InputError(f"path {pinned!r} is pinned, but there are only {sorted(paths)}")
        self.profile = profile
        self.pinned = pinned
        self.names = candidates(paths) if pinned is None else (pinned,)
        """The paths there is a choice between."""
        self._costs = {
            direction: {name: profile.cost(direction, name) for name in self.names}
            for direction in Direction
        }

    def choose(
        self,
        direction: Direction,
        layout: GroupLayout,
        num_blocks: int,
        busy: bool,
        num_runs: int = 1,
        *,
        at_once: bool = False,
    ) -> str:
        """The name of the path that costs least; several threads may ask at once.

        ``busy`` says that the model runs now, ``num_runs`` how many runs of neighbours the host
        slots make up. ``at_once`` asks for the best path that queues a copy at once, if there is
        one: compute waits for the copy, and can be ordered behind what is queued only. (A load of
        917 MB was queued after 1.4 ms by ``kernel``, 6 ms by ``staged``: first tokens came after
        26.6 and 29.7 ms. One NVIDIA H200, vLLM 0.26, 2026-11-18.)
        """
        return self.estimates(direction, layout, num_blocks, busy, num_runs, at_once=at_once)[
            0
        ].path

    def estimates(
        self,
        direction: Direction,
        layout: GroupLayout,
        num_blocks: int,
        busy: bool,
        num_runs: int = 1,
        *,
        at_once: bool = False,
    ) -> list[Estimate]:
        """What each path would cost, the best first."""
        costs = self._costs[direction]
        if at_once:
            costs = {n: cost for n, cost in costs.items() if BY_NAME[n].queues_at_once} or costs
        num_bytes, num_segments = num_blocks * layout.block_bytes, num_blocks * layout.num_segments
        found = []
        for path, cost in costs.items():
            seconds, lost = cost.seconds(num_bytes, num_segments, num_runs), 0.0
            if busy:
                seconds, lost = seconds * cost.stretch, cost.lost_seconds(num_bytes)
            found.append(Estimate(seconds + MODEL_WEIGHT * lost, path, seconds, lost))
        return sorted(found)

    def explain(
        self,
        direction: Direction,
        layout: GroupLayout,
        num_blocks: int,
        busy: bool,
        num_runs: int = 1,
    ) -> str:
        """Why ``choose`` answers as it does, in words."""
        num_bytes = num_blocks * layout.block_bytes
        segment = layout.block_bytes / layout.num_segments
        what = (
            f"{direction.value} of {num_blocks} blocks, {num_bytes / 2**20:.4g} MiB in "
            f"{num_blocks * layout.num_segments} segments of {segment / 1024:.4g} KiB, "
            f"model {'running' if busy else 'idle'}"
        )
        if num_runs > 1:
            what += f", host slots in {num_runs} runs"
        if self.pinned is not None:
            return f"{what}: {self.pinned}, because copy_path pins it."
        estimates = self.estimates(direction, layout, num_blocks, busy, num_runs)
        lines = [f"{what}: {estimates[0].path}."]
        for estimate in estimates:
            line = (
                f"  {estimate.path:<7} {1e6 * estimate.seconds:10.0f} µs, "
                f"{num_bytes / estimate.seconds / GB:5.1f} GB/s"
            )
            if busy:
                line += (
                    f", takes {1e6 * estimate.lost_seconds:.0f} µs from the model and its engine"
                    f" (counted {MODEL_WEIGHT:.0f} times)"
                )
            lines.append(line)
        source = self.profile.provenance.get("source", "a profile")
        lines.append(f"  From {source}.")
        return "\n".join(lines)


@dataclass(frozen=True)
class PathChoices:
    """What one rank picks paths by, as plain data: another process can explain a choice."""

    profile: Profile
    paths: tuple[str, ...]
    pinned: str | None
    layouts: tuple[GroupLayout, ...]

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self.profile, self.paths, pinned=self.pinned)

    def load_seconds(self, group: int, num_blocks: int, *, busy: bool) -> float:
        """How long a load of so many blocks takes."""
        layout = self.layouts[group]
        return self._planner.estimates(Direction.LOAD, layout, num_blocks, busy)[0].seconds

    def why(
        self,
        direction: Direction,
        group: int,
        num_blocks: int,
        path: str,
        *,
        busy: bool,
        num_runs: int = 1,
    ) -> str:
        """Why such a transfer took ``path``, in the planner's words; empty where it would not."""
        if not 0 <= group < len(self.layouts):
            return ""
        planner, what = self._planner, (direction, self.layouts[group], num_blocks, busy, num_runs)
        if planner.choose(*what) == path:
            return planner.explain(*what)
        if planner.choose(*what, at_once=True) == path:
            return f"{path}: compute waited for it, and this path queues all of it at once."
        return ""


def open_planner(
    driver: Driver, paths: Mapping[str, Path], *, copy_path: str = AUTO_PATH
) -> Planner:
    """A planner for ``paths``: pinned, or by this machine's profile, measured if there is none.

    A machine that cannot be measured gets the built-in profile.
    """
    if copy_path != AUTO_PATH:
        return Planner(builtin_profile(), paths, pinned=copy_path)
    if len(candidates(paths)) == 1:
        return Planner(builtin_profile("there is one path to choose from"), paths)
    file = profile_file(driver.identity())
    profile = load_profile(file, paths)
    if profile is None:
        try:
            profile = calibrate(driver, paths)
            save_profile(profile, file)
        except (KvferryError, OSError, RuntimeError) as error:
            log.warning("this machine could not be measured: %s", error)
            profile = builtin_profile(f"measuring failed: {error}")
    return Planner(profile, paths)
