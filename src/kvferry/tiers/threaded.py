"""A base for tiers whose medium blocks its caller: threads wait in the caller's stead.

::

    submit ──> reads (finds among them) ──> threads of their own ──┐
          └──> writes ─────────────────────> threads of their own ──┴──> results ──> poll

A write that hangs holds up no read, and ``poll`` never waits.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace

from kvferry.errors import ClosedError, InputError, KvferryError
from kvferry.tiers.contract import (
    CLOSE_SECONDS,
    Batch,
    BatchId,
    Result,
    Way,
    check_batch,
    check_size,
)
from kvferry.types import TierName

_FOREVER = float("inf")


@dataclass(eq=False)
class Task:
    """One batch in flight. ``generation`` counts how often the tier had forgotten everything."""

    batch: Batch
    generation: int
    is_begun: bool = False
    is_cancelled: bool = False
    is_over: bool = False

    @property
    def stopped(self) -> str:
        """Why no further block of it should begin; empty while they should."""
        if self.is_cancelled:
            return "cancelled"
        if time.monotonic() >= self.batch.deadline:
            return "not begun in time"
        return ""


class ThreadedTier(ABC):
    """Carries batches out on a few threads for each direction, started when first needed.

    Owns the threads, the queues and the results; a subclass moves the bytes in ``_carry_out``.
    Every exception there becomes a failed result, and the thread goes on.
    """

    num_places: int | None = None

    def __init__(self, name: TierName, block_bytes: int, *, num_threads: int = 2) -> None:
        check_size(name, 1 if self.num_places is None else self.num_places, block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self._num_threads = num_threads
        self._changed = threading.Condition()  # guards all below
        self._lanes: dict[bool, deque[Task]] = {True: deque(), False: deque()}
        self._threads: list[threading.Thread] = []
        self._tasks: dict[BatchId, Task] = {}
        self._results: list[Result] = []
        self._generation = 0
        self._earliest = _FOREVER
        self._ailment = ""
        self._abandoned: tuple[BatchId, ...] = ()
        self._is_closing = False
        self._is_closed = False

    @abstractmethod
    def _carry_out(self, task: Task) -> Result:
        """Move a batch's blocks, one by one or together; look at ``task.stopped`` before each."""

    @property
    def ailment(self) -> str:
        return self._ailment

    def attach_memory(self, address: int, num_bytes: int) -> None:  # noqa: B027
        """Threads reach all of the process's memory: nothing to register."""

    def submit(self, batch: Batch) -> None:
        check_batch(self, batch)
        with self._changed:
            if self._is_closing:
                raise ClosedError(f"tier {self.name} is closed")
            if batch.id in self._tasks:
                raise InputError(f"tier {self.name}: batch {batch.id} is under way already")
            task = self._tasks[batch.id] = Task(batch, self._generation)
            if self._ailment:
                self._end(task, Result.all_failed(batch, self._ailment))
                return
            reads = batch.way is not Way.WRITE
            self._lanes[reads].append(task)
            self._earliest = min(self._earliest, batch.deadline)
            self._start_threads(reads)
            self._changed.notify_all()

    def cancel(self, batch_id: BatchId) -> None:
        with self._changed:
            task = self._tasks.get(batch_id)
            if task is not None:
                task.is_cancelled = True
                self._sweep()

    def poll(self) -> list[Result]:
        with self._changed:
            if self._ailment or time.monotonic() >= self._earliest:
                self._sweep()
            results, self._results = self._results, []
        return results

    def drain(self, timeout: float | None = None) -> list[Result]:
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks, timeout)
        return self.poll()

    def forget(self) -> None:
        with self._changed:
            self._generation += 1

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[BatchId, ...]:
        with self._changed:
            if not self._is_closed:
                self._is_closing = True
                self._changed.wait_for(lambda: not self._tasks, timeout)
                for task in list(self._tasks.values()):
                    if not task.is_begun:
                        self._end(task, Result.all_failed(task.batch, "the tier was closed"))
                self._abandoned = tuple(self._tasks)
                self._is_closed = True
                self._changed.notify_all()
        # A thread in a hung call cannot be ended; as a daemon it does not keep the process.
        for thread in self._threads:
            thread.join(None if not self._abandoned else 0.1)
        return self._abandoned

    def _start_threads(self, reads: bool) -> None:
        lane = f"kvferry-{'from' if reads else 'to'}-{self.name}"
        if not any(thread.name.startswith(lane) for thread in self._threads):
            for number in range(self._num_threads):
                thread = threading.Thread(
                    target=self._work, args=(reads,), name=f"{lane}-{number}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _work(self, reads: bool) -> None:
        while (task := self._next(self._lanes[reads])) is not None:
            start = time.perf_counter()
            try:
                result = self._carry_out(task)
            except KvferryError as error:
                result = Result.all_failed(task.batch, str(error))
            except Exception as error:  # a thread that dies leaves its request waiting for ever
                result = Result.all_failed(task.batch, f"{type(error).__name__}: {error}")
            with self._changed:
                self._end(task, replace(result, seconds=time.perf_counter() - start))

    def _next(self, lane: deque[Task]) -> Task | None:
        """The next task that was not given up; None when there will be no more."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: lane or self._is_closed)
                if not lane:
                    return None
                task = lane.popleft()
                reason = task.stopped or self._ailment
                if reason and not task.is_over:
                    self._end(task, Result.all_failed(task.batch, reason))
                if not task.is_over:
                    task.is_begun = True
                    return task

    def _sweep(self) -> None:
        """End tasks that have not begun and never will: that needs no free thread."""
        self._earliest = _FOREVER
        for task in list(self._tasks.values()):
            if not task.is_begun:
                reason = task.stopped or self._ailment
                if reason:
                    self._end(task, Result.all_failed(task.batch, reason))
                else:
                    self._earliest = min(self._earliest, task.batch.deadline)

    def _end(self, task: Task, result: Result) -> None:
        task.is_over = True
        del self._tasks[task.batch.id]
        self._results.append(result)
        self._changed.notify_all()
