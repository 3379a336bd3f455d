"""When a store is worth asking: a dead or slow one costs one deadline, then is left alone.

::

    closed ── a whole batch failed by the store's fault ──> open ── a probe came through ──> closed
                                                             └── it did not: the next one later

A probe that comes through does not yet make the next wait short again: only blocks that move do. A
store that answers probes and nothing else is asked ever more seldom.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_WAIT = 0.25
LONGEST_WAIT = 15.0


class Breaker:
    """Owns whether the store may be asked, why not, and when to probe it next.

    ``now`` is ``time.monotonic``. ``jitter`` keeps the servers of a fleet from probing in step.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self.ailment = ""
        self.probe_at = 0.0
        self._wait = FIRST_WAIT
        self._jitter = jitter

    def failed(self, reason: str, now: float) -> None:
        """A whole batch, or a probe, failed by the store's fault."""
        self.ailment = reason or "out of order"
        self.probe_at = now + self._wait * (0.5 + 0.5 * self._jitter())
        self._wait = min(2 * self._wait, LONGEST_WAIT)

    def probed(self) -> None:
        """A probe came through."""
        self.ailment = ""

    def worked(self) -> None:
        """Blocks moved, or were looked up."""
        self._wait = FIRST_WAIT
