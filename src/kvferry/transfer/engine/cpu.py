"""The copy engine for KV tensors in ordinary memory: threads copy with numpy."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from kvferry.core.lifecycle import Process
from kvferry.errors import ClosedError
from kvferry.transfer.job import CopyJob, Direction, JobFactory
from kvferry.transfer.layout import GroupLayout
from kvferry.types import DEVICE, FIRST_RANK, Outcome, Rank, Receipt, Transfer, TransferId

Rows = npt.NDArray[np.uint8]
"""Blocks as rows of bytes, one row per slot."""


class Event:
    """A point in a stream's work, reached when all work queued before it is done.

    Uses bare locks: an interrupt inside ``threading.Event`` can leave its lock held, and then the
    stream hangs.
    """

    __slots__ = ("_waiting", "is_reached")

    def __init__(self) -> None:
        self.is_reached = False
        self._waiting: list[threading.Lock] = []

    def synchronize(self, timeout: float | None = None) -> bool:
        """Block the caller until the point is reached; False if ``timeout`` passed first."""
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)  # before reading is_reached, which the stream sets first
        return self.is_reached or mine.acquire(timeout=-1 if timeout is None else timeout)

    def _set(self) -> None:
        if not self.is_reached:
            self.is_reached = True
            for lock in self._waiting:
                lock.release()


class Stream:
    """A thread that does queued work in order, like a CUDA stream.

    Work on two streams runs in any order unless an event orders it. The next :meth:`synchronize`
    raises the first exception of the work.
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
        if self._process.is_forked_child:
            self._process.require()
        self._queue.put(work)

    def record(self) -> Event:
        """Return an event that is reached when all work queued so far is done."""
        event = Event()
        self.run(event._set)
        return event

    def wait(self, event: Event) -> None:
        """Make all work queued after this wait until ``event`` is reached."""
        self.run(event.synchronize)

    def synchronize(self) -> None:
        """Block until all queued work is done; raises the first fault of that work."""
        self.record().synchronize()
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def close(self) -> None:
        """Finish the queued work and end the thread. Safe to call twice."""
        self._closed = True
        self._queue.put(None)  # at every call, as an interrupt may have prevented the first one
        self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as fault:  # the thread must continue, or all waiting threads hang
                self._fault = self._fault or fault


class CpuEngine:
    """A copy engine over KV tensors in ordinary memory.

    Owns one stream per direction; leaves the tensors, the host slots and the compute stream to
    their owners; all must outlive the engine. Without a compute stream the caller computes in its
    own thread, so all it wrote before ``submit`` is complete.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        host: Rows,
        *,
        compute: Stream | None = None,
        rank: Rank = FIRST_RANK,
    ) -> None:
        self._jobs = JobFactory(layouts, host_base=0, host_pitch=host.shape[1], num_slots=len(host))
        self._views: dict[GroupLayout, list[tuple[Rows, int]]] = {}
        self._host = host
        self._compute = compute
        self._rank = rank
        self._loads = Stream("load")
        self._stores = Stream("store")
        self._marks: dict[TransferId, list[Event]] = {}  # one event per part of a load in parts
        self._done: list[Receipt] = []
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()  # one item per receipt
        self._closed = False

    def submit(self, transfer: Transfer) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
        stream = self._loads if transfer.dst == DEVICE else self._stores
        if self._compute is not None:
            # A store must not read before the compute that writes its source, and a load must not
            # write while compute queued earlier still reads its destination.
            stream.wait(self._compute.record())
        if transfer.in_parts:
            # Check everything here: num_landed promises that a load in parts does not fail.
            try:
                parts = list(self._jobs.of(transfer).parts())
            except Exception as error:
                self._end(transfer, error=error)
                return
            self._marks[transfer.id] = [Event() for _ in parts]
        stream.run(partial(self._copy, transfer))

    def wait_for_end(self, seconds: float) -> None:
        if not self._done:
            with suppress(queue.Empty):
                self._signals.get(timeout=seconds)

    def poll(self) -> list[Receipt]:
        with suppress(queue.Empty):
            while True:
                self._signals.get_nowait()
        receipts = self._done[:]
        for receipt in receipts:
            self._marks.pop(receipt.transfer_id, None)
        # Last, in one step: after an interrupt before it the next call returns the receipts.
        count = len(receipts)
        del self._done[:count]
        return receipts

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        if not self._closed:
            end = None if timeout is None else time.monotonic() + timeout
            for event in (self._loads.record(), self._stores.record()):
                event.synchronize(None if end is None else max(0.0, end - time.monotonic()))
        return self.poll()

    def order_compute_after_loads(self) -> None:
        if self._compute is not None:
            self._compute.wait(self._loads.record())

    def num_landed(self, transfer_id: TransferId) -> int | None:
        marks = self._marks.get(transfer_id)
        return None if marks is None else sum(mark.is_reached for mark in marks)

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        for transfer_id in transfer_ids:
            marks = self._marks.get(transfer_id)
            if marks:
                mark = marks[min(number, len(marks) - 1)]
                # Without a compute stream the caller's thread computes, so it must wait.
                self._compute.wait(mark) if self._compute is not None else mark.synchronize()

    def close(self) -> None:
        self._closed = True
        self._loads.close()
        self._stores.close()

    def _copy(self, transfer: Transfer) -> None:
        start = time.perf_counter()
        marks = self._marks.get(transfer.id, ())
        try:
            for number, part in enumerate(self._jobs.of(transfer).parts()):
                self._move(part)
                if marks:
                    marks[number]._set()
        except Exception as error:  # without a receipt the request would wait for ever
            for mark in marks:
                mark._set()  # or compute would hang
            self._end(transfer, error=error)
        else:
            self._end(transfer, seconds=time.perf_counter() - start)

    def _move(self, job: CopyJob) -> None:
        views = self._views.get(job.layout)
        if views is None:
            views = self._views[job.layout] = list(_block_views(job.layout))
        host, blocks, slots, start = self._host, job.device_blocks, job.host_slots, job.host_base
        for view, offset in views:
            place = slice(start + offset, start + offset + view.shape[1])
            if job.direction is Direction.STORE:
                host[slots, place] = view[blocks]
            else:
                view[blocks] = host[slots, place]

    def _end(
        self, transfer: Transfer, *, seconds: float = 0.0, error: Exception | None = None
    ) -> None:
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
            receipt = Receipt(transfer.id, self._rank, Outcome.FAILED, reason)
        else:
            num_bytes = len(transfer) * self._jobs.layouts[transfer.group].block_bytes
            receipt = Receipt(transfer.id, self._rank, Outcome.OK, "", num_bytes, seconds, "cpu")
        self._done.append(receipt)
        self._signals.put(None)


def _block_views(layout: GroupLayout) -> Iterator[tuple[Rows, int]]:
    """Yield each segment as an array (blocks, bytes) over the tensor's memory, and its offset."""
    tables = (layout.bases, layout.strides, layout.sizes, layout.offsets)
    for base, stride, size, offset in zip(*(t.tolist() for t in tables), strict=True):
        span = (layout.num_blocks - 1) * stride + size
        run = np.frombuffer((ctypes.c_uint8 * span).from_address(base), dtype=np.uint8)
        shape = (layout.num_blocks, size)
        yield np.lib.stride_tricks.as_strided(run, shape=shape, strides=(stride, 1)), offset
