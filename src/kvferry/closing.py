"""The ``with`` statement for everything that has a ``close``, and an end for what nobody closed."""

from __future__ import annotations

import _thread
import logging
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from kvferry.ownership import Process

T = TypeVar("T", bound="Closing")
U = TypeVar("U")

log = logging.getLogger(__name__)


class Closing(ABC):
    """Something that owns what must be given back: by ``close``, or at the end of ``with``."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Safe to call twice."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def weakly(owner: U, method: Callable[[U], None], gone: Exception) -> Callable[[], None]:
    """``method`` of ``owner`` without holding it; once it was dropped, ``gone`` is raised."""
    found = weakref.ref(owner)

    def call() -> None:
        alive = found()
        if alive is None:
            raise gone
        method(alive)

    return call


def close_if_dropped(
    owner: object, what: str, close: Callable[[], object], *, keep_alive: object = None
) -> weakref.finalize[..., Any]:
    """Call ``close`` when ``owner`` is collected; call its ``detach`` once it was closed.

    ``close`` must not hold ``owner``. ``keep_alive`` lives until it is done. At the end of the
    process nothing is done (the kernel takes all back), nor in a forked child (it is not its own).
    """
    dropped = weakref.finalize(owner, _close_elsewhere, what, close, keep_alive, Process(what))
    dropped.atexit = False
    return dropped


def _close_elsewhere(
    what: str, close: Callable[[], object], keep_alive: object, process: Process
) -> None:
    """In a thread of its own: the collector may run in the very thread that must be joined.

    Begun from a bare one, for it may also run while this thread holds a lock of ``threading``.
    """
    if process.is_another:
        return
    warnings.warn(f"{what} was dropped without close()", ResourceWarning, stacklevel=2)
    try:
        closing = threading.Thread(
            target=_close, args=(what, close, keep_alive), name="kvferry-close", daemon=True
        )
        _thread.start_new_thread(closing.start, ())
    except RuntimeError:  # no more threads, or the process ends
        log.warning("%s was dropped without close(); its memory stays until the process ends", what)


def _close(what: str, close: Callable[[], object], keep_alive: object) -> None:
    try:
        close()
    except Exception:
        log.exception("%s was dropped without close() and could not be closed", what)
    del keep_alive
