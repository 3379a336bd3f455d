"""What a device must offer: an engine that copies blocks between device memory and host slots."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from kvferry.core.lifecycle import Process
from kvferry.errors import ClosedError
from kvferry.types import Receipt, Transfer, TransferId


class PartwiseEngine(Protocol):
    """What may be asked of loads ``in_parts``: by who reads them before they have landed."""

    def num_landed(self, transfer_id: TransferId) -> int | None:
        """How many parts of a load have landed; None while it may still fail.

        Then not all of it is on its way; or ``poll`` has told of it. In between nothing can keep
        the other parts from landing but the loss of the device.
        """

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        """Make compute queued from now on wait for that part of these loads, and those before.

        Where a load is over there is nothing to wait for; where it has fewer parts, the last one
        counts.
        """


class CopyEngine(Protocol):
    """Copies blocks between paged device memory and host slots, asynchronously.

    Owns its streams, events and staging memory; leaves slots, keys and requests to the scheduler.
    A store (device to host) is ordered after everything queued on the compute stream when it was
    submitted; a load (host to device) too, because its destination may still be read there.
    """

    def submit(self, transfer: Transfer) -> None:
        """Queue one transfer and return at once. A fault is a failed receipt, never a raise."""

    def poll(self) -> list[Receipt]:
        """Receipts of transfers that ended since the last call; never blocks."""

    def await_news(self, seconds: float) -> None:
        """Return when something ended that ``poll`` has not told, or after so many seconds.

        From any thread, and without the interpreter meanwhile; it may return early.
        """

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed); returns the receipts."""

    def begun_here(self, *, compute_waits: bool = False) -> AbstractContextManager[None]:
        """What is submitted inside is begun by this thread at its end, the rest left to others.

        For who has nothing better to do than to wait for it: no other thread has to hear of it
        before the first bytes move. ``compute_waits`` as after ``order_compute_after_loads``.
        """

    def order_compute_after_loads(self) -> None:
        """Make compute queued from now on wait for every load submitted so far."""

    @property
    def parts(self) -> PartwiseEngine:
        """Its loads that land part by part."""

    def close(self) -> None:
        """Drain, then give back streams, events and memory. Safe to call twice."""


# ------------------------------------------------------------------------------------------------
# Streams of the CPU device: worker threads with events, so that ordering really matters.


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
