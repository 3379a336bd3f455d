"""A thread that looks at requests in its own time: the engine hands each over and goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.telemetry.recorder import ObservedRequest

log = logging.getLogger("kvferry")

_LOOK_SECONDS = 1.0
_BURST_SECONDS = 4e-3
"""It looks at so much in one go, if so much waits: the first request finds nothing in the caches,
and costs several times what the next ones do (1 ms, beside an H200). After 5 ms the
interpreter is the engine's again in any case."""
_REST = 19
"""It rests so many times as long as it worked: at most a twentieth of one processor is its."""
_MOST_REST = 1.0
_MOST_WAITING = 4096
_CLOSE_SECONDS = 5.0


class Student(Protocol):
    """Whoever learns from requests, on the observer's thread alone."""

    def learn(self, request: ObservedRequest) -> None:
        """One request; in the order in which they came."""

    def idle(self) -> None:
        """Nothing waits at this moment: a time to put things in order."""

    def hurry(self) -> None:
        """More comes than can be looked at: make do with less of each."""

    def close(self) -> None:
        """No more will come."""


class Observer:
    """Owns a thread, begun with the first request, and the students it calls.

    :meth:`see` is all that the engine's thread does. What is too much is left out and counted
    (``num_missed``). A student that raises is dropped, with a line in the log: nobody else notices.
    """

    def __init__(
        self,
        students: Sequence[Student],
        *,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """``pause`` is how it rests, given the seconds it has earned."""
        self.num_missed = 0
        self._students = list(students)
        self._waiting: deque[ObservedRequest] = deque()
        self._stop = threading.Event()
        self._pause = pause if pause is not None else self._stop.wait
        self._thread: threading.Thread | None = None

    def see(self, noted: ObservedRequest) -> None:
        """A request has come. Costs the caller next to nothing, and never waits."""
        waiting = self._waiting
        if len(waiting) >= _MOST_WAITING:
            self.num_missed += 1
            return
        waiting.append(noted)
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="kvferry-observer", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Let it look at what waits, for a moment, and end. Safe to call twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        if self._thread is None or not self._thread.is_alive():
            self._tell(lambda student: student.close())

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self._look()
        deadline = time.monotonic() + _CLOSE_SECONDS / 2
        self._pause = lambda seconds: None
        self._look(deadline)

    def _look(self, deadline: float = float("inf")) -> None:
        worked = 0.0
        while self._waiting and self._students and time.monotonic() < deadline:
            if len(self._waiting) > _MOST_WAITING // 2:
                self._tell(lambda student: student.hurry())
                while len(self._waiting) > _MOST_WAITING // 4:
                    self._waiting.popleft()
                    self.num_missed += 1
            began = time.thread_time()
            request = self._waiting.popleft()
            self._tell(lambda student: student.learn(request))  # noqa: B023
            worked += time.thread_time() - began
            if worked >= _BURST_SECONDS:
                self._pause(min(_MOST_REST, _REST * worked))
                worked = 0.0
        self._tell(lambda student: student.idle())

    def _tell(self, what: Callable[[Student], None]) -> None:
        for student in tuple(self._students):
            self._call(student, what)

    def _call(self, student: Student, what: Callable[[Student], None]) -> None:
        try:
            what(student)
        except Exception:
            log.exception("%s stopped after a mistake of ours", type(student).__name__)
            self._students.remove(student)
