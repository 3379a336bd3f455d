"""A cap on bytes a second: whoever wants to move some may, or is told how long to wait."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from kvferry.tiers.contract import Way

_BURST_SECONDS = 0.05
"""What was not used lately may be used at once, but no more than this much of it."""


class Bandwidth:
    """Owns when the line is free again. ``None`` is no cap.

    Bytes count from the moment they go. Nobody holds a place for bytes that wait: whoever gave up
    waiting would have to give it back, or the line would seem taken for ever.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()  # guards when it is free
        self._free_at = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """So many bytes go now: 0. Or they cannot yet, and nothing is taken: the seconds until
        it is worth asking again.
        """
        if self._rate is None:
            return 0.0
        with self._lock:
            if self._free_at > now:
                return self._free_at - now
            self._free_at = max(self._free_at, now - _BURST_SECONDS) + num_bytes / self._rate
            return 0.0


# ------------------------------------------------------------------------------------------------
# When a store is worth asking: a dead or slow one costs one deadline, then is left alone.
#
# ::
#
#     closed ── a whole batch failed by the store's fault ──> open ── a trial came through ──>
# closed
#                                                              └── it did not: the next one later
#
# A trial that comes through does not yet make the next wait short again: only batches do, and of
# the
# kind that failed. A store that serves trials or look-ups, and no blocks, is asked ever more
# seldom.

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
