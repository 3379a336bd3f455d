"""What keeps faults and repeated messages of kvferry away from the engine and its log."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)


def log_like(engine: str, threshold: str) -> None:
    """Send kvferry's log lines from ``threshold`` on to the handlers of the engine's logger."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger(engine)
    ours.setLevel(threshold.upper())
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = False


class OnceLogger:
    """Decides whether a repeated message is due again; owns the time of the last one."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = float("-inf")

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Guard:
    """Remembers whether one side of the connector has failed, and the first reason.

    An exception of kvferry never stops the server: it is logged, and the engine goes on alone.
    """

    def __init__(self, side: str) -> None:
        self._side = side
        self.reason = ""

    @property
    def broken(self) -> bool:
        return bool(self.reason)

    def trip(self, where: str, error: BaseException) -> None:
        """Go out of service. Only the first failure is logged and kept."""
        if not self.reason:
            self.reason = f"{where}: {type(error).__name__}: {error}"
            log.exception(
                "kvferry (%s) failed in %s and is out of service; the engine goes on without it",
                self._side,
                where,
            )
