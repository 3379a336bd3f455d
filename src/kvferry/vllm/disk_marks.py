"""A reset that holds whatever happens next: the scheduler's side marks the ranks' stores itself.

The ranks hear of a reset with the next step, and a server may be killed before there is one. Stores
on this host are marked at once: whoever opens them next forgets first. Of ranks on other hosts the
stores are out of reach; but a block counts only if every rank has it, so one rank that has
forgotten is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvferry.tiers.disk.marking import here_apart, mark_apart
from kvferry.vllm.messages import RankShape

log = logging.getLogger("vllm.kvferry")

_START_SECONDS = 10.0
"""Beside what a drive may take: the mark is written by a process that has to start first."""


class DiskMarks:
    """Knows the stores of all ranks, and which of them can be reached from here.

    Asked while the ranks have just opened them: a store that vanishes later is no reason to believe
    that it never was here.
    """

    def __init__(self, shapes: Iterable[RankShape], drive_seconds: float) -> None:
        stores = [store for shape in shapes for level in shape.levels for store in level.stores]
        self._timeout = drive_seconds + _START_SECONDS
        self._here = here_apart(stores, self._timeout) if stores else []
        self._is_apart = bool(stores) and not self._here

    def write(self) -> str:
        """Mark them; why what is on disk may still be found after a crash, or nothing."""
        if self._is_apart:
            log.warning("no rank's disk can be reached from here: it forgets with the next step")
        return mark_apart(self._here, self._timeout) if self._here else ""
