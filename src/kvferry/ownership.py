"""Who may use an object that is not thread-safe: one thread at a time, of one process."""

from __future__ import annotations

import os
import threading
from threading import current_thread

from kvferry.errors import ClosedError, StateError

_process = [object()]
"""Another object in every process: a forked child finds that it is not the one it was."""

os.register_at_fork(after_in_child=lambda: _process.__setitem__(0, object()))


class Process:
    """The process in which this object was made: threads and mapped memory are not forked."""

    __slots__ = ("_made_in", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._made_in = _process[0]

    @property
    def is_another(self) -> bool:
        return self._made_in is not _process[0]

    def require(self) -> None:
        """StateError in a forked child: whoever waits for a thread there does so for ever."""
        if self.is_another:
            raise StateError(
                f"{self._what} was made before this process was forked (now {os.getpid()}); its "
                "threads and host memory stayed behind. Make one of its own after the fork"
            )


class OneThread:
    """The thread an object belongs to: the first that uses it, until it ends or hands it over.

    Two threads would break lists that one of them is changing, long before anyone sees it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._process = Process(what)
        self._made_in = _process[0]
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_forked(self) -> bool:
        return self._process.is_another

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Nobody may use it any more."""
        self._is_closed = True
        self._thread = None

    def require(self) -> None:
        """StateError, with both names, for any thread but its own; ClosedError once it is closed.

        One comparison while all is well: it is asked at every call.
        """
        # Not by their numbers: the next thread has that of one that ended.
        if current_thread() is not self._thread or self._made_in is not _process[0]:
            self._process.require()
            if self._is_closed:
                raise ClosedError(f"{self._what} is closed")
            self._take()

    def hand_over(self) -> None:
        """The next thread that uses it is its owner."""
        self.require()
        self._thread = None

    def _take(self) -> None:
        caller = current_thread()
        with self._lock:
            owner = self._thread
            if owner is not None and owner is not caller and owner.is_alive():
                raise StateError(
                    f"{self._what} belongs to thread {owner.name!r}, but {caller.name!r} used it; "
                    "call it from one thread, or let its own call hand_over() first"
                )
            self._thread = caller
