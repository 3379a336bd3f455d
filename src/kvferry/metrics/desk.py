"""Questions from other threads to objects that belong to the engine's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 0.25
"""An engine that has not come by for so long is idle, or deep in a step that touches nothing."""


class _Question:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self._work = work
        self._claim = threading.Lock()
        self.answer: Any = None
        self.error: Exception | None = None

    def settle(self) -> bool:
        """Work the answer out, unless another thread already does."""
        if not self._claim.acquire(blocking=False):
            return False
        try:
            self.answer = self._work()
        except Exception as error:  # it belongs to whoever asked
            self.error = error
        finally:
            self.done.set()
        return True


class Desk:
    """Takes questions from any thread; the engine's own thread answers them as it comes by.

    An idle engine never comes by: then whoever asked looks for itself. It may do so in the very
    moment the engine wakes up, so a question must only read, and bear numbers that are of two
    neighbouring steps.
    """

    def __init__(self) -> None:
        self._questions: deque[_Question] = deque()

    def ask(self, work: Callable[[], T], *, patience: float = PATIENCE_SECONDS) -> T:
        """The result of ``work``, run on the engine's thread if it comes by in time."""
        question = _Question(work)
        self._questions.append(question)
        if not question.done.wait(patience) and not question.settle():
            question.done.wait()
        with suppress(ValueError):  # an engine that stays idle must not find a heap of old ones
            self._questions.remove(question)
        if question.error is not None:
            raise question.error
        answer: T = question.answer
        return answer

    def answer(self) -> None:
        """Once a step, on the engine's thread: a look at an empty queue, nearly always."""
        while self._questions:
            self._questions.popleft().settle()
