"""An exception of ours never stops the server: it is logged, and vLLM goes on without us."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


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


def guarded(otherwise: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A hook that answers ``otherwise()`` when it raises, and ever after.

    For methods of objects with a ``guard``. Once it has tripped the method is not entered again.
    """

    def wrap(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def safe(*args: P.args, **kwargs: P.kwargs) -> R:
            guard: Guard = args[0].guard  # type: ignore[attr-defined]
            if guard.broken:
                return otherwise()
            try:
                return hook(*args, **kwargs)
            except Exception as error:
                guard.trip(hook.__name__, error)
                return otherwise()

        return safe

    return wrap
