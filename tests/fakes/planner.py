"""A planner that always gives the same path per direction."""

from __future__ import annotations

from typing import Any

from kvferry.settings.copy_paths import BY_NAME
from kvferry.transfer.job import Direction
from kvferry.transfer.planner import Planner


class FixedPlanner(Planner):
    """The path ``store`` for stores and ``load`` for loads, whatever the transfer."""

    def __init__(self, store: str, load: str) -> None:
        super().__init__(BY_NAME)
        self._fixed = {Direction.STORE: store, Direction.LOAD: load}

    def choose(self, direction: Direction, *_: Any, **__: Any) -> str:
        return self._fixed[direction]
