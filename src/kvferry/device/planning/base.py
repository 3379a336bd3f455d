"""What a planner must offer: a path for every transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry.device.job import Direction
from kvferry.device.layout.base import GroupLayout


class Planner(Protocol):
    """Picks the path of each transfer; asked by several threads at once."""

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
        """The name of a path; ``busy`` says that the model runs on the device now.

        ``num_runs`` is how many runs of neighbours the host slots make up. ``in_parts``: it lands
        part by part and may be read meanwhile, but nobody is told of it before all of it is queued.
        """


@dataclass(frozen=True)
class FixedPlanner:
    """Always the same path per direction: for tests, and for users who pin their choice."""

    store: str
    load: str

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
        return self.store if direction is Direction.STORE else self.load
