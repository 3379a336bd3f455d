"""Base classes of tiers that queue batches, with their deadlines and results.

::

    submit ──> queue of reads and lookups ──┐
          └──> queue of writes ─────────────┴──> _start(...) ... _end(...) ──> poll

Threads carry out the batches of a :class:`ThreadedTier`, a child process those of a remote tier.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from typing import cast

from kvferry.errors import ClosedError, InputError, words_of
from kvferry.tiers.contract import (
    CLOSE_SECONDS,
    Batch,
    BatchId,
    Result,
    Tier,
    Way,
    check_batch,
    check_size,
)
from kvferry.types import TierName

_FOREVER = float("inf")


@dataclass(eq=False)
class Task:
    """One batch in flight. ``generation`` is the tier's when the batch was submitted."""

    batch: Batch
    generation: int
    is_begun: bool = False
    is_over: bool = False

    @property
    def is_read(self) -> bool:
        """Whether it is a read or a lookup: both share a queue."""
        return self.batch.way is not Way.WRITE

    @property
    def stopped(self) -> str:
        """Why no further block of the batch may begin; empty while one may."""
        return "not begun in time" if time.monotonic() >= self.batch.deadline else ""


class QueuedTier(ABC):
    """Owns the batches in flight, their queues and their results.

    ``_changed`` guards them all; the thread that holds it may enter it again.
    """

    num_places: int | None = None

    def __init__(self, name: TierName, block_bytes: int) -> None:
        check_size(name, 1 if self.num_places is None else self.num_places, block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self._changed = threading.Condition()  # guards all below
        self._queues: dict[bool, deque[Task]] = {True: deque(), False: deque()}  # by is_read
        self._tasks: dict[BatchId, Task] = {}
        self._results: list[Result] = []
        self._generation = 0
        self._earliest = _FOREVER
        self._abandoned: tuple[BatchId, ...] = ()
        self._is_closing = False
        self._is_closed = False

    @property
    @abstractmethod
    def ailment(self) -> str:
        """As :attr:`kvferry.tiers.contract.Tier.ailment`."""

    def _skip_reason(self, task: Task) -> str:
        """Return why the tier cannot carry out this batch now; empty while it can."""
        return self.ailment

    @abstractmethod
    def _start(self, *, is_read: bool) -> None:
        """Begin queued reads or writes while there is capacity; ``_changed`` is held."""

    def submit(self, batch: Batch) -> None:
        check_batch(cast(Tier, self), batch)
        with self._changed:
            if self._is_closing:
                raise ClosedError(f"tier {self.name} is closed")
            if batch.id in self._tasks:
                raise InputError(f"tier {self.name}: batch {batch.id} is under way already")
            task = self._tasks[batch.id] = Task(batch, self._generation)
            if reason := self._skip_reason(task):
                self._end(task, Result.all_failed(batch, reason))
                return
            self._queues[task.is_read].append(task)
            self._earliest = min(self._earliest, batch.deadline)
            self._start(is_read=task.is_read)

    def poll(self) -> list[Result]:
        with self._changed:
            if self.ailment or time.monotonic() >= self._earliest:
                self._sweep()
            results, self._results = self._results, []
        return results

    def _next(self, *, is_read: bool) -> Task | None:
        """Take and begin the next batch that may begin; return None if there is none."""
        queue = self._queues[is_read]
        while queue:
            task = queue.popleft()
            if task.is_over or self._end_stopped(task):
                continue
            task.is_begun = True
            return task
        return None

    def _sweep(self) -> None:
        """End batches that have not begun and can no longer begin."""
        self._earliest = _FOREVER
        for task in list(self._tasks.values()):
            if not task.is_begun and not self._end_stopped(task):
                self._earliest = min(self._earliest, task.batch.deadline)

    def _end_stopped(self, task: Task) -> bool:
        if reason := task.stopped or self._skip_reason(task):
            self._end(task, Result.all_failed(task.batch, reason))
        return bool(reason)

    def _end(self, task: Task, result: Result) -> None:
        task.is_over = True
        del self._tasks[task.batch.id]
        self._results.append(result)
        self._changed.notify_all()


class ThreadedTier(QueuedTier):
    """Carries out batches on a few threads for each direction, started when first needed.

    Reads and writes have separate threads: a write that hangs delays no read, and ``poll`` never
    waits.

    Owns the threads; a subclass moves the bytes in ``_carry_out``. Every exception there becomes a
    failed result, and the thread continues.
    """

    def __init__(self, name: TierName, block_bytes: int, *, num_threads: int = 2) -> None:
        super().__init__(name, block_bytes)
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._ailment = ""

    @abstractmethod
    def _carry_out(self, task: Task) -> Result:
        """Move a batch's blocks, one by one or together; check ``task.stopped`` before each."""

    @property
    def ailment(self) -> str:
        return self._ailment

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
                self._changed.notify_all()  # an interrupt may have lost a thread's wake-up
                self._changed.wait_for(lambda: not self._tasks or not self._has_threads, timeout)
                for task in list(self._tasks.values()):
                    if not task.is_begun:
                        self._end(task, Result.all_failed(task.batch, "the tier was closed"))
                self._abandoned = tuple(self._tasks)
                self._is_closed = True
                self._changed.notify_all()
        # A thread in a hung call cannot be ended; as a daemon it does not keep the process alive.
        for thread in self._threads:
            thread.join(None if not self._abandoned else 0.1)
        return self._abandoned

    @property
    def _has_threads(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _start(self, *, is_read: bool) -> None:
        prefix = f"kvferry-{'from' if is_read else 'to'}-{self.name}"
        if not any(thread.name.startswith(prefix) for thread in self._threads):
            for number in range(self._num_threads):
                thread = threading.Thread(
                    target=self._work, args=(is_read,), name=f"{prefix}-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        self._changed.notify_all()

    def _work(self, is_read: bool) -> None:
        while (task := self._wait_for_task(is_read)) is not None:
            start = time.perf_counter()
            try:
                result = self._carry_out(task)
            except Exception as error:  # a thread that dies leaves its request waiting for ever
                result = Result.all_failed(task.batch, words_of(error))
            with self._changed:
                self._end(task, replace(result, seconds=time.perf_counter() - start))

    def _wait_for_task(self, is_read: bool) -> Task | None:
        """Return the next batch; None once the tier is closed."""
        with self._changed:
            while (task := self._next(is_read=is_read)) is None and not self._is_closed:
                self._changed.wait()
            return task
