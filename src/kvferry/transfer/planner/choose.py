"""The planner: which path for which transfer, by the measurements of this machine.

Between measured sizes it interpolates the time: linearly in the bytes of the transfer, because a
copy costs a start and then so much per byte; linearly in one over the segment size, because smaller
segments are more segments. Both are exact for a path whose time is
``a + b * bytes + c * segments``. Scattered host slots cost a path that copies runs one by one
a start and so much per run, measured too.
"""

from __future__ import annotations

import bisect
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from kvferry.errors import InputError, KvferryError
from kvferry.settings.copy_paths import AUTO_PATH, BY_NAME
from kvferry.transfer.driver.base import Driver
from kvferry.transfer.job import Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.planner.measure import calibrate
from kvferry.transfer.planner.profile import (
    BusyCell,
    Cell,
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

MAX_REMEMBERED = 4096
GB = 1e9


@dataclass(frozen=True)
class Estimate:
    """What one path would cost one transfer."""

    path: str
    seconds: float
    lost_seconds: float = 0.0

    @property
    def score(self) -> float:
        """Seconds, those taken from the model weighted by ``MODEL_WEIGHT``."""
        return self.seconds + MODEL_WEIGHT * self.lost_seconds


class _Curve:
    """Seconds over bytes at one segment size: linear between points, linear beyond."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        ordered = sorted(cells, key=lambda cell: cell.num_bytes)
        self._bytes = [cell.num_bytes for cell in ordered]
        self._seconds = [cell.seconds for cell in ordered]

    def at(self, num_bytes: int) -> float:
        if len(self._bytes) == 1:
            return self._seconds[0] * max(1.0, num_bytes / self._bytes[0])
        right = min(max(bisect.bisect_left(self._bytes, num_bytes), 1), len(self._bytes) - 1)
        x0, x1 = self._bytes[right - 1], self._bytes[right]
        y0, y1 = self._seconds[right - 1], self._seconds[right]
        value = y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0)
        # Below the smallest copy measured the start is all that counts.
        return max(value, min(self._seconds[0], self._seconds[0] * num_bytes / self._bytes[0]))


class _Surface:
    """Seconds of one path in one direction, over segment size, bytes and runs of host slots."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        in_one_run = [cell for cell in cells if cell.num_runs == 1]
        sizes = sorted({cell.segment_bytes for cell in in_one_run})
        self._sizes = sizes
        self._curves = [
            _Curve([c for c in in_one_run if c.segment_bytes == size]) for size in sizes
        ]
        self._scattered, self._per_run = _line(
            [
                (
                    cell.num_runs - 1,
                    cell.seconds - self._in_one_run(cell.segment_bytes, cell.num_bytes),
                )
                for cell in cells
                if cell.num_runs > 1
            ]
        )

    def at(self, segment_bytes: float, num_bytes: int, num_runs: int = 1) -> float:
        seconds = self._in_one_run(segment_bytes, num_bytes)
        if num_runs > 1:
            seconds += self._scattered + self._per_run * (num_runs - 1)
        return seconds

    def _in_one_run(self, segment_bytes: float, num_bytes: int) -> float:
        sizes, curves = self._sizes, self._curves
        if segment_bytes <= sizes[0]:
            # Below all measured sizes: as many segments of the smallest size cost at least that.
            return curves[0].at(int(num_bytes * sizes[0] / segment_bytes))
        if segment_bytes >= sizes[-1]:
            return curves[-1].at(num_bytes)
        right = bisect.bisect_left(sizes, segment_bytes)
        share = (1 / sizes[right - 1] - 1 / segment_bytes) / (
            1 / sizes[right - 1] - 1 / sizes[right]
        )
        low, high = curves[right - 1].at(num_bytes), curves[right].at(num_bytes)
        return low + (high - low) * share


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The start and slope, neither negative, of the line that fits ``points`` best."""
    if not points:
        return 0.0, 0.0
    middle, mean = (fmean(values) for values in zip(*points, strict=True))
    spread = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * (y - mean) for x, y in points) / spread if spread else mean / middle
    if slope < 0:
        return max(0.0, mean), 0.0
    start = mean - slope * middle
    if start < 0:
        through_nothing = sum(x * y for x, y in points) / sum(x * x for x, _ in points)
        return 0.0, max(0.0, through_nothing)
    return start, slope


@dataclass(frozen=True)
class _Beside:
    """One path beside a model, on average over the loads it was measured with."""

    stretch: float
    """How much longer a copy takes than on an idle card."""
    lost_seconds_per_byte: float


class Planner:
    """Chooses by a profile among the ``paths`` an engine has; ``pinned`` overrules it."""

    def __init__(
        self, profile: Profile, paths: Collection[str], *, pinned: str | None = None
    ) -> None:
        if pinned is not None and pinned not in paths:
            raise InputError(f"path {pinned!r} is pinned, but there are only {sorted(paths)}")
        self.profile = profile
        self.pinned = pinned
        self._surfaces: dict[Direction, dict[str, _Surface]] = {}
        for direction in Direction:
            known = [cell for cell in profile.cells if cell.direction is direction]
            self._surfaces[direction] = {
                path: _Surface([cell for cell in known if cell.path == path])
                for path in paths
                if any(cell.path == path and cell.num_runs == 1 for cell in known)
            }
            if pinned is None and not self._surfaces[direction]:
                raise InputError(
                    f"the profile knows none of the paths {sorted(paths)} for a {direction.value}"
                )
        self._beside = {
            (direction, path): _average(
                [c for c in profile.busy if c.direction is direction and c.path == path]
            )
            for direction in Direction
            for path in paths
        }
        self._remembered: OrderedDict[tuple[Direction, int, int, int, bool, int, bool], str]
        self._remembered = OrderedDict()

    def choose(
        self,
        direction: Direction,
        layout: GroupLayout,
        num_blocks: int,
        busy: bool,
        num_runs: int = 1,
        *,
        in_parts: bool = False,
    ) -> str:
        """The name of the path that costs least; several threads may ask at once.

        ``busy`` says that the model runs now, ``num_runs`` how many runs of neighbours the host
        slots make up. For a transfer ``in_parts`` it is the best path that queues a copy at once,
        if there is one: the reader of the parts is told of them when all are queued.
        """
        if self.pinned is not None:
            return self.pinned
        num_runs = _counted(num_runs)
        size = (layout.block_bytes, layout.num_segments, num_blocks)
        key = (direction, *size, busy, num_runs, in_parts)
        path = self._remembered.get(key)
        if path is None:
            found = self.estimates(direction, layout, num_blocks, busy, num_runs)
            path = (_at_once(found) if in_parts else None) or found[0].path
            self._remembered[key] = path
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        return path

    def estimates(
        self,
        direction: Direction,
        layout: GroupLayout,
        num_blocks: int,
        busy: bool,
        num_runs: int = 1,
    ) -> list[Estimate]:
        """What each path would cost, the best first."""
        num_bytes = num_blocks * layout.block_bytes
        segment_bytes = layout.block_bytes / layout.num_segments
        found = []
        for path, surface in self._surfaces[direction].items():
            seconds, lost = surface.at(segment_bytes, num_bytes, num_runs), 0.0
            if busy:
                beside = self._beside[direction, path]
                seconds *= beside.stretch
                lost = (beside.lost_seconds_per_byte + _queueing(direction, path)) * num_bytes
            found.append(Estimate(path, seconds, lost))
        return sorted(found, key=lambda estimate: estimate.score)

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
        estimates = self.estimates(direction, layout, num_blocks, busy, _counted(num_runs))
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


def _at_once(estimates: Sequence[Estimate]) -> str | None:
    """The best of the paths that queue a copy at once, though another one may be faster.

    A load of 917 MB was queued after 1.4 ms by ``kernel``, 6 ms by ``staged``: first tokens
    came after 26.6 and 29.7 ms. (One NVIDIA H200, vLLM 0.26, 2026-11-18.)
    """
    names = (estimate.path for estimate in estimates)
    return next((name for name in names if name in BY_NAME and BY_NAME[name].queues_at_once), None)


def _queueing(direction: Direction, path: str) -> float:
    """Seconds of the interpreter per byte, which the engine's steps need too."""
    known = BY_NAME.get(path)
    if known is None:
        return 0.0
    cost = known.load if direction is Direction.LOAD else known.store
    return cost.queueing_ms_per_gb / 1e3 / GB


def _counted(num_runs: int) -> int:
    """The next power of two, so that remembered choices do not depend on every single slot."""
    return 1 << (num_runs - 1).bit_length()


def _average(cells: Sequence[BusyCell]) -> _Beside:
    """The mean over all measured model loads; an unmeasured path costs nothing extra."""
    if not cells:
        return _Beside(1.0, 0.0)
    return _Beside(
        stretch=fmean(max(1.0, cell.idle_gbps / max(cell.gbps, 1e-3)) for cell in cells),
        lost_seconds_per_byte=fmean(max(0.0, cell.lost_ms_per_gb) for cell in cells) / 1e3 / GB,
    )


@dataclass(frozen=True)
class PathChoices:
    """What one rank picks paths by, as plain data: another process can explain a choice.

    Sent once by a rank, so that no transfer has to carry its reason along.
    """

    profile: Profile
    paths: tuple[str, ...]
    pinned: str | None
    layouts: tuple[GroupLayout, ...]

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self.profile, self.paths, pinned=self.pinned)

    def load_seconds(self, group: int, num_blocks: int, *, busy: bool) -> float | None:
        """How long a load of so many blocks takes by what was measured; None where it was not."""
        planner, layout = self._planner, self.layouts[group]
        found = planner.estimates(Direction.LOAD, layout, num_blocks, busy)
        if planner.pinned is not None:
            found = [estimate for estimate in found if estimate.path == planner.pinned]
        return found[0].seconds if found else None

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
        if planner.choose(*what, in_parts=True) == path:
            return f"{path}: it landed in parts, and this path queues all of them at once."
        return ""


def open_planner(
    driver: Driver, paths: Mapping[str, Path], *, copy_path: str = AUTO_PATH
) -> Planner:
    """A planner for ``paths``: pinned, or by this machine's profile, measured if there is none.

    A machine that cannot be measured gets the built-in profile.
    """
    if copy_path != AUTO_PATH:
        return Planner(builtin_profile(), paths, pinned=copy_path)
    file = profile_file(driver.identity(), paths)
    profile = load_profile(file, paths)
    if profile is None:
        try:
            profile = calibrate(driver, paths)
            save_profile(profile, file)
        except (KvferryError, OSError, RuntimeError) as error:
            log.warning("this machine could not be measured: %s", error)
            profile = profile or builtin_profile(f"measuring failed: {error}")
    return Planner(profile, paths)
