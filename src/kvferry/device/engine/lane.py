"""One direction's stream and what is in flight on it.

A submission's life::

    submit -> [taken by the lane's thread, or by who waits for it] -> queued -> fenced -> over
                                       wait for compute, start, the copy | end

The fence is the ``end`` event. It is recorded after a failure too: part of the copy may already be
queued, and a receipt given before that part has run would let someone reuse memory the card is
still writing to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.device.driver.base import Driver
from kvferry.device.driver.events import EventPool
from kvferry.device.job import CopyJob
from kvferry.device.paths.base import Path
from kvferry.types import TransferId

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Submission:
    """One transfer between submit and receipt."""

    transfer_id: TransferId
    path: str = ""
    beside_model: bool = False
    num_runs: int = 1
    num_bytes: int = 0
    ready: int | None = None
    """Event recorded on the compute stream at submit; the copy comes after it."""
    start: int | None = None
    end: int | None = None
    queued: bool = False
    """Nothing more will be queued for it; only its end is awaited."""
    reason: str = ""
    """Why it failed: the first fault, empty while there is none."""
    seconds: float = 0.0
    trouble_since: float | None = None

    def fail(self, error: BaseException) -> None:
        if not self.reason:
            self.reason = f"{type(error).__name__}: {error}"


_Order = tuple[Submission, CopyJob, "Path | None"]


class Lane:
    """Owns one direction's submissions and its thread; leaves the stream to the engine.

    Submissions that take long (a driver call per segment, or a batch of thousands) go to the
    thread, so that ``submit`` never holds the serving loop. ``patience`` is how long a driver may
    refuse to say whether a copy is over before we stop asking; ``pick`` finds a path for a job that
    comes without one.
    """

    def __init__(
        self,
        name: str,
        driver: Driver,
        stream: int,
        order_events: EventPool,
        timing_events: EventPool,
        *,
        pick: Callable[[Submission, CopyJob], Path],
        patience: float,
    ) -> None:
        self.stream = stream
        self._pick = pick
        self._name = name
        self._driver = driver
        self._order_events = order_events
        self._timing_events = timing_events
        self._patience = patience
        self._open: deque[Submission] = deque()
        self._changed = threading.Condition()
        self._num_unqueued = 0
        self._turn = threading.Lock()  # to take the next order and queue it: so they stay in order
        self._orders: deque[_Order] = deque()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def num_open(self) -> int:
        """Transfers submitted and not yet settled."""
        return len(self._open)

    @property
    def is_stuck(self) -> bool:
        """Whether the thread is still inside a driver call after ``close``."""
        return self._thread is not None and self._thread.is_alive()

    def submit(
        self, submission: Submission, job: CopyJob, path: Path | None, *, quick: bool
    ) -> None:
        """Queue it now if that is quick and nothing waits before it, else on the thread.

        Without a ``path`` whoever queues it picks one.
        """
        with self._changed:
            here = quick and not self._num_unqueued
            self._open.append(submission)
            self._num_unqueued += 1
            if not here:
                self._orders.append((submission, job, path))
                self._changed.notify_all()
        if here:
            with self._turn:
                self._queue(submission, job, path)
        elif not self._has_thread():
            self._queue_next(None)

    def settle(self) -> list[Submission]:
        """Take out the submissions that are over, in order; never blocks on the device."""
        over: list[Submission] = []
        if self._num_unqueued:
            # A caller that polls in a tight loop would keep the interpreter from our own thread.
            time.sleep(0)
        with self._changed:
            while self._open and self._open[0].queued and self._is_over(self._open[0]):
                over.append(self._open.popleft())
        return over

    def flush(self, timeout: float) -> bool:
        """Queue everything submitted so far on the stream; False if that took longer.

        What the thread has not taken yet is queued here: handing it over takes longer than that.
        """
        end = time.monotonic() + timeout
        while self._queue_next(end):
            pass
        with self._changed:
            left = max(0.0, end - time.monotonic())
            return self._changed.wait_for(lambda: not self._num_unqueued, left)

    def close(self, timeout: float) -> list[Submission]:
        """End the thread; returns the submissions nobody will wait for any more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        with self._changed:
            left = list(self._open)
            self._open.clear()
        return left

    def _has_thread(self) -> bool:
        """Start the thread if there is none; False where the process may not have another one."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=f"kvferry-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("%s lane: copies are queued by their callers: %s", self._name, error)
                return False
            self._thread = thread
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._orders or self._is_closing)
                if not self._orders:
                    return
            self._queue_next(None)

    def _queue_next(self, end: float | None) -> bool:
        """Queue the next order, if there is one and it can be had by ``end``."""
        if not self._orders:
            return False
        if not self._turn.acquire(timeout=-1 if end is None else max(0.0, end - time.monotonic())):
            return False
        try:
            with self._changed:
                order = self._orders.popleft() if self._orders else None
            if order is not None:
                self._queue(*order)
            return order is not None
        finally:
            self._turn.release()

    def _queue(self, submission: Submission, job: CopyJob, path: Path | None) -> None:
        """Wait for compute, copy, fence. No fault escapes: a dead thread leaves others waiting."""
        try:
            with self._driver.current():
                self._queue_copy(submission, job, path)
                self._fence(submission)
        except BaseException as error:
            # An interrupt too: a copy cut short must not end in a good receipt.
            submission.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            # The wait, if it came to that, has captured the record: the event is free again.
            if submission.ready is not None:
                self._order_events.give(submission.ready)
                submission.ready = None
            with self._changed:
                submission.queued = True
                self._num_unqueued -= 1
                self._changed.notify_all()

    def _queue_copy(self, submission: Submission, job: CopyJob, path: Path | None) -> None:
        try:
            path = path if path is not None else self._pick(submission, job)
            if submission.ready is not None:
                # Before the copy, in both directions: a store must not read blocks that are still
                # being written, a load must not write blocks that are still being read.
                self._driver.stream_wait_event(self.stream, submission.ready)
            submission.start = self._timing_events.take()
            self._driver.record_event(submission.start, self.stream)
            path.enqueue(job, self.stream, submission.ready)
        except Exception as error:
            submission.fail(error)

    def _fence(self, submission: Submission) -> int:
        if submission.end is None:
            event = self._timing_events.take()
            try:
                self._driver.record_event(event, self.stream)
            except Exception:
                self._timing_events.give(event)
                raise
            submission.end = event
        return submission.end

    def _is_over(self, submission: Submission) -> bool:
        try:
            with self._driver.current():
                if not self._driver.event_is_done(self._fence(submission)):
                    return False
                self._measure(submission)
        except Exception as error:
            submission.fail(error)
            return self._give_up(submission)
        for event in (submission.start, submission.end):
            if event is not None:
                self._timing_events.give(event)
        return True

    def _measure(self, submission: Submission) -> None:
        if submission.start is None or submission.end is None or submission.reason:
            return
        try:
            submission.seconds = self._driver.elapsed_seconds(submission.start, submission.end)
        except Exception as error:
            # Often the late news of a copy that went wrong: not a receipt to call good.
            submission.fail(error)

    def _give_up(self, submission: Submission) -> bool:
        """Whether the driver has refused to answer for so long that it never will.

        Its events stay with the pool, unused, until the engine closes: they may be pending.
        """
        now = time.monotonic()
        if submission.trouble_since is None:
            submission.trouble_since = now
        if now - submission.trouble_since < self._patience:
            return False
        log.error(
            "%s lane: gave up on transfer %d: %s",
            self._name,
            submission.transfer_id,
            submission.reason,
        )
        return True
