"""One direction's stream and what is in flight on it.

A submission's life::

    submit -> [taken by the lane's thread, or by who waits for it] -> queued -> fenced -> over
                       wait for compute, start, the copy, piece by piece | end, and its gate

The fence is the ``end`` event. It is recorded after a failure too: part of the copy may already be
queued, and a receipt given before that part has run would let someone reuse memory the card is
still writing to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import DriverError, InputError, LayoutError
from kvferry.transfer.driver.base import Driver, EventPool
from kvferry.transfer.engine.fences import Fences, Gates, LoadGate, Submission
from kvferry.transfer.engine.parts import queue_parts
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.layout import GroupLayout, LayerParts
from kvferry.transfer.paths.contract import Path, is_prepared
from kvferry.types import DEVICE, HOST, SlotArray, Transfer

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Order:
    """A submission to be queued, and how far that is."""

    submission: Submission
    job: CopyJob
    path: Path | None
    """None until one is picked."""
    pieces: Iterator[None] | None = None
    """What is left to queue; None before it is begun."""


class Lane:
    """Owns one direction's submissions and its thread; leaves the stream to the engine.

    Submissions that take long go to the thread, so that ``submit`` never holds the serving loop.
    ``patience`` is how long a driver may refuse to say whether a copy is over; ``pick`` finds a
    path for a job that comes without one; ``num_begun`` pieces are queued by who begins a copy.
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
        num_begun: int = 1,
        patience: float,
        gates: Gates,
        wait_for_load: Callable[[Submission, float | None], bool],
    ) -> None:
        self.stream = stream
        self._gates = gates
        self._wait_for_load = wait_for_load
        self._pick = pick
        self._num_begun = num_begun
        self._name = name
        self._driver = driver
        self._order_events = order_events
        self._timing_events = timing_events
        self._fences = Fences(name, driver, stream, timing_events, patience)
        self._open: deque[Submission] = deque()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # there is something for the thread
        self._queued = threading.Condition(lock)  # there is less to queue: the thread sleeps on
        self._num_unqueued = 0
        self._turn = threading.Lock()  # to take the next order and queue it: so they stay in order
        self._orders: deque[_Order] = deque()  # the first may be begun
        self._is_held = False
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def num_open(self) -> int:
        """Transfers submitted and not yet settled."""
        return len(self._open)

    @property
    def num_unqueued(self) -> int:
        """Transfers submitted that are not queued to their end."""
        return self._num_unqueued

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
        order = _Order(submission, job, path)
        with self._changed:
            here = quick and not self._num_unqueued and submission.is_free
            self._open.append(submission)
            self._num_unqueued += 1
            if not here:
                self._orders.append(order)
                if not self._is_held:
                    self._changed.notify_all()
        if here:
            with self._turn:
                self._queue(order)
        elif not self._is_held and not self._has_thread():
            self._queue_next(None)

    def hold(self) -> None:
        """Keep the thread from what is submitted from now on, until ``release``."""
        self._is_held = True

    def begin(self, small: int) -> None:
        """Queue here what has so few bytes, and the first pieces of what has more.

        So the first bytes move before another thread has heard of them.
        """
        if not self._orders or not self._turn.acquire(blocking=False):
            return
        try:
            while self._orders and self._orders[0].submission.is_free:
                order = self._orders[0]
                whole = order.submission.num_bytes <= small
                if not any(self._queue(order, whole=whole) for _ in range(self._num_begun)):
                    break
        finally:
            self._turn.release()

    def release(self) -> None:
        """What is left to queue is the thread's."""
        self._is_held = False
        if self._orders:
            self._wake_thread()

    def settle(self) -> list[Submission]:
        """Take out the submissions that are over, in order; never blocks on the device."""
        over: list[Submission] = []
        if self._is_held:
            self.release()
        if self._num_unqueued:
            # A caller that polls in a tight loop would keep the interpreter from our own thread.
            time.sleep(0)
        with self._changed:
            while self._open and self._open[0].queued and self._fences.is_over(self._open[0]):
                over.append(self._open.popleft())
        for submission in over:
            if submission.gate is not None:
                submission.gate.open_now()  # if that was refused to the stream
        return over

    def has_news(self) -> bool:
        """Whether the first one that is open is over, as far as the driver says."""
        with self._changed:
            first = self._open[0] if self._open else None
            if first is None or not first.queued or first.end is None:
                return False
            try:
                return self._driver.event_is_done(first.end)
            except DriverError as error:  # as where it is settled, which deals with the rest
                first.fail(error)
                return False

    def flush(self, timeout: float) -> bool:
        """Queue everything submitted so far on the stream; False if that took longer.

        What the thread has not taken yet is queued here: handing it over takes longer than that.
        """
        end = time.monotonic() + timeout
        while self._queue_next(end):
            pass
        with self._changed:
            left = max(0.0, end - time.monotonic())
            return self._queued.wait_for(lambda: not self._num_unqueued, left)

    def shut_gate(self, stream: int) -> Submission | None:
        """Keep ``stream`` behind a gate that is opened when all submitted so far has ended.

        Returns the one that opens it. None where all is queued, where queueing would take memory or
        load a kernel (which may wait for the very compute we hold), or where the driver refuses.
        """
        with self._changed:
            if not self._num_unqueued or not self._can_queue_unaided():
                return None
            last = self._open[-1]
            gate = last.gate if last.gate is not None else self._gates.shut()
            if gate is None:
                return None
            try:
                self._gates.hold(gate, stream)
            except Exception as error:
                log.warning("%s lane: a gate was refused: %s", self._name, error)
                if last.gate is None:
                    gate.open_now()
                return None
            last.gate = gate  # under the lock: whoever has queued the last piece looks for it
            return last

    def wait_until_queued(self, submission: Submission, end: float | None) -> bool:
        """Until nothing more will be queued for it; False if that was not so by ``end``."""
        with self._changed:
            left = None if end is None else max(0.0, end - time.monotonic())
            return self._queued.wait_for(lambda: submission.queued, left)

    def close(self, timeout: float) -> list[Submission]:
        """End the thread; returns the submissions nobody will wait for any more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        if self._turn.acquire(blocking=False):  # else a thread is stuck inside one of them
            for order in self._orders:
                self._cut_short(order)
            self._turn.release()
        with self._changed:
            left = list(self._open)
            self._open.clear()
            self._orders.clear()
        for submission in left:
            if submission.gate is not None:
                submission.gate.open_now()
        return left

    def _can_queue_unaided(self) -> bool:
        ahead = 0
        try:
            for order in self._orders:
                if order.pieces is not None and order.job.in_parts is None:
                    continue  # one that is begun has all it needs
                if order.path is None:
                    order.path = self._pick(order.submission, order.job)
                if not is_prepared(order.path, order.job, ahead):
                    return False
                ahead += 1
        except Exception:  # whoever queues it meets it again, and says so
            return False
        return True

    def _wake_thread(self) -> None:
        if self._has_thread():
            with self._changed:
                self._changed.notify_all()
        else:
            while self._queue_next(None):
                pass

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
                self._changed.wait_for(
                    lambda: self._is_closing or (self._orders and not self._is_held)
                )
                if not self._orders:
                    return
            self._queue_next(None)

    def _queue_next(self, end: float | None) -> bool:
        """Queue the next order to its end, if there is one and it can be had by ``end``."""
        if not self._orders:
            return False
        if not self._turn.acquire(timeout=-1 if end is None else max(0.0, end - time.monotonic())):
            return False
        try:
            if not self._orders:
                return False
            order = self._orders[0]
            after = order.submission.after
            if after is not None and not self._wait_for_load(after, end):
                return False
            self._queue(order)
            return True
        finally:
            self._turn.release()

    def _queue(self, order: _Order, *, whole: bool = True) -> bool:
        """Wait for compute, copy, fence; or, if not ``whole``, a piece; False if some are left.

        No fault escapes: a dead thread leaves others waiting.
        """
        submission = order.submission
        is_done = True
        try:
            with self._driver.current():
                is_done = self._queue_pieces(order, whole=whole)
                if is_done:
                    self._fences.fence(submission)
        except BaseException as error:
            # An interrupt too: a copy cut short must not end in a good receipt.
            is_done = True
            submission.fail(error)
            self._cut_short(order)
            if not isinstance(error, Exception):
                raise
        finally:
            if is_done:
                self._end_order(order)
        return is_done

    def _queue_pieces(self, order: _Order, *, whole: bool) -> bool:
        submission = order.submission
        try:
            if order.pieces is None:
                order.pieces = self._begin(order)
            for _ in order.pieces:
                if not whole:
                    return False
        except Exception as error:
            submission.fail(error)
        return True

    def _begin(self, order: _Order) -> Iterator[None]:
        submission, job = order.submission, order.job
        path = order.path if order.path is not None else self._pick(submission, job)
        if submission.ready is not None:
            # Before the copy, in both directions: a store must not read blocks that are still
            # being written, a load must not write blocks that are still being read.
            self._driver.stream_wait_event(self.stream, submission.ready)
        submission.start = self._timing_events.take()
        self._driver.record_event(submission.start, self.stream)
        return queue_parts(path, job, self.stream, submission, self._driver, self._order_events)

    def _cut_short(self, order: _Order) -> None:
        """Nothing more is queued for it: what is must come before its receipt."""
        close = getattr(order.pieces, "close", None)
        if close is None:
            return
        try:
            with self._driver.current():
                close()
        except Exception as error:
            log.error("%s lane: a copy that was cut short is not fenced: %s", self._name, error)

    def _end_order(self, order: _Order) -> None:
        with self._changed:
            gate = order.submission.gate
            if gate is None:
                self._drop(order)  # under the same lock: a gate shut later finds it queued
                return
        try:
            self._open_gate(order.submission, gate)
        finally:
            with self._changed:
                self._drop(order)

    def _drop(self, order: _Order) -> None:
        submission = order.submission
        # The waits, if it came to that, have captured the record: the event is free again.
        if submission.ready is not None:
            self._order_events.give(submission.ready)
            submission.ready = None
        if self._orders and self._orders[0] is order:
            self._orders.popleft()
        submission.queued = True
        self._num_unqueued -= 1
        self._queued.notify_all()

    def _open_gate(self, submission: Submission, gate: LoadGate) -> None:
        try:
            with self._driver.current():
                try:
                    self._gates.open_behind(gate, self.stream)
                except Exception as error:
                    submission.fail(error)
                    self._driver.synchronize_stream(self.stream)
                    gate.open_now()
        except Exception as error:  # a device that is lost: nothing runs on it any more
            submission.fail(error)
            gate.open_now()


# ------------------------------------------------------------------------------------------------
# Transfers as the addresses they mean, looked at before anything is copied by address.


class Jobs:
    """Knows where blocks and slots are; owns neither."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        *,
        host_base: int,
        host_pitch: int,
        num_slots: int,
        host_chunk: int | None,
    ) -> None:
        for group, layout in enumerate(layouts):
            if layout.block_bytes > host_pitch:
                raise LayoutError(
                    f"a block of group {group} has {layout.block_bytes} bytes, "
                    f"a host slot only {host_pitch}"
                )
        self.layouts = tuple(layouts)
        self.cuts = tuple(map(LayerParts.of, layouts))
        self._host = (host_base, host_pitch, host_chunk)
        self._num_slots = num_slots

    def of(self, transfer: Transfer) -> CopyJob:
        """What a transfer asks for; InputError where that is not ours to copy."""
        if (transfer.src, transfer.dst) == (DEVICE, HOST):
            direction, blocks, slots = Direction.STORE, transfer.src_slots, transfer.dst_slots
        elif (transfer.src, transfer.dst) == (HOST, DEVICE):
            direction, blocks, slots = Direction.LOAD, transfer.dst_slots, transfer.src_slots
        else:
            raise InputError(f"this engine cannot copy from {transfer.src} to {transfer.dst}")
        if not 0 <= transfer.group < len(self.layouts):
            raise InputError(f"there are {len(self.layouts)} groups, got group {transfer.group}")
        layout = self.layouts[transfer.group]
        _refuse_outside("device block", blocks, layout.num_blocks)
        _refuse_outside("host slot", slots, self._num_slots)
        in_parts = self.cuts[transfer.group] if transfer.in_parts else None
        return CopyJob(direction, layout, blocks, slots, *self._host, in_parts)


def _refuse_outside(what: str, slots: SlotArray, count: int) -> None:
    # As unsigned numbers the negative ones are the largest: one look finds both kinds.
    worst = int(slots.view(np.uint64).argmax())
    if not 0 <= slots[worst] < count:
        raise InputError(f"{what} {slots[worst]} is not one of 0 to {count - 1}")
