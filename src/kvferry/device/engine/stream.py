"""Streams of the CPU device: worker threads with events, so that ordering really matters."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from kvferry.errors import ClosedError
from kvferry.ownership import Process


class Event:
    """A point in a stream's work. Set when the stream that recorded it gets there."""

    __slots__ = ("_reached",)

    def __init__(self) -> None:
        self._reached = threading.Event()

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block the caller until the point is reached; False if ``timeout`` passed first."""
        return self._reached.wait(timeout)

    def _set(self) -> None:
        self._reached.set()


class Stream:
    """A thread that does work in the order given and nothing else in between.

    Work on two streams runs in any order unless an event orders it: exactly a GPU's rule. What a
    piece of work raises is kept and raised by the next :meth:`synchronize`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._fault: BaseException | None = None
        self._closed = False
        self._process = Process(f"stream {name}")
        self._thread = threading.Thread(target=self._work, name=f"kvferry-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> None:
        """Queue ``work`` and return at once."""
        if self._closed:
            raise ClosedError(f"stream {self.name} is closed")
        self._process.require()
        self._queue.put(work)

    def record(self) -> Event:
        """Mark this point of the stream; the event is reached when all work before it is done."""
        event = Event()
        self.run(event._set)
        return event

    def wait(self, event: Event) -> None:
        """Do nothing queued after this until ``event`` is reached."""
        self.run(event.synchronize)

    def synchronize(self) -> None:
        """Block until all queued work is done; raises what any of it raised."""
        self.record().synchronize()
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def close(self) -> None:
        """Finish the queued work and end the thread. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as fault:  # the stream must go on, or all who wait hang
                self._fault = self._fault or fault
