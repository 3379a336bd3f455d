"""A base for tiers whose medium blocks its caller: threads wait in the caller's stead.

Reads and writes have threads of their own: a write that hangs holds up no read, and ``poll`` never
waits.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from dataclasses import replace

from kvferry.errors import KvferryError
from kvferry.tiers.contract import CLOSE_SECONDS, BatchId, Result
from kvferry.tiers.queued import QueuedTier, Task
from kvferry.types import TierName


class ThreadedTier(QueuedTier):
    """Carries batches out on a few threads for each direction, started when first needed.

    Owns the threads; a subclass moves the bytes in ``_carry_out``. Every exception there becomes a
    failed result, and the thread goes on.
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

    def _start(self, *, is_read: bool) -> None:
        prefix = f"kvferry-{'from' if is_read else 'to'}-{self.name}"
        if not any(thread.name.startswith(prefix) for thread in self._threads):
            for number in range(self._num_threads):
                thread = threading.Thread(
                    target=self._work, args=(is_read,), name=f"{prefix}-{number}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._changed.notify_all()

    def _work(self, is_read: bool) -> None:
        while (task := self._wait_for_task(is_read)) is not None:
            start = time.perf_counter()
            try:
                result = self._carry_out(task)
            except KvferryError as error:
                result = Result.all_failed(task.batch, str(error))
            except Exception as error:  # a thread that dies leaves its request waiting for ever
                result = Result.all_failed(task.batch, f"{type(error).__name__}: {error}")
            with self._changed:
                self._end(task, replace(result, seconds=time.perf_counter() - start))

    def _wait_for_task(self, is_read: bool) -> Task | None:
        """The next batch; None when there will be no more."""
        with self._changed:
            while (task := self._next(is_read=is_read)) is None and not self._is_closed:
                self._changed.wait()
            return task
