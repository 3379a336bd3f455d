"""What waits for a drive's threads, and what they have under way: reads first, each with its time.

::

    order ──cut──> jobs: runs of neighbouring places ──> reads  ──> threads ──┐
                                                    └──> writes ──> threads ──┴──> one result

A job that has not begun when its order is cancelled, late, or the drive ails, fails without a
thread. One that is under way longer than the deadline is given up: the drive ails until it returns,
and what it then brings is not delivered.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.tiers.base import Way
from kvferry.tiers.disk.messages import Numbers, OrderMessage, ResultMessage
from kvferry.tiers.disk.status import Flags


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
