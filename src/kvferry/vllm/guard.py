"""An exception of ours never stops the server: it is logged, and vLLM goes on without us."""

from __future__ import annotations

import logging

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
