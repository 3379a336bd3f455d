"""Ownership by process and thread, closing (also of dropped objects), and short sleeps."""

from __future__ import annotations

import _thread
import ctypes
import functools
import logging
import os
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import current_thread
from types import TracebackType
from typing import Any, TypeVar

from kvferry.errors import ClosedError, StateError

T = TypeVar("T", bound="Closing")

log = logging.getLogger(__name__)

_alive: weakref.WeakSet[Process] = weakref.WeakSet()
"""Every :class:`Process` made in this process and still alive."""


def _disown_in_child() -> None:
    """Mark, in a forked child, all objects of the parent as another process's."""
    for each in tuple(_alive):
        each.is_forked_child = True
        each.thread = None
    _alive.clear()


os.register_at_fork(after_in_child=_disown_in_child)


class Process:
    """The process that made an object: a forked child has neither its threads nor its memory."""

    __slots__ = ("__weakref__", "_what", "is_forked_child", "thread")

    def __init__(self, what: str) -> None:
        self._what = what
        self.is_forked_child = False
        """Whether this is a forked child."""
        self.thread: threading.Thread | None = None
        """The only thread that may use the object; None: any thread."""
        _alive.add(self)

    def require(self) -> None:
        """Raise StateError in a forked child, where waiting for a thread would never end."""
        if self.is_forked_child:
            raise StateError(
                f"{self._what} was made before this process was forked (now {os.getpid()}); its "
                "threads and host memory stayed behind. Make one of its own after the fork"
            )


class OwnerThread(Process):
    """The thread that owns an object: the first that uses it, until it ends or hands it over.

    Use by two threads would corrupt lists long before an error shows. Methods that are called often
    compare ``thread`` with the caller's and call :meth:`require` only if they differ.
    """

    __slots__ = ("_lock", "is_closed")

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.is_closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Refuse all further use of the object."""
        self.is_closed = True
        self.thread = None

    def require(self) -> None:
        """Raise StateError in any thread but the owner, and ClosedError once closed."""
        caller = current_thread()  # not its number: a new thread may get the number of an old one
        if caller is self.thread:
            return
        super().require()
        if self.is_closed:
            raise ClosedError(f"{self._what} is closed")
        with self._lock:
            owner = self.thread
            if owner is not None and owner is not caller and owner.is_alive():
                raise StateError(
                    f"{self._what} belongs to thread {owner.name!r}, but {caller.name!r} used it; "
                    "call it from one thread, or let its own call hand_over() first"
                )
            self.thread = caller

    def hand_over(self) -> None:
        """Let the next thread that uses the object own it."""
        self.require()
        self.thread = None


class Closing(ABC):
    """An owner of resources that ``close``, or the end of a ``with`` block, releases."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Safe to call twice."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def close_if_dropped(
    owner: object, what: str, close: Callable[[], object], *, keep_alive: object = None
) -> weakref.finalize[..., Any]:
    """Call ``close`` when ``owner`` is collected without being closed.

    ``close`` must not refer to ``owner``; ``keep_alive`` lives until ``close`` has returned. Call
    the result's ``detach`` once ``owner`` was closed. ``close`` is not called at the end of the
    process (the kernel takes all back), nor in a forked child (which owns nothing).
    """
    dropped = weakref.finalize(owner, _close_in_thread, what, close, keep_alive, Process(what))
    dropped.atexit = False
    return dropped


def _close_in_thread(
    what: str, close: Callable[[], object], keep_alive: object, process: Process
) -> None:
    """Run ``close`` in a new thread: the collector may run in the very thread ``close`` must join.

    A bare ``_thread`` starts that thread, as this one may hold a lock of ``threading`` now.
    """
    if process.is_forked_child:
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


# A thread waits for the end of a copy by polling with short sleeps. Waiting in the driver has no
# time limit, and the driver's callback comes 100 to 250 microseconds late. Polling is 5 to 15 late
# (one NVIDIA H200, 2026-11-16), if the kernel ends a sleep on time: by default it takes 50 more.
_LEAST_PAUSE, _MOST_PAUSE = 3e-6, 1e-5
_PAUSE_SHARE = 100
_SET_SLACK, _GET_SLACK = 29, 30
_FINE_NANOSECONDS = 1000


def pause(waited: float) -> None:
    """Sleep for a hundredth of the seconds ``waited`` so far, 3 to 10 microseconds.

    A processor that sleeps longer is slow when it wakes. Pauses of up to 50 microseconds saved a
    tenth to a fifth of a core, but the work after a copy's end took a sixth longer.
    """
    time.sleep(min(_MOST_PAUSE, max(_LEAST_PAUSE, waited / _PAUSE_SHARE)))


class PunctualSleep:
    """A context in which this thread's sleeps end on time, by a smaller timer slack (Linux)."""

    def __init__(self) -> None:
        self._prctl = _find_prctl()
        self._before = 0

    def __enter__(self) -> None:
        if self._prctl is not None:
            self._before = self._prctl(_GET_SLACK, 0, 0, 0, 0)
            if self._before > _FINE_NANOSECONDS:
                self._prctl(_SET_SLACK, _FINE_NANOSECONDS, 0, 0, 0)

    def __exit__(self, *_: object) -> None:
        if self._prctl is not None and self._before > _FINE_NANOSECONDS:
            self._prctl(_SET_SLACK, self._before, 0, 0, 0)


@functools.cache
def _find_prctl() -> Callable[..., int] | None:
    try:
        # PyDLL keeps the interpreter lock: the call takes less time than getting the lock back.
        function = ctypes.PyDLL(None).prctl
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    function.restype = ctypes.c_int
    found: Callable[..., int] = function
    return found
