"""Questions and orders from other threads to objects that belong to the engine's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from kvferry.errors import DeadlineError, StateError

T = TypeVar("T")

PATIENCE_SECONDS = 0.25
"""An engine that has not come by for so long is idle, or deep in a step that touches nothing."""

PAUSE_SECONDS = 0.05
"""However many ask, the engine is left alone for so long between two times that it answers."""

MOST_A_STEP = 4
"""Questions that one step answers; each of them only picks up facts, and takes microseconds."""

ORDER_SECONDS = 5.0
"""So long an order waits for the engine; a step of a busy one takes less."""

ORDER_PAUSE_SECONDS = 0.01
MOST_ORDERS = 16

_LOOKS = 10


def _nobody() -> None:
    """An engine that comes by on its own needs nobody to wake it."""


class _Question:
    """One question, and the gate that all wait at who asked it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._claim = threading.Lock()
        # A lock and no Event: to open it the engine's thread must not need a lock of the waiting.
        self._gate = threading.Lock()
        self._gate.acquire()
        self.answer: Any = None
        self.error: Exception | None = None
        self.is_engines = False

    def settle(self, *, on_engine: bool = False) -> None:
        """Work the answer out, unless another thread already does."""
        if not self._claim.acquire(blocking=False):
            return
        self.is_engines = on_engine
        try:
            self.answer = self._work()
        except Exception as error:  # it belongs to whoever asked
            self.error = error
        finally:
            self._gate.release()

    def fail(self, error: Exception) -> None:
        """It will not be done, unless somebody has begun with it."""
        if self.cancel():
            self.error = error
            self._gate.release()

    def cancel(self) -> bool:
        """Whether nobody has begun with it, and now nobody will."""
        return self._claim.acquire(blocking=False)

    def wait(self, seconds: float = -1) -> bool:
        """Whether it is settled, by then."""
        if not self._gate.acquire(timeout=seconds):
            return False
        self._gate.release()  # let the next one through
        return True


class Mailbox:
    """Takes questions from any thread; the engine's own thread answers them as it comes by.

    Who asks what others already wait for shares their answer, so it is worked out once. A step
    answers a few questions that waited when it came by, and never waits for whoever asks.

    An idle engine never comes by: then whoever asked looks for itself. It may do so in the very
    moment the engine wakes up, so a question must only read, and bear numbers that are of two
    neighbouring steps; where a look fails over that, it is made again.
    """

    def __init__(
        self,
        *,
        pause: float = PAUSE_SECONDS,
        most: int = MOST_A_STEP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pause = pause
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[Hashable, _Question] = {}  # the longest waiting first
        self._next_at = float("-inf")
        self._orders: deque[_Question] = deque()
        self._next_order_at = float("-inf")
        self._ended = ""
        self.wake: Callable[[], None] = _nobody
        """Called when an order was given, so that an idle engine comes by."""

    # -- orders ---------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether somebody waits for the engine to do something."""
        return bool(self._orders)

    def order(self, work: Callable[[], T], patience: float = ORDER_SECONDS) -> T:
        """The result of ``work()``, done on the engine's thread and on no other.

        StateError if too many wait, DeadlineError if the engine did not come by: nothing was done
        then, nor will it be.
        """
        order = _Question(work)
        with self._lock:
            if self._ended:
                raise StateError(self._ended)
            if len(self._orders) >= MOST_ORDERS:
                raise StateError(f"{MOST_ORDERS} orders wait for the engine already")
            self._orders.append(order)
        self.wake()
        if not order.wait(patience):
            with self._lock, suppress(ValueError):
                self._orders.remove(order)
            if order.cancel():
                raise DeadlineError(f"the engine did not come by within {patience:g} s")
            order.wait()
        if order.error is not None:
            raise order.error
        done: T = order.answer
        return done

    def abandon(self, reason: str) -> None:
        """The engine will not come by any more: who waits is told, and so is who orders later."""
        with self._lock:
            self._ended = reason
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            order.fail(StateError(reason))

    def _obey(self) -> None:
        """One order at a time, with a pause: whoever orders must not keep the engine."""
        if self._clock() < self._next_order_at or not self._lock.acquire(blocking=False):
            return
        try:
            order = self._orders.popleft() if self._orders else None
        finally:
            self._lock.release()
        if order is not None:
            order.settle(on_engine=True)
            self._next_order_at = self._clock() + ORDER_PAUSE_SECONDS

    # -- questions ------------------------------------------------------------------------------

    def ask(self, work: Callable[..., T], *args: Hashable, patience: float = PATIENCE_SECONDS) -> T:
        """The result of ``work(*args)``, run on the engine's thread if it comes by in time."""
        for left in reversed(range(_LOOKS)):
            question = self._put((work, args))
            if not question.wait(patience):
                self._take(question)  # first: who asks from now on must not get an older answer
                question.settle()
                question.wait()
            if question.error is None:
                break
            if question.is_engines or not left or not isinstance(question.error, RuntimeError):
                raise question.error
            # What was looked at changed meanwhile: the engine is awake, and may answer by itself.
        answer: T = question.answer
        return answer

    def answer(self) -> None:
        """Once a step, on the engine's thread: a look at an empty dictionary, nearly always."""
        if self._orders:
            self._obey()
        if not self._open or self._clock() < self._next_at:
            return
        if not self._lock.acquire(blocking=False):
            return  # somebody is just asking; the next step will do
        try:
            waiting = [self._open.pop(key) for key in list(islice(self._open, self._most))]
        finally:
            self._lock.release()
        for question in waiting:
            question.settle(on_engine=True)
        self._next_at = self._clock() + self._pause

    def _put(self, key: tuple[Callable[..., Any], tuple[Hashable, ...]]) -> _Question:
        work, args = key
        with self._lock:
            question = self._open.get(key)
            if question is None:
                question = self._open[key] = _Question(lambda: work(*args))
            return question

    def _take(self, question: _Question) -> None:
        with self._lock:
            for key in [key for key, found in self._open.items() if found is question]:
                del self._open[key]
