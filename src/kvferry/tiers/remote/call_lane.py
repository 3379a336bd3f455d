"""Blocking calls one after the other in one thread, each begun the moment the one before is over.

Who waits for a call hears of it in a loop of his own, later; the next call does not wait for that.
A call that nobody waits for any more is left behind: those after it go on in another thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class CallLane(Generic[T]):
    """Owns its thread, and what waits for it. A thread that was left ends with its call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._change = threading.Condition()  # guards all below
        self._waiting: deque[tuple[Callable[[], T], Future[T]]] = deque()
        self._under_way: Future[T] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def call(self, function: Callable[[], T]) -> Future[T]:
        """When all before it are over; what it raises is the future's."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # whether it can be taken back, leave() says
        with self._change:
            self._waiting.append((function, future))
            self._go_on()
        return future

    def leave(self, future: Future[T], never_begun: T) -> None:
        """Nobody waits for it any more: it ends with ``never_begun``, or whenever it ends."""
        with self._change:
            waiting = [each for each in self._waiting if each[1] is future]
            for each in waiting:
                self._waiting.remove(each)
            if self._under_way is future:
                self._under_way, self._thread = None, None
                self._go_on()
        if waiting:
            future.set_result(never_begun)

    def close(self) -> None:
        """No thread is kept any more."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def _go_on(self) -> None:
        if self._thread is None and self._waiting:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._change.notify_all()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            function, future = call
            try:
                answer = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(answer)

    def _next(self) -> tuple[Callable[[], T], Future[T]] | None:
        """What this thread does next; None: it has been left, or there is nothing to wait for."""
        with self._change:
            while self._thread is threading.current_thread():
                self._under_way = None
                if self._waiting:
                    function, self._under_way = self._waiting.popleft()
                    return function, self._under_way
                if self._is_closed:
                    self._thread = None
                    return None
                self._change.wait()
            return None
