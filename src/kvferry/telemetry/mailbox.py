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
"""An engine that has not come by for so long is idle, or in a long step that changes nothing."""

PAUSE_SECONDS = 0.05
"""However many questions come, the engine is left alone for so long between two answers."""

MAX_A_STEP = 4
"""Questions that one step answers; each of them only picks up facts, and takes microseconds."""

ORDER_SECONDS = 5.0
"""So long an order waits for the engine; a step of a busy one takes less."""

ORDER_PAUSE_SECONDS = 0.01
MAX_ORDERS = 16

_LOOKS = 10


class _Question:
    """One piece of work, and the gate at which all threads wait that want its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._claim = threading.Lock()
        # A lock and no Event: to open it, the engine's thread must not need a lock of the waiting.
        self._gate = threading.Lock()
        self._gate.acquire()
        self.answer: Any = None
        self.error: Exception | None = None
        self.is_engines = False

    def settle(self, *, on_engine: bool = False) -> None:
        """Do the work, unless another thread already does."""
        if not self.cancel():
            return
        self.is_engines = on_engine
        try:
            self.answer = self._work()
        except Exception as error:  # it is raised in the thread that asked
            self.error = error
        finally:
            self._gate.release()

    def cancel(self) -> bool:
        """Whether no thread has begun with it, and now none will."""
        return self._claim.acquire(blocking=False)

    def fail(self, error: Exception) -> None:
        """Let it fail, unless a thread has begun with it."""
        if self.cancel():
            self.error = error
            self._gate.release()

    def wait(self, seconds: float = -1) -> bool:
        """Whether it is settled, by then."""
        if not self._gate.acquire(timeout=seconds):
            return False
        self._gate.release()  # let the next one through
        return True


class Mailbox:
    """Takes questions from any thread; the engine's own thread answers them as it comes by.

    Equal questions that wait share one answer. A step answers a few questions that waited when it
    came by, and never waits for another thread. An idle engine never comes by: then the thread that
    asked does the work itself. It may do so in the very moment the engine wakes up, so a question
    must only read, and may mix numbers of two neighbouring steps; if it fails over that, it is
    tried again.
    """

    def __init__(
        self,
        *,
        pause: float = PAUSE_SECONDS,
        most: int = MAX_A_STEP,
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
        self.wake: Callable[[], None] = lambda: None
        """Called when an order was given, so that an idle engine comes by."""
        self.before_answers: Callable[[], object] = lambda: None
        """Called on the engine's thread before questions are answered there."""

    # -- orders ---------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether an order waits for the engine."""
        return bool(self._orders)

    def order(self, work: Callable[[], T], patience: float = ORDER_SECONDS) -> T:
        """The result of ``work()``, done on the engine's thread and on no other.

        StateError if too many orders wait, DeadlineError if the engine did not come by: then
        nothing was done, nor will it be.
        """
        order = _Question(work)
        with self._lock:
            if self._ended:
                raise StateError(self._ended)
            if len(self._orders) >= MAX_ORDERS:
                raise StateError(f"{MAX_ORDERS} orders wait for the engine already")
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
        """The engine will not come by any more: orders fail, now and later."""
        with self._lock:
            self._ended = reason
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            order.fail(StateError(reason))

    def _obey(self) -> None:
        """Carry out one order, then pause: orders must not keep the engine."""
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
        key = (work, args)
        for left in reversed(range(_LOOKS)):
            with self._lock:
                question = self._open.setdefault(key, _Question(lambda: work(*args)))
            if not question.wait(patience):
                with self._lock:  # first: later questions must not get this older answer
                    if self._open.get(key) is question:
                        del self._open[key]
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
            return  # a thread is just asking; the next step will do
        try:
            waiting = [self._open.pop(key) for key in list(islice(self._open, self._most))]
        finally:
            self._lock.release()
        self.before_answers()
        for question in waiting:
            question.settle(on_engine=True)
        self._next_at = self._clock() + self._pause
