"""One direction's stream and the copies in flight on it.

A copy's life::

    submit -> [taken by the thread, or by a waiting caller] -> queued -> end recorded -> ended
                   wait for compute, start, the copy, part by part | end

The ``end`` event is recorded after a failure too: part of the copy may already be queued, and a
receipt given before that part has run would free memory that the GPU still writes to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from kvferry.errors import DriverError
from kvferry.transfer.driver import Driver, EventPool
from kvferry.transfer.job import CopyJob
from kvferry.transfer.paths.contract import Path
from kvferry.types import Outcome, Rank, Receipt, TransferId

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class PendingCopy:
    """One transfer from submit to receipt."""

    transfer_id: TransferId
    job: CopyJob = field(init=False)
    path_name: str = ""
    ready: int | None = None
    """Event recorded on the compute stream at submit; the copy waits for it."""
    start: int | None = None
    marks: list[int] = field(default_factory=list)
    end: int | None = None
    queued: bool = False
    """Whether the copy is queued on the stream, whole or up to its failure."""
    reason: str = ""
    """Why the copy failed; empty if it has not."""
    seconds: float = 0.0
    failing_since: float | None = None

    def fail(self, error: BaseException) -> None:
        """Make the receipt a failed one, with the first fault as its reason."""
        if not self.reason:
            self.reason = f"{type(error).__name__}: {error}"

    def receipt(self, rank: Rank) -> Receipt:
        """Return the receipt of the ended copy."""
        return Receipt(
            self.transfer_id,
            rank,
            Outcome.FAILED if self.reason else Outcome.OK,
            self.reason,
            num_bytes=0 if self.reason else self.job.num_bytes,
            seconds=0.0 if self.reason else self.seconds,
            path=self.path_name,
        )


class CopyQueue:
    """Owns one direction's copies in flight and their thread; leaves the stream to the engine."""

    patience = 5.0
    """Seconds for which the driver may fail to report a copy's end; then the copy is given up."""

    def __init__(
        self,
        name: str,
        driver: Driver,
        stream: int,
        path: Path,
        order_events: EventPool,
        timing_events: EventPool,
    ) -> None:
        self.stream = stream
        self.path = path
        self._name = name
        self._driver = driver
        self._order_events = order_events
        self._timing_events = timing_events
        self._open: deque[PendingCopy] = deque()
        self._lock = lock = threading.RLock()
        self._changed = threading.Condition(lock)  # wakes the thread: a copy waits, or closing
        self._queued = threading.Condition(lock)  # wakes ``flush``: fewer copies are unqueued
        self._is_awaited = False  # whether ``flush`` waits
        self.num_unqueued = 0
        """Copies submitted whose queueing has not ended."""
        self._queue_lock = threading.Lock()  # keeps copies in order: held to queue one
        self._waiting: deque[PendingCopy] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name=f"kvferry-{name}", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Number of transfers submitted and not yet returned by ``settle``."""
        return len(self._open)

    @property
    def is_stuck(self) -> bool:
        """Whether the thread is still inside a driver call after ``close``."""
        return self._thread.is_alive()

    # -- calls of the engine ---------------------------------------------------------------------

    def submit(self, copy: PendingCopy, *, quick: bool) -> None:
        """Queue a copy here if that is quick and none is before it, else on the thread."""
        with self._lock:
            here = quick and not self.num_unqueued
            self._open.append(copy)
            self.num_unqueued += 1
            if not here:
                self._waiting.append(copy)
                self._changed.notify_all()
        if here:
            with self._queue_lock:
                self._queue(copy)

    def settle(self) -> list[PendingCopy]:
        """Remove and return the copies that have ended, in order; never waits for the device."""
        over: list[PendingCopy] = []
        if self.num_unqueued:
            # A caller that polls in a tight loop would keep the interpreter from our own thread.
            time.sleep(0)
        with self._lock:
            while self._open and self._open[0].queued and self._is_over(self._open[0]):
                over.append(self._open.popleft())
        return over

    def has_ended(self) -> bool:
        """Whether the oldest copy in flight has ended; False if its event cannot be queried."""
        with self._lock:
            first = self._open[0] if self._open else None
            if first is None or not first.queued or first.end is None:
                return False
            try:
                return self._driver.event_is_done(first.end)
            except DriverError as error:  # ``settle`` gets the error again and handles it
                first.fail(error)
                return False

    def flush(self, timeout: float) -> bool:
        """Queue here the copies that the thread has not taken; False if ``timeout`` passed."""
        end = time.monotonic() + timeout
        while self._queue_next(timeout):
            pass
        with self._lock:
            self._is_awaited = True
            left = max(0.0, end - time.monotonic())
            return self._queued.wait_for(lambda: not self.num_unqueued, left)

    def close(self, timeout: float) -> list[PendingCopy]:
        """End the thread; return the copies that are still in flight."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            left = list(self._open)
            self._open.clear()
            self._waiting.clear()
        return left

    # -- queueing --------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._waiting)
                if not self._waiting:
                    return
            self._queue_next(-1)

    def _queue_next(self, timeout: float) -> bool:
        """Queue the next waiting copy; False if none waits or the lock was not free in time."""
        if not self._waiting or not self._queue_lock.acquire(timeout=timeout):
            return False
        try:
            if self._waiting:
                self._queue(self._waiting[0])
            return True
        finally:
            self._queue_lock.release()

    def _queue(self, copy: PendingCopy) -> None:
        """Queue on the stream: the wait for compute, the copy, the record of its end."""
        try:
            with self._driver.current():
                try:
                    self._enqueue(copy)
                except Exception as error:
                    copy.fail(error)
                self._record_end(copy)
        except BaseException as error:
            # A KeyboardInterrupt too: an incomplete copy must not get a good receipt.
            copy.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._finish(copy)

    def _enqueue(self, copy: PendingCopy) -> None:
        assert copy.ready is not None, "a copy is submitted with its place behind compute"
        job, driver, stream = copy.job, self._driver, self.stream
        # Before the copy, in both directions: a store must not read blocks that are still being
        # written, a load must not write blocks that are still being read.
        driver.stream_wait_event(stream, copy.ready)
        copy.start = self._timing_events.take()
        driver.record_event(copy.start, stream)
        for part in job.parts():
            self.path.enqueue(part, stream, copy.ready)
            if job.in_parts is not None:
                mark = self._order_events.take()
                copy.marks.append(mark)
                # Once the mark is reached, this part and all parts before it have arrived.
                driver.record_event(mark, stream)

    def _finish(self, copy: PendingCopy) -> None:
        with self._lock:
            # Waits already queued refer to the record, so the event may be recorded again.
            if copy.ready is not None:
                self._order_events.give(copy.ready)
                copy.ready = None
            if self._waiting and self._waiting[0] is copy:
                self._waiting.popleft()
            copy.queued = True
            self.num_unqueued -= 1
            if self._is_awaited:
                self._is_awaited = bool(self.num_unqueued)
                self._queued.notify_all()

    # -- the end of a copy -----------------------------------------------------------------------

    def _record_end(self, copy: PendingCopy) -> int:
        if copy.end is None:
            event = self._timing_events.take()
            try:
                self._driver.record_event(event, self.stream)
            except Exception:
                self._timing_events.give(event)
                raise
            copy.end = event
        return copy.end

    def _is_over(self, copy: PendingCopy) -> bool:
        try:
            with self._driver.current():
                end = self._record_end(copy)
                if not self._driver.event_is_done(end):
                    return False
                if copy.start is not None and not copy.reason:
                    # An error here is often a late report that the copy failed.
                    copy.seconds = self._driver.elapsed_seconds(copy.start, end)
        except Exception as error:
            copy.fail(error)
            return self._give_up(copy)
        for event in (copy.start, copy.end):
            if event is not None:
                self._timing_events.give(event)
        return True

    def _give_up(self, copy: PendingCopy) -> bool:
        """Whether the driver has failed to report the end for ``patience`` seconds."""
        now = time.monotonic()
        if copy.failing_since is None:
            copy.failing_since = now
        if now - copy.failing_since < self.patience:
            return False
        words = "%s queue: gave up on transfer %d: %s"
        log.error(words, self._name, copy.transfer_id, copy.reason)
        return True
