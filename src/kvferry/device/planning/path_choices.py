"""What one rank picks paths by, as plain data: another process can say why it picked one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvferry.device.job import Direction
from kvferry.device.layout.base import GroupLayout
from kvferry.device.planning.planner import MeasuredPlanner
from kvferry.device.planning.profile import Profile


@dataclass(frozen=True)
class PathChoices:
    """The measurements, the paths there are, the one that is pinned, and every group's layout.

    Sent once by a rank: then no transfer has to carry its reason along.
    """

    profile: Profile
    paths: tuple[str, ...]
    pinned: str | None
    layouts: tuple[GroupLayout, ...]

    @cached_property
    def _planner(self) -> MeasuredPlanner:
        return MeasuredPlanner(self.profile, self.paths, pinned=self.pinned)

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
