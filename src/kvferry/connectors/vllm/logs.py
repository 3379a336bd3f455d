"""Our log lines among vLLM's, in its form."""

from __future__ import annotations

import logging
import time


def speak_as_vllm(tier: str) -> None:
    """Send what kvferry logs where vLLM's lines go, from ``tier`` on."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    ours.setLevel(tier.upper())
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = False


# ------------------------------------------------------------------------------------------------
# Something worth saying, but not with every request.


class Seldom:
    """Says when it is time to say something again. Owns when that was last."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = float("-inf")

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


# ------------------------------------------------------------------------------------------------
# An exception of ours never stops the server: it is logged, and vLLM goes on without us.

log = logging.getLogger(__name__)


class Guard:
    """Remembers whether one side of the connector has failed. Owns the log line, nothing else."""

    def __init__(self, side: str) -> None:
        self._side = side
        self.reason = ""

    @property
    def broken(self) -> bool:
        return bool(self.reason)

    def trip(self, where: str, error: BaseException) -> None:
        """Go out of service; the first reason is the one that is told."""
        if not self.reason:
            self.reason = f"{where}: {type(error).__name__}: {error}"
            log.exception(
                "kvferry (%s) failed in %s and is out of service; vLLM goes on without it",
                self._side,
                where,
            )
