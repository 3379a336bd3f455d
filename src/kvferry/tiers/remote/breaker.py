"""When a store is worth asking: a dead or slow one costs one deadline, then is left alone.

::

    closed ── a whole batch failed by the store's fault ──> open ── a trial came through ──> closed
                                                             └── it did not: the next one later

A trial that comes through does not yet make the next wait short again: only batches do, and of the
kind that failed. A store that serves trials or look-ups, and no blocks, is asked ever more seldom.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvferry.tiers.base import Way

FIRST_WAIT = 0.25
LONGEST_WAIT = 15.0


class Breaker:
    """Owns whether the store may be asked, why not, and when to try it next.

    ``now`` is ``time.monotonic``. ``jitter`` keeps the servers of a fleet from trying in step.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self.ailment = ""
        self.probe_at = 0.0
        self.wait = FIRST_WAIT
        """How long it is left alone when it fails next, at most."""
        self._failed: set[Way] = set()
        self._jitter = jitter

    def failed(self, reason: str, now: float, way: Way | None = None) -> None:
        """A whole batch, which went this way, or a trial failed by the store's fault."""
        if way is not None:
            self._failed.add(way)
        self.ailment = reason or "out of order"
        self.probe_at = now + self.wait * (0.5 + 0.5 * self._jitter())
        self.wait = min(2 * self.wait, LONGEST_WAIT)

    def probed(self) -> None:
        """A trial came through."""
        self.ailment = ""

    def worked(self, way: Way) -> None:
        """Blocks moved this way, or were looked up."""
        self._failed.discard(way)
        if not self._failed:
            self.wait = FIRST_WAIT
