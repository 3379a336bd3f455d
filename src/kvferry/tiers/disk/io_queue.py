"""Queues of a drive's jobs, the jobs in flight, and the drive's health.

::

    order ──split──> jobs: runs of adjacent places ──> reads  ──> threads ──┐
                                                  └──> writes ──> threads ──┴──> one result

A job that has not begun at its order's deadline fails without a thread. A block that fails, for
lack of space too, fails alone. The process ends after many failures in a row, a job in flight
longer than the deadline, a missing file or a failed commit. The next process tries again.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.quantities import format_size
from kvferry.errors import TransferError
from kvferry.tiers.contract import Batch, Result, Way
from kvferry.tiers.disk.block_file import BlockFile
from kvferry.tiers.disk.protocol import DriveSetup
from kvferry.tiers.ipc.messages import Flags, Numbers

MAX_ERRORS = 16
"""Failed calls to the drive in a row after which its process ends."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_BEGUN = "not begun in time"


@dataclass(eq=False)
class Order:
    """An order in flight; its result is sent once all its jobs have ended."""

    message: Batch
    generation: int
    ok: Flags
    began: float
    num_jobs: int = 0
    reasons: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes, places = self.message.sizes, self.message.places
        assert places is not None
        self.places: Numbers = places
        self.block_bytes = int(sizes.sum())
        self.offsets: Numbers = sizes.cumsum() - sizes
        """Offsets of a block's segments from its first byte."""

    def skip_reason(self, now: float) -> str:
        """Return why no further job of the order may begin; empty while one may."""
        return _NOT_BEGUN if now >= self.message.deadline else ""


@dataclass(eq=False)
class Job:
    """Some blocks of an order, for one thread: their positions in it, sorted by place."""

    order: Order
    positions: Numbers
    began: float = 0.0


class IoQueue:
    """Owns the queued jobs and the orders in flight. Any thread may use it."""

    def __init__(
        self, answer: Callable[[Result], None], *, blocks_per_job: int, deadline: float
    ) -> None:
        """``answer`` sends a result. A job has ``deadline`` seconds.

        Jobs are not made smaller to occupy every thread: beside other orders, short calls cost a
        drive more.
        """
        self.deadline = deadline
        self._answer = answer
        self._blocks_per_job = blocks_per_job
        self._lock = threading.RLock()  # guards all below
        # A job wakes one thread: a thread woken in vain takes the interpreter from those that work.
        # With one condition for all 16 threads, waking took a third of the process's time.
        self._work = {way: threading.Condition(self._lock) for way in (Way.READ, Way.WRITE)}
        self._ended = threading.Condition(self._lock)
        self._waiting: dict[Way, deque[Job]] = {Way.READ: deque(), Way.WRITE: deque()}
        self._in_flight: dict[Way, set[Job]] = {Way.READ: set(), Way.WRITE: set()}
        self.num_late = 0
        """Number of blocks whose deadline passed before the drive was asked."""
        self._refusal = ""
        self._write_refusal = ""
        self._is_closed = False

    def submit(self, message: Batch, generation: int) -> None:
        """Queue an order, or answer it at once if none of its jobs may begin."""
        now = time.monotonic()
        order = Order(message, generation, np.zeros(len(message), dtype=bool), now)
        by_place = np.argsort(order.places, kind="stable")
        size = self._blocks_per_job
        jobs = [Job(order, by_place[at : at + size]) for at in range(0, len(by_place), size)]
        order.num_jobs = len(jobs)
        with self._lock:
            if reason := self._skip_reason(order, now):
                order.reasons = dict.fromkeys(range(len(order.ok)), reason)
                self._end_order(order)
                return
            self._waiting[message.way].extend(jobs)
            self._work[message.way].notify(len(jobs))

    def take(self, way: Way) -> Job | None:
        """Wait for the next job that may begin and begin it; None once the queue is closed."""
        with self._lock:
            while True:
                self._work[way].wait_for(lambda: self._may_take(way) or self._is_closed)
                if self._is_closed:
                    return None
                job = self._waiting[way].popleft()
                self._wake_writers()
                now = time.monotonic()
                reason = self._skip_reason(job.order, now)
                if not reason:
                    job.began = now
                    self._in_flight[way].add(job)
                    return job
                self._fail(job, reason)

    def _may_take(self, way: Way) -> bool:
        if not self._waiting[way]:
            return False
        # Reads before writes: requests wait for reads. One write at a time continues beside them.
        return way is Way.READ or not self._waiting[Way.READ] or not self._in_flight[Way.WRITE]

    def _wake_writers(self) -> None:
        """Wake the writers that gave way to reads, if no read is queued any more.

        A write that ends wakes no thread: its own thread takes the next job.
        """
        if not self._waiting[Way.READ] and self._waiting[Way.WRITE]:
            self._work[Way.WRITE].notify(len(self._waiting[Way.WRITE]))

    def end(self, job: Job, reasons: dict[int, str]) -> None:
        with self._lock:
            order = job.order
            self._in_flight[order.message.way].discard(job)
            self._ended.notify_all()
            order.ok[job.positions] = True
            for position, reason in reasons.items():
                order.ok[position] = False
                order.reasons[position] = reason
            self._count_down(order)

    def sweep(self) -> str:
        """End jobs that can no longer begin; return why the drive hangs, if a job is overdue."""
        now = time.monotonic()
        with self._lock:
            for jobs in self._waiting.values():
                for job in [job for job in jobs if job.order.skip_reason(now)]:
                    jobs.remove(job)
                    self._fail(job, _NOT_BEGUN)
            self._wake_writers()
            began = [job.began for jobs in self._in_flight.values() for job in jobs]
        is_hung = bool(began) and now - min(began) > self.deadline
        return f"no answer for {self.deadline:g} s" if is_hung else ""

    def shut(self, reason: str) -> None:
        """Fail all queued jobs, and every later order."""
        with self._lock:
            self._refusal = self._refusal or reason
            for way in self._waiting:
                self._fail_waiting(way, reason)

    def refuse_writes(self, reason: str) -> None:
        """Fail all queued writes and every later one, until called with an empty reason."""
        with self._lock:
            self._write_refusal = reason
            if reason:
                self._fail_waiting(Way.WRITE, reason)

    def close(self, timeout: float, reason: str) -> None:
        """Fail queued jobs, wait at most ``timeout`` seconds for the others, end the threads."""
        with self._lock:
            self.shut(reason)
            self._ended.wait_for(lambda: not any(self._in_flight.values()), timeout)
            self._is_closed = True
            for work in self._work.values():
                work.notify_all()

    def _skip_reason(self, order: Order, now: float) -> str:
        refusal = self._refusal or (self._write_refusal if order.message.way is Way.WRITE else "")
        return order.skip_reason(now) or refusal

    def _fail_waiting(self, way: Way, reason: str) -> None:
        while self._waiting[way]:
            self._fail(self._waiting[way].popleft(), reason)

    def _fail(self, job: Job, reason: str) -> None:
        for position in job.positions.tolist():
            job.order.reasons[position] = reason
        self._count_down(job.order)

    def _count_down(self, order: Order) -> None:
        order.num_jobs -= 1
        if not order.num_jobs:
            self._end_order(order)

    def _end_order(self, order: Order) -> None:
        self.num_late += sum(why == _NOT_BEGUN for why in order.reasons.values())
        num_bytes = int(order.ok.sum()) * order.block_bytes
        seconds = time.monotonic() - order.began
        self._answer(Result(order.message.id, order.ok, order.reasons, num_bytes, seconds))


class DriveHealth:
    """Decides when the drive takes no writes, and when the process must end.

    Any thread may use it. A faulty drive's process ends. The engine starts the next one after a
    while, which finds out whether the drive works again.
    """

    def __init__(
        self, queue: IoQueue, file: BlockFile, tell: Callable[[str], None], setup: DriveSetup
    ) -> None:
        """``tell`` sends the engine the reason why the drive cannot be used."""
        self._queue = queue
        self._file = file
        self._tell = tell
        self._path = setup.path
        self._keep_free = setup.bound.keep_free
        self._errors_in_a_row = {Way.READ: 0, Way.WRITE: 0}
        self.failure = ""
        """Why the process must end; empty while it need not."""

    def succeeded(self, way: Way) -> None:
        self._errors_in_a_row[way] = 0

    def failed(self, way: Way, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return  # the blocks on a full drive can still be read
        self._errors_in_a_row[way] += 1
        if self._errors_in_a_row[way] >= MAX_ERRORS:
            self.end(f"{MAX_ERRORS} errors in a row, the last: {error}")

    def end(self, reason: str) -> None:
        """Fail all orders and tell the engine that the process must end, and why."""
        if not self.failure:
            self.failure = reason
            self._queue.shut(reason)
            self._tell(reason)  # after the queue: the failed results arrive before this

    def check(self) -> None:
        """Check the drive, in a thread that may hang doing so."""
        try:
            self._file.check()
            found = os.statvfs(self._path)
        except (OSError, TransferError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            self.end(said or str(error))
            return
        # A file without reserved space grows as it is written, and must leave ``keep_free`` alone.
        is_low = not self._file.is_whole and found.f_bavail * found.f_frsize <= self._keep_free
        floor = f"{format_size(self._keep_free)} of the file system stay free"
        self._queue.refuse_writes(floor if is_low else "")
