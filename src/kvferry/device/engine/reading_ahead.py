"""What may be loaded next is read before it is ordered, while the link has nothing else to do.

::

    caller   match │ checks, orders, books ... load │
    link       [first chunk, to the ring──]   [the rest──────────▶
    card                                      └▶[scatter]

Reading a slot that is pinned harms nobody, whether it is loaded then or not: the bytes go to the
ring, and only a load that names its device blocks takes them from there.
"""

from __future__ import annotations

from typing import Protocol, cast

from kvferry.device.driver.events import EventPool
from kvferry.device.engine.submission import Submission
from kvferry.device.job import CopyJob
from kvferry.device.paths.ahead import ReadAhead
from kvferry.device.paths.base import Path

LEAST_BYTES = 8 << 20
"""A hit of fewer is loaded sooner than it is worth to look at it twice."""
MOST_RUNS = 64
"""Of neighbouring slots: as many copies as one call of the driver takes."""


class ReadsAhead(Protocol):
    """A path that can begin with a load's bytes before it knows where they go."""

    def read_ahead(self, job: CopyJob, begun: int, ended: int) -> ReadAhead | None:
        """Queue the copy of its first bytes; None where that would take memory or time.

        ``begun`` and ``ended`` are recorded around it. A job of the very same slots goes on from
        it, as long as the path has copied nothing else.
        """


class ReadingAhead:
    """Owns what was read ahead last, and its events; one at a time, for the newest hit."""

    def __init__(self, timing_events: EventPool) -> None:
        self._events = timing_events
        self._newest: ReadAhead | None = None

    def is_worth_it(self, job: CopyJob) -> bool:
        """Whether it has bytes enough, in runs so few that a look-up is not held up by them."""
        return job.num_bytes >= LEAST_BYTES and len(job.run_heads) <= MOST_RUNS

    def begin(self, job: CopyJob, path: Path) -> None:
        """Read what it can of ``job`` by ``path``, which that load is going to take."""
        if not hasattr(path, "read_ahead"):
            return
        events = (self._events.take(), self._events.take())
        newest = None
        try:
            newest = cast("ReadsAhead", path).read_ahead(job, *events)
        finally:
            if newest is None:
                self._give(*events)
        if newest is not None:
            # Only now: until the ring is used again, the load of the one before may still come.
            unused, self._newest = self._newest, newest
            if unused is not None:
                self._give(unused.begun, unused.ended)

    def join(self, submission: Submission, job: CopyJob) -> None:
        """A load is ordered: if it is this one, its time includes what was read ahead."""
        if self._newest is not None and self._newest.is_of(job):
            job.share_runs(self._newest.job)
            submission.ahead, self._newest = self._newest, None

    def _give(self, *events: int) -> None:
        for event in events:
            self._events.give(event)
