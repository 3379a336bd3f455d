"""The copy engine for a GPU: orders copies and compute by events, and reports receipts.

::

    compute  ──[writes blocks]──●─────────────────────────●──[reads loaded blocks]──
                                │ ready                   ▲ order_compute_after_loads
    store                       └─▶[copy to host]──end    │
    load                        └─▶[copy to device]──end──┘

Compute waits for the event at a load's end, which is recorded after the whole load is queued. So
the path for loads must be one that queues a whole load at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from kvferry.core.lifecycle import Closing, PunctualSleep, pause
from kvferry.errors import ClosedError, DeadlineError, DriverError
from kvferry.transfer.driver import Driver, EventPool, Handles, Priority
from kvferry.transfer.engine.copy_queue import CopyQueue, PendingCopy
from kvferry.transfer.job import Direction, JobFactory
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.contract import Path
from kvferry.types import FIRST_RANK, Rank, Receipt, Transfer, TransferId

log = logging.getLogger(__name__)

_QUEUEING_SECONDS = 5e-5
"""Seconds that a waiting caller sleeps, so that the thread that queues gets the interpreter."""


class GpuEngine(Closing):
    """Copies blocks between paged device memory and pinned host slots.

    Owns its streams, its events and the given paths. Leaves the driver, the KV tensors, the host
    memory (slow unless registered with the driver) and the compute stream to their owners; all must
    outlive the engine.

    Call ``submit`` and the methods that order compute from the thread that queues compute: only
    there is "queued so far" well defined. Any thread may call ``poll``.
    """

    close_timeout = 30.0
    """Seconds to wait for copies that the driver holds up, in ``close`` and before compute."""

    def __init__(
        self,
        driver: Driver,
        layouts: Sequence[GroupLayout],
        *,
        host_base: int,
        host_pitch: int,
        num_slots: int,
        compute_stream: Callable[[], int],
        paths: Mapping[Direction, Path],
        rank: Rank = FIRST_RANK,
        host_chunk: int | None = None,
    ) -> None:
        self._jobs = JobFactory(
            layouts,
            host_base=host_base,
            host_pitch=host_pitch,
            num_slots=num_slots,
            host_chunk=host_chunk,
        )
        self._driver = driver
        self._rank = rank
        self._compute_stream = compute_stream
        self._lock = threading.Lock()
        self._ended: list[Receipt] = []
        self._closed = False
        self._order_events = EventPool(driver, timing=False)
        self._timing_events = EventPool(driver, timing=True)
        self._in_parts: dict[TransferId, PendingCopy] = {}
        self._streams = Handles()
        self._queues = self._open_queues(paths)

    def prepare(self) -> None:
        """Create what the first transfers need: kernels, tables, buffers, the ring."""
        try:
            with self._driver.current():
                for job in self._jobs.samples():
                    self._queues[job.direction].path.prepare(job)
        except Exception as error:  # the first transfers will report it, too
            log.warning("the copy engine could not be prepared: %s", error)

    # -- the contract ------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
        copy = PendingCopy(transfer.id)
        try:
            copy.job = job = self._jobs.of(transfer)
            queue = self._queues[job.direction]
            copy.path_name = queue.path.name
            self._mark_ready(copy)
            quick = all(map(queue.path.is_quick, job.parts()))
        except Exception as error:  # nothing was queued, so there is nothing to wait for
            copy.fail(error)
            self._release_ready(copy)
            with self._lock:
                self._ended.append(copy.receipt(self._rank))
            return
        if job.in_parts is not None:
            self._in_parts[transfer.id] = copy
        queue.submit(copy, quick=quick)

    def poll(self) -> list[Receipt]:
        with self._lock:
            receipts, self._ended = self._ended, []
        for queue in self._queues.values():
            for copy in queue.settle():
                self._in_parts.pop(copy.transfer_id, None)
                for mark in copy.marks:
                    self._order_events.give(mark)
                receipts.append(copy.receipt(self._rank))
        return receipts

    def wait_for_end(self, seconds: float) -> None:
        queues = self._queues.values()
        began = time.monotonic()
        waited = 0.0
        try:
            with self._driver.current(), self._driver.allow_during_capture(), PunctualSleep():
                while waited < seconds and not self._ended:
                    if any(queue.has_ended() for queue in queues):
                        return
                    if any(queue.num_unqueued for queue in queues):
                        time.sleep(_QUEUEING_SECONDS)
                    else:
                        pause(waited)
                    waited = time.monotonic() - began
        except DriverError:  # the GPU is lost: poll reports it
            time.sleep(min(seconds, 1e-3))

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        end = None if timeout is None else time.monotonic() + timeout
        receipts = self.poll()
        while self.num_in_flight and (end is None or time.monotonic() < end):
            time.sleep(1e-4)
            receipts.extend(self.poll())
        return receipts

    def order_compute_after_loads(self) -> None:
        """Make compute queued from now on wait for every load submitted so far.

        Queues unqueued loads first. Raises if the driver refuses, as compute would otherwise read
        blocks that have not arrived.
        """
        if self._closed:
            raise ClosedError("the engine is closed")
        loads = self._queues[Direction.LOAD]
        if not loads.num_open:
            return
        with self._driver.current():
            if loads.num_unqueued and not loads.flush(self.close_timeout):
                raise DeadlineError(f"loads were not queued within {self.close_timeout} seconds")
            event = self._order_events.take()
            try:
                self._driver.record_event(event, loads.stream)
                self._driver.stream_wait_event(self._compute_stream(), event)
            finally:
                self._order_events.give(event)

    def num_landed(self, transfer_id: TransferId) -> int | None:
        copy = self._in_parts.get(transfer_id)
        if copy is None or not copy.queued or copy.reason:
            return None
        done = 0
        try:
            with self._driver.current():
                while done < len(copy.marks):
                    if not self._driver.event_is_done(copy.marks[done]):
                        break
                    done += 1
        except DriverError:  # its receipt will report it
            return None
        return done

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        """Make compute wait for a part of loads; call ``num_landed`` first, it must not be None."""
        with self._driver.current():
            compute = self._compute_stream()
            for transfer_id in transfer_ids:
                copy = self._in_parts.get(transfer_id)
                if copy is not None and copy.marks:
                    mark = copy.marks[min(number, len(copy.marks) - 1)]
                    self._driver.stream_wait_event(compute, mark)

    def close(self) -> None:
        """Drain, then release streams, events and paths; ``poll`` still returns the receipts."""
        if self._closed:
            return
        self._closed = True
        receipts = self.drain(self.close_timeout)
        for queue in self._queues.values():
            for copy in queue.close(self.close_timeout):
                copy.fail(DeadlineError("still in flight when the engine was closed"))
                self._release_ready(copy)
                receipts.append(copy.receipt(self._rank))
        with self._lock:
            self._ended.extend(receipts)
        self._give_back()

    @property
    def num_in_flight(self) -> int:
        """Number of transfers submitted whose receipt ``poll`` has not returned."""
        return sum(queue.num_open for queue in self._queues.values())

    @property
    def is_stuck(self) -> bool:
        """Whether a thread is still inside a driver call after ``close``."""
        return any(queue.is_stuck for queue in self._queues.values())

    # -- one transfer ------------------------------------------------------------------------

    def _mark_ready(self, copy: PendingCopy) -> None:
        """Record the event of the compute stream that the copy will wait for."""
        with self._driver.current():
            # Here and not on the queue's thread, so that the copy does not wait for later compute.
            copy.ready = self._order_events.take()
            self._driver.record_event(copy.ready, self._compute_stream())

    def _release_ready(self, copy: PendingCopy) -> None:
        if copy.ready is not None:
            self._order_events.give(copy.ready)
            copy.ready = None

    # -- streams and paths -------------------------------------------------------------------

    def _open_queues(self, paths: Mapping[Direction, Path]) -> dict[Direction, CopyQueue]:
        """Open a queue per direction. Stores have low priority, as no request waits for them."""
        priorities = {Direction.LOAD: Priority.HIGH, Direction.STORE: Priority.LOW}
        with self._driver.current():
            try:
                streams = {
                    direction: self._streams.take(
                        self._driver.create_stream(priority), self._driver.destroy_stream
                    )
                    for direction, priority in priorities.items()
                }
            except Exception:
                self._streams.close()
                raise
        return {
            direction: CopyQueue(
                direction.value,
                self._driver,
                stream,
                paths[direction],
                self._order_events,
                self._timing_events,
            )
            for direction, stream in streams.items()
        }

    def _give_back(self) -> None:
        if self.is_stuck:
            # Destroying a stream under a call that uses it crashes the process; a leak does not.
            log.error("a copy thread is stuck in the driver; its streams are left to the process")
            return
        for queue in self._queues.values():
            try:
                queue.path.close()
            except Exception:
                log.exception("path %s did not close", queue.path.name)
        try:
            with self._driver.current():
                self._streams.close()
                self._order_events.close()
                self._timing_events.close()
        except Exception:
            log.exception("the engine's streams and events were not given back")


def torch_compute_stream(device: int) -> Callable[[], int]:
    """Return a function that returns the handle of torch's current stream on ``device``."""
    import torch

    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw_stream is not None:  # makes no Stream object per call
        return partial(raw_stream, device)
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)
