"""The planner: which path copies a transfer.

A copy costs a start, then so much per byte, per segment and per run of adjacent host slots. The
costs in ``settings/copy_paths.py`` are those of one H200. Every choice by them was within 4% of the
best path there (docs/benchmarks/copy-h200.json, 74 transfers on an idle card).
"""

from __future__ import annotations

from collections.abc import Collection

from kvferry.errors import InputError
from kvferry.settings.copy_paths import AUTO_PATH, BY_NAME, candidates
from kvferry.transfer.job import Direction
from kvferry.transfer.layout import GroupLayout

MODEL_WEIGHT = 8.0
"""One millisecond of model time counts as so many of copy time while the model runs: every request
in the batch waits for the model, only a few for a copy."""


class Planner:
    """Chooses among the ``paths`` an engine has, or takes the one that ``copy_path`` names."""

    def __init__(self, paths: Collection[str], copy_path: str = AUTO_PATH) -> None:
        if copy_path not in (AUTO_PATH, *paths):
            raise InputError(f"copy_path is {copy_path!r}, but there are only {sorted(paths)}")
        self.names = candidates(paths) if copy_path == AUTO_PATH else (copy_path,)
        """The paths there is a choice between."""

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
        slots make up. ``at_once`` asks for a path that queues a copy at once, if there is one:
        compute waits for the copy, and can be ordered behind what is queued only. (A load of 917 MB
        was queued after 1.4 ms by ``kernel``, 6 ms by ``staged``: first tokens came after 26.6 and
        29.7 ms. One NVIDIA H200, vLLM 0.26, 2026-11-18.)
        """
        names = self.names
        if at_once:
            names = tuple(name for name in names if BY_NAME[name].queues_at_once) or names
        num_bytes, num_segments = num_blocks * layout.block_bytes, num_blocks * layout.num_segments

        def score(name: str) -> float:
            path = BY_NAME[name]
            cost = path.load if direction is Direction.LOAD else path.store
            seconds = cost.seconds(num_bytes, num_segments, num_runs)
            if busy:
                return seconds * cost.stretch + MODEL_WEIGHT * cost.lost_seconds(num_bytes)
            return seconds

        return min(names, key=score)
