"""What waits for a drive's threads, and what they have under way: reads first, each with its time.

::

    order ──cut──> jobs: runs of neighbouring places ──> reads  ──> threads ──┐
                                                    └──> writes ──> threads ──┴──> one result

A job that has not begun when its order is cancelled, late, or the drive ails, fails without a
thread. One that is under way longer than the deadline is given up: the drive ails until it returns,
and what it then brings is not delivered.
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
from kvferry.hostmem.mapping import PrivateMemory
from kvferry.tiers.contract import Way
from kvferry.tiers.disk.blocks import SECTOR, BlockFile
from kvferry.tiers.disk.figures import Flags
from kvferry.tiers.ipc.messages import Numbers, OrderMessage, ResultMessage


@dataclass(eq=False)
class Order:
    """An order on its way; its result is sent once no job of it is left."""

    message: OrderMessage
    ok: Flags
    began: float
    left: int = 0
    delivering: int = 0
    """Threads that write into the engine's memory for it just now."""
    is_cancelled: bool = False
    is_over: bool = False
    """The result was sent: the engine's memory is not ours any more."""
    reasons: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.message.sizes
        self.block_bytes = int(sizes.sum())
        self.offsets: Numbers = sizes.cumsum() - sizes
        """Where the pieces of a block begin, from its first byte."""

    def stopped(self, now: float) -> str:
        """Why no further job of it should begin; empty while they should."""
        if self.is_cancelled:
            return "cancelled"
        return "not begun in time" if now >= self.message.deadline else ""


@dataclass(eq=False)
class Job:
    """Some blocks of an order, for one thread: their positions in it, in the order of places."""

    order: Order
    positions: Numbers
    began: float = 0.0


class Lanes:
    """Owns the queues and the orders. Any thread may use it."""

    def __init__(
        self,
        answer: Callable[[ResultMessage], None],
        *,
        most_blocks: int,
        deadline: float,
    ) -> None:
        """Jobs of up to ``most_blocks``, each with ``deadline`` seconds.

        Not fewer to give every thread one: beside other orders short calls cost a drive more.
        """
        self._answer = answer
        self._most_blocks = most_blocks
        self._deadline = deadline
        self._lock = threading.RLock()  # guards all below
        # A job wakes one thread of its way: whoever is woken in vain takes the interpreter from
        # those who work. With one condition for all 16, waking took a third of the process's time.
        self._work = {way: threading.Condition(self._lock) for way in (Way.READ, Way.WRITE)}
        self._ended = threading.Condition(self._lock)
        self._waiting: dict[Way, deque[Job]] = {Way.READ: deque(), Way.WRITE: deque()}
        self._under_way: dict[Way, set[Job]] = {Way.READ: set(), Way.WRITE: set()}
        self._orders: dict[int, Order] = {}
        self._ailment = ""
        self._refuses_writes = ""
        self._is_closed = False

    def submit(self, message: OrderMessage) -> None:
        now = time.monotonic()
        order = Order(message, np.zeros(len(message.places), dtype=bool), now)
        with self._lock:
            self._orders[message.id] = order
            jobs = self._cut(order)
            order.left = len(jobs)
            reason = order.stopped(now) or self._reason(message.way)
            if reason:
                self._end(order, reason)
                return
            self._waiting[message.way].extend(jobs)
            self._work[message.way].notify(len(jobs))

    def _cut(self, order: Order) -> list[Job]:
        by_place = np.argsort(order.message.places, kind="stable")
        size = self._most_blocks
        return [Job(order, by_place[at : at + size]) for at in range(0, len(by_place), size)]

    def cancel(self, order_id: int) -> None:
        with self._lock:
            order = self._orders.get(order_id)
            if order is not None:
                order.is_cancelled = True
        self.sweep()

    def take(self, way: Way) -> Job | None:
        """The next job that nobody has given up, under way from now on; None: there is no more."""
        with self._lock:
            while True:
                self._work[way].wait_for(lambda: self._may_take(way) or self._is_closed)
                if self._is_closed:
                    return None
                job = self._waiting[way].popleft()
                self._wake_writers()
                now = time.monotonic()
                reason = job.order.stopped(now) or self._reason(way)
                if reason:
                    self._fail(job, reason)
                    continue
                job.began = now
                self._under_way[way].add(job)
                return job

    def _may_take(self, way: Way) -> bool:
        if not self._waiting[way]:
            return False
        # Reads before writes: somebody waits for those. One write at a time goes on beside them.
        return way is Way.READ or not self._waiting[Way.READ] or not self._under_way[Way.WRITE]

    def _wake_writers(self) -> None:
        """Reads were taken from the queue: those who stood back for them may go on.

        A write that ends wakes nobody: its own thread looks for the next.
        """
        if not self._waiting[Way.READ] and self._waiting[Way.WRITE]:
            self._work[Way.WRITE].notify(len(self._waiting[Way.WRITE]))

    def begin_delivery(self, job: Job) -> bool:
        """Whether the engine's memory is still ours to write; then :meth:`end_delivery` must come.

        Between the two, the order's result is not sent.
        """
        with self._lock:
            if job.order.is_over:
                return False
            job.order.delivering += 1
            return True

    def end_delivery(self, job: Job) -> None:
        with self._lock:
            job.order.delivering -= 1

    def end(self, job: Job, reasons: dict[int, str]) -> bool:
        """A job is done but for the positions in ``reasons``; False if it had been given up."""
        with self._lock:
            order = job.order
            self._under_way[order.message.way].discard(job)
            self._ended.notify_all()
            if order.is_over:
                return False
            order.ok[job.positions] = True
            for position, reason in reasons.items():
                order.ok[position] = False
                order.reasons[position] = reason
            self._count_down(order)
            return True

    def sweep(self) -> str:
        """End what never will begin or took too long; returns why the drive hangs, if it does."""
        now = time.monotonic()
        with self._lock:
            for way, jobs in self._waiting.items():
                stopped = [job for job in jobs if job.order.is_over or job.order.stopped(now)]
                for job in stopped:
                    jobs.remove(job)
                    if not job.order.is_over:
                        self._fail(job, job.order.stopped(now))
                if self._reason(way):
                    self._fail_waiting(way)
            self._wake_writers()
            hung = [
                job
                for jobs in self._under_way.values()
                for job in jobs
                if now - job.began > self._deadline
            ]
            reason = f"no answer for {self._deadline:g} s" if hung else ""
            for job in hung:
                if not job.order.is_over and not job.order.delivering:
                    self._end(job.order, reason)
        return reason

    def ail(self, reason: str) -> None:
        """Fail everything that waits, and all that comes, until told that it is well again."""
        with self._lock:
            self._ailment = reason
            for way in self._waiting:
                if self._reason(way):
                    self._fail_waiting(way)

    def refuse_writes(self, reason: str) -> None:
        """As :meth:`ail`, for writes alone."""
        with self._lock:
            self._refuses_writes = reason
            if reason:
                self._fail_waiting(Way.WRITE)

    @property
    def num_orders(self) -> int:
        with self._lock:
            return len(self._orders)

    def close(self, timeout: float, reason: str) -> bool:
        """Fail what waits, end the threads; whether nothing is under way any more.

        From here on nothing is delivered: whoever ended us has the memory back.
        """
        with self._lock:
            self._ailment = reason
            for way in self._waiting:
                self._fail_waiting(way)
            done = self._ended.wait_for(lambda: not any(self._under_way.values()), timeout)
            for order in list(self._orders.values()):
                if not order.delivering:
                    self._end(order, reason)
            self._is_closed = True
            for work in self._work.values():
                work.notify_all()
            return done

    def _reason(self, way: Way) -> str:
        return self._ailment or (self._refuses_writes if way is Way.WRITE else "")

    def _fail_waiting(self, way: Way) -> None:
        jobs = self._waiting[way]
        while jobs:
            self._fail(jobs.popleft(), self._reason(way))

    def _fail(self, job: Job, reason: str) -> None:
        if not job.order.is_over:
            for position in job.positions.tolist():
                job.order.reasons[position] = reason
            self._count_down(job.order)

    def _count_down(self, order: Order) -> None:
        order.left -= 1
        if not order.left:
            self._end(order, "")

    def _end(self, order: Order, reason: str) -> None:
        """Send the result; ``reason`` is for whatever has not ended by itself."""
        for position in np.flatnonzero(~order.ok).tolist():
            order.reasons.setdefault(position, reason)
        order.is_over = True
        del self._orders[order.message.id]
        moved = int(order.ok.sum()) * order.block_bytes
        seconds = time.monotonic() - order.began
        message = order.message
        self._answer(ResultMessage(message.id, order.ok, order.reasons, moved, seconds))


# ------------------------------------------------------------------------------------------------
# Whether a drive can be used: what ails it, by cause, and when it is well again.
#
# A block that fails is a failed block. Many in a row, a drive that does not answer, a file that is
# not there: the drive ails, its orders fail at once, and it is asked now and then. No room to write
# ails nobody: what is there can still be read.

MANY_ERRORS = 16
"""So many calls to the drive in a row must fail before we stop asking it."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_REST = 60.0


class DriveHealth:
    """Collects what is wrong and tells the lanes, and the engine by ``tell``. Any thread may."""

    def __init__(
        self,
        lanes: Lanes,
        file: BlockFile,
        tell: Callable[[str], None],
        *,
        path: str,
        keep_free: int,
        check_seconds: float,
    ) -> None:
        self._lanes = lanes
        self._file = file
        self._tell = tell
        self._path = path
        self._keep_free = keep_free
        self._check_seconds = check_seconds
        self._lock = threading.Lock()  # guards all below
        self._ailments: dict[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._in_a_row = {Way.READ: 0, Way.WRITE: 0}
        self._rest = check_seconds
        self._ask_at = 0.0
        self._num_failed = 0
        self.is_lost = False
        """The file has not been there for long: whoever serves it should begin anew."""
        self._page = PrivateMemory(SECTOR).bytes.data

    def worked(self, way: Way) -> None:
        if self._in_a_row[way]:
            with self._lock:
                self._in_a_row[way] = 0

    def failed(self, way: Way, error: Exception) -> None:
        """One call for one block failed."""
        is_full = isinstance(error, OSError) and error.errno in _NO_SPACE and way is Way.WRITE
        with self._lock:
            self._in_a_row[way] += 1
            if self._in_a_row[way] < MANY_ERRORS:
                return
            self._in_a_row[way] = 0
            self._ask_at = time.monotonic() + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        if is_full:
            self.refuse_writes("space", f"no room to write: {error}")
        else:
            self.ail("errors", f"{MANY_ERRORS} errors in a row, the last: {error}")

    def ail(self, cause: str, reason: str) -> None:
        """It cannot be used for this reason; an empty one: not any more for this cause."""
        with self._lock:
            if not self._set(self._ailments, cause, reason):
                return
            now = next(iter(self._ailments.values()), "")
            self._lanes.ail(now)
            self._tell(now)  # after the lanes: whoever hears of it finds the failed results first

    def refuse_writes(self, cause: str, reason: str) -> None:
        """Nothing can be written for this reason; an empty one: not any more for this cause."""
        with self._lock:
            if self._set(self._refusals, cause, reason):
                self._lanes.refuse_writes(next(iter(self._refusals.values()), ""))

    def check(self) -> None:
        """Look at the drive, as a thread that may hang does every second."""
        try:
            self._file.check()
            self._check_space()
            if "errors" in self._ailments and time.monotonic() >= self._ask_at:
                self._file.read(0, self._page)
                with self._lock:
                    self._in_a_row = {Way.READ: 0, Way.WRITE: 0}
                self.ail("errors", "")
        except (OSError, TransferError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            self.ail("check", said or str(error))
            self._num_failed += 1
            self.is_lost = self._num_failed > MANY_ERRORS
        else:
            self.ail("check", "")
            self._num_failed = 0
            if time.monotonic() > self._ask_at + _LONGEST_REST:
                self._rest = self._check_seconds

    def _check_space(self) -> None:
        """A file that grows as it is written must leave the floor alone, and others some room."""
        found = os.statvfs(self._path)
        free = found.f_bavail * found.f_frsize
        is_due = time.monotonic() >= self._ask_at
        if "space" in self._refusals and is_due and free > self._keep_free:
            self.refuse_writes("space", "")
        if self._file.is_whole:
            return
        is_short = free <= self._keep_free
        self.refuse_writes(
            "floor", f"{format_size(self._keep_free)} of the file system stay free" * is_short
        )

    def _set(self, reasons: dict[str, str], cause: str, reason: str) -> bool:
        """Note it; whether the first reason is another now."""
        before = next(iter(reasons.values()), "")
        if reason:
            reasons.setdefault(cause, reason)
        else:
            reasons.pop(cause, None)
        return before != next(iter(reasons.values()), "")
