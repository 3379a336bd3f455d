"""Threads for calls that block whoever makes them: one that hangs stands in nobody's way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Call = tuple[Callable[[], Any], "Future[Any]"] | None
"""What to call, and who waits for it; None: nothing any more."""


class Callers:
    """Owns the threads. As many as there are calls under way; one that is idle is used again.

    A thread for every call would do as well, but Mooncake's client (0.3.13) takes nearly twice as
    long for a call from a thread that has never made one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[_Call]] = []
        self._is_closed = False

    def call(self, function: Callable[[], T]) -> Future[T]:
        """In a thread of ours; what it raises is the future's."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # it cannot be taken back
        try:
            waits = self._idle.pop()  # the last one in: its caches are the warmest
        except IndexError:
            waits = SimpleQueue()
            threading.Thread(target=self._run, args=(waits,), name=self._name, daemon=True).start()
        waits.put((function, future))
        return future

    def close(self) -> None:
        """End the threads that are idle, and each of the others when its call comes back."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _run(self, waits: SimpleQueue[_Call]) -> None:
        while call := waits.get():
            function, future = call
            answer, error = None, None
            try:
                answer = function()
            except BaseException as raised:
                error = raised
            self._idle.append(waits)  # before anybody hears: who calls next may have it
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answer)
            if self._is_closed:
                self.close()
