"""A base for tiers that queue batches: deadlines, cancellation and results.

::

    submit ──> queue of reads (lookups among them) ──┐
          └──> queue of writes ──────────────────────┴──> _start(...) ... _end(...) ──> poll

What begins a batch, a thread or a child process, is left to the subclass.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import cast

from kvferry.errors import ClosedError, InputError
from kvferry.tiers.contract import Batch, BatchId, Result, Tier, Way, check_batch, check_size
from kvferry.types import TierName

_FOREVER = float("inf")


@dataclass(eq=False)
class Task:
    """One batch in flight. ``generation`` is the tier's when the batch was submitted."""

    batch: Batch
    generation: int
    is_begun: bool = False
    is_cancelled: bool = False
    is_over: bool = False

    @property
    def is_read(self) -> bool:
        """Whether it is no write: lookups go with the reads."""
        return self.batch.way is not Way.WRITE

    @property
    def stopped(self) -> str:
        """Why no further block of it should begin; empty while they should."""
        if self.is_cancelled:
            return "cancelled"
        return "not begun in time" if time.monotonic() >= self.batch.deadline else ""


class QueuedTier(ABC):
    """Owns the batches in flight, their queues and their results.

    ``_changed`` guards them all; it may be entered again by the thread that holds it.
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

    @abstractmethod
    def _start(self, *, is_read: bool) -> None:
        """Begin queued batches of one way, as far as there is room; ``_changed`` is held."""

    def attach_memory(self, address: int, num_bytes: int) -> None:  # noqa: B027
        """The whole memory of the process can be reached: nothing to register."""

    def submit(self, batch: Batch) -> None:
        check_batch(cast(Tier, self), batch)
        with self._changed:
            if self._is_closing:
                raise ClosedError(f"tier {self.name} is closed")
            if batch.id in self._tasks:
                raise InputError(f"tier {self.name}: batch {batch.id} is under way already")
            task = self._tasks[batch.id] = Task(batch, self._generation)
            if self.ailment:
                self._end(task, Result.all_failed(batch, self.ailment))
                return
            self._queues[task.is_read].append(task)
            self._earliest = min(self._earliest, batch.deadline)
            self._start(is_read=task.is_read)

    def cancel(self, batch_id: BatchId) -> None:
        with self._changed:
            task = self._tasks.get(batch_id)
            if task is not None:
                task.is_cancelled = True
                self._sweep()

    def poll(self) -> list[Result]:
        with self._changed:
            if self.ailment or time.monotonic() >= self._earliest:
                self._sweep()
            results, self._results = self._results, []
        return results

    def _next(self, *, is_read: bool) -> Task | None:
        """Begin the next batch that is still wanted; None where there is none."""
        queue = self._queues[is_read]
        while queue:
            task = queue.popleft()
            if task.is_over or self._end_stopped(task):
                continue
            task.is_begun = True
            return task
        return None

    def _sweep(self) -> None:
        """End batches that have not begun and never will."""
        self._earliest = _FOREVER
        for task in list(self._tasks.values()):
            if not task.is_begun and not self._end_stopped(task):
                self._earliest = min(self._earliest, task.batch.deadline)

    def _end_stopped(self, task: Task) -> bool:
        reason = task.stopped or self.ailment
        if reason:
            self._end(task, Result.all_failed(task.batch, reason))
        return bool(reason)

    def _end(self, task: Task, result: Result) -> None:
        task.is_over = True
        del self._tasks[task.batch.id]
        self._results.append(result)
        self._changed.notify_all()
