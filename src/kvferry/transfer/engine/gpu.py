"""The copy engine for a GPU: which stream waits for which, and what became of every transfer.

::

    compute  ──[writes blocks]──●─────────────────────────●──[reads loaded blocks]──
                                │ ready                   ▲ order_compute_after_loads
    store                       └─▶[copy to host]──end    │
    load                        └─▶[copy to device]──end──┘

Every copy waits for the compute queued when it was submitted: a store because compute may still be
writing its source, a load because compute may still be reading its destination.

Compute waits for a load by an event where all of it is queued, else by a gate (``gates.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from kvferry.core.lifecycle import Closing, PunctualSleep, pause
from kvferry.errors import ClosedError, DeadlineError, DriverError, InputError
from kvferry.transfer.driver.base import Driver, EventPool, Priority
from kvferry.transfer.engine.fences import Channels, Gates, GateWatch, Submission
from kvferry.transfer.engine.lane import Jobs, Lane
from kvferry.transfer.engine.parts import GpuParts
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.contract import QUICK_BYTES, Path
from kvferry.transfer.paths.host_runs import count_runs
from kvferry.transfer.planning.planner import MeasuredPlanner, PathChoices, Planner
from kvferry.types import FIRST_RANK, Rank, Receipt, Transfer

SMALL_BYTES = 80 << 20
"""What takes a few pieces only: they are queued sooner than another thread hears of them. Of more
the first are queued at once, and while they are copied the thread gets there."""


class BegunHere:
    """What ``begun_here`` enters. Made once: it is entered for every transfer.

    Threads hear of it last: they would take turns with us at the interpreter.
    """

    def __init__(self, lanes: Iterable[Lane], order: Callable[[], None] | None) -> None:
        self._lanes = tuple(lanes)
        self._order = order

    def __enter__(self) -> None:
        for lane in self._lanes:
            lane.hold()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            for lane in self._lanes:
                lane.begin(SMALL_BYTES)
            if self._order is not None and kind is None:
                self._order()
        finally:
            for lane in self._lanes:
                lane.release()


# ------------------------------------------------------------------------------------------------
# The copy engine for a GPU: which stream waits for which, and what became of every transfer.
#
# ::
#
#     compute  ──[writes blocks]──●─────────────────────────●──[reads loaded blocks]──
#                                 │ ready                   ▲ order_compute_after_loads
#     store                       └─▶[copy to host]──end    │
#     load                        └─▶[copy to device]──end──┘
#
# Every copy waits for the compute queued when it was submitted: a store because compute may
# still be
# writing its source, a load because compute may still be reading its destination.
#
# Compute waits for a load by an event where all of it is queued, else by a gate (``gates.py``).

log = logging.getLogger(__name__)

_NUM_BEGUN = {Direction.LOAD: 1, Direction.STORE: 2}
"""Pieces of a copy that who submits it queues itself: a store's first is over before another thread
is sure to have had its turn at the interpreter."""


_QUEUEING_SECONDS = 5e-5
"""Who waits rests so long while copies are being queued: it would take turns at the interpreter
with who queues them, and none of them is over yet."""


class GpuEngine(Closing):
    """Copies blocks between paged device memory and pinned host slots.

    Owns its streams, its events and the paths it is given; leaves the driver, the KV tensors, the
    host memory (registered with the driver, or the copies are slow) and the compute stream to
    their owners, who must outlive it.

    ``submit`` and ``order_compute_after_loads`` belong to the thread that queues compute, because
    "queued so far" means something only there; ``poll`` may be called from any thread.
    """

    def __init__(
        self,
        driver: Driver,
        layouts: Sequence[GroupLayout],
        *,
        host_base: int,
        host_pitch: int,
        num_slots: int,
        compute_stream: Callable[[], int],
        planner: Planner,
        paths: Mapping[str, Path],
        rank: Rank = FIRST_RANK,
        host_chunk: int | None = None,
        patience: float = 5.0,
        close_timeout: float = 30.0,
        runs_beside: Callable[[], bool] = lambda: False,
    ) -> None:
        """``runs_beside`` says of what is submitted now that compute will run beside it, although
        none may be queued yet.
        """
        self._driver = driver
        self._jobs = Jobs(
            layouts,
            host_base=host_base,
            host_pitch=host_pitch,
            num_slots=num_slots,
            host_chunk=host_chunk,
        )
        self._rank = rank
        self._compute_stream = compute_stream
        self._planner = planner
        self._paths = dict(paths)
        self._close_timeout = close_timeout
        self._runs_beside = runs_beside
        self._lock = threading.Lock()
        self._ended: list[Receipt] = []
        self._closed = False
        self._order_events = EventPool(driver, timing=False)
        self._timing_events = EventPool(driver, timing=True)
        self.parts = GpuParts(driver, self._order_events, compute_stream)
        self._gates = Gates(driver)
        self._watch = GateWatch(patience=patience, timeout=close_timeout)
        self._channels = Channels(driver, self._gates, self._order_events)
        self._gated: Submission | None = None
        self._lanes = self._open_lanes(patience)
        self._here = BegunHere(self._lanes.values(), None)
        self._here_in_order = BegunHere(self._lanes.values(), self.order_compute_after_loads)

    # -- the contract ------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        """Queue one transfer and return at once. A fault is a failed receipt, never a raise."""
        if self._closed:
            raise ClosedError("the engine is closed")
        submission = Submission(transfer.id)
        try:
            job = self._jobs.of(transfer)
            num_bytes = submission.num_bytes = job.num_bytes
            self._mark(submission)
            if job.direction is Direction.STORE and self._gated is not None:
                submission.after = self._gated = None if self._gated.queued else self._gated
            # A large job's path is picked by the lane's thread: nobody here waits for that.
            path = self._pick(submission, job) if num_bytes <= QUICK_BYTES else None
            quick = path is not None and all(map(path.is_quick, job.parts()))
        except Exception as error:
            # Nothing was queued, so there is nothing to wait for.
            submission.fail(error)
            self._release_ready(submission)
            with self._lock:
                self._ended.append(submission.receipt(self._rank))
        else:
            self.parts.begun(submission, job)
            self._lanes[job.direction].submit(submission, job, path, quick=quick)

    def poll(self) -> list[Receipt]:
        """Receipts of transfers that ended since the last call; never blocks."""
        with self._lock:
            receipts, self._ended = self._ended, []
        for lane in self._lanes.values():
            receipts.extend(self.parts.ended(s).receipt(self._rank) for s in lane.settle())
        return receipts

    def await_news(self, seconds: float) -> None:
        """Return when something ended that ``poll`` has not told, or after so many seconds."""
        began = time.monotonic()
        waited = 0.0
        try:
            with self._driver.current(), self._driver.beside_captures(), PunctualSleep():
                while waited < seconds and not self._ended:
                    if any(lane.has_news() for lane in self._lanes.values()):
                        return
                    if any(lane.num_unqueued for lane in self._lanes.values()):
                        time.sleep(_QUEUEING_SECONDS)
                    else:
                        pause(waited)
                    waited = time.monotonic() - began
        except DriverError:  # a card that is lost: whoever polls finds out
            time.sleep(min(seconds, 1e-3))

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed); returns the receipts."""
        end = None if timeout is None else time.monotonic() + timeout
        rest = 2e-5
        receipts = self.poll()
        while self.num_in_flight and (end is None or time.monotonic() < end):
            time.sleep(rest)
            rest = min(2 * rest, 1e-3)
            receipts.extend(self.poll())
        return receipts

    def begun_here(self, *, compute_waits: bool = False) -> AbstractContextManager[None]:
        """What is submitted inside is begun by this thread at its end, the rest left to others."""
        return self._here_in_order if compute_waits else self._here

    def order_compute_after_loads(self) -> None:
        """Make compute queued from now on wait for every load submitted so far.

        Does not wait until they are queued, where the driver has gates. Raises if it refuses:
        compute queued after a silent refusal would read blocks that are not there yet.
        """
        if self._closed:
            raise ClosedError("the engine is closed")
        lane = self._lanes[Direction.LOAD]
        if not lane.num_open:
            return
        with self._driver.current():
            compute = self._compute_stream()
            if lane.num_unqueued and self._shut_gate(lane, compute):
                return
            if not lane.flush(self._close_timeout):
                raise DeadlineError(f"loads were not queued within {self._close_timeout} seconds")
            event = self._order_events.take()
            try:
                self._driver.record_event(event, lane.stream)
                self._driver.stream_wait_event(compute, event)
            finally:
                self._order_events.give(event)

    def _try_out(self, compute: int, submission: Submission) -> None:
        """Here, where nothing of ours is queued yet and the thread is the one that may ask."""
        if submission.beside_model or self.num_in_flight:
            return
        streams = [lane.stream for lane in self._lanes.values()]
        for path in self._paths.values():
            streams += getattr(path, "streams", ())
        self._channels.try_out(compute, streams)

    def _shut_gate(self, lane: Lane, compute: int) -> bool:
        if not self._gates.is_prepared or not self._channels.is_apart(compute):
            return False
        if not self._watch.start():
            return False
        gated = lane.shut_gate(compute)
        if gated is None:
            return False
        self._gated = gated
        self._watch.watch(gated)
        return True

    def close(self) -> None:
        """Drain, then give back streams, events and paths. Safe to call twice.

        Receipts nobody polled before stay to be polled.
        """
        if self._closed:
            return
        self._closed = True
        receipts = self.drain(self._close_timeout)
        for lane in self._lanes.values():
            for submission in lane.close(self._close_timeout):
                submission.fail(DeadlineError("still in flight when the engine was closed"))
                self._release_ready(submission)
                receipts.append(submission.receipt(self._rank))
        with self._lock:
            self._ended.extend(receipts)
        self._give_back()

    @property
    def num_in_flight(self) -> int:
        """Transfers submitted whose receipt is not out yet."""
        return sum(lane.num_open for lane in self._lanes.values())

    @property
    def is_stuck(self) -> bool:
        """Whether a thread is still inside a driver call after ``close``."""
        return any(lane.is_stuck for lane in self._lanes.values())

    @property
    def choices(self) -> PathChoices | None:
        """What paths are picked by here; None where that was not measured."""
        planner = self._planner
        if not isinstance(planner, MeasuredPlanner):
            return None
        paths = tuple(self._paths)
        return PathChoices(planner.profile, paths, planner.pinned, self._jobs.layouts)

    # -- one transfer ------------------------------------------------------------------------

    def _mark(self, submission: Submission) -> None:
        """Fix the transfer's place behind compute, now, and see whether there is any."""
        with self._driver.current():
            compute = self._compute_stream()
            submission.beside_model = self._runs_beside() or not self._driver.stream_is_idle(
                compute
            )
            if self._channels.wants_trial(compute):
                self._try_out(compute, submission)
            # Here and not on the lane's thread: later compute must not hold this copy back.
            submission.ready = self._order_events.take()
            self._driver.record_event(submission.ready, compute)

    def _pick(self, submission: Submission, job: CopyJob) -> Path:
        submission.num_runs = count_runs(job)
        submission.path = self._choose(
            job, submission.num_runs, beside_model=submission.beside_model
        )
        path = self._paths.get(submission.path)
        if path is None:
            raise InputError(
                f"the planner chose path {submission.path!r}; this engine has {sorted(self._paths)}"
            )
        return path

    def _choose(self, job: CopyJob, num_runs: int, *, beside_model: bool) -> str:
        return self._planner.choose(
            job.direction,
            job.layout,
            len(job.device_blocks),
            beside_model,
            num_runs,
            in_parts=job.in_parts is not None,
        )

    def _release_ready(self, submission: Submission) -> None:
        if submission.ready is not None:
            self._order_events.give(submission.ready)
            submission.ready = None

    # -- what the engine owns ----------------------------------------------------------------

    def _open_lanes(self, patience: float) -> dict[Direction, Lane]:
        """A request waits for its load; nobody waits for a store, so it yields to the model."""
        priorities = {Direction.LOAD: Priority.HIGH, Direction.STORE: Priority.LOW}
        lanes: dict[Direction, Lane] = {}
        with self._driver.current():
            for direction, priority in priorities.items():
                try:
                    stream = self._driver.create_stream(priority)
                except Exception:
                    self._destroy_streams(lanes)
                    raise
                lanes[direction] = Lane(
                    direction.value,
                    self._driver,
                    stream,
                    self._order_events,
                    self._timing_events,
                    pick=self._pick,
                    num_begun=_NUM_BEGUN[direction],
                    patience=patience,
                    gates=self._gates,
                    wait_for_load=self._wait_for_load,
                )
            self._gates.prepare()
        return lanes

    def _wait_for_load(self, load: Submission, end: float | None) -> bool:
        return self._lanes[Direction.LOAD].wait_until_queued(load, end)

    def _give_back(self) -> None:
        self._watch.close()
        if self.is_stuck:
            # Destroying a stream under a call that uses it crashes the process; a leak does not.
            log.error("a copy thread is stuck in the driver; its streams are left to the process")
            return
        for name, path in self._paths.items():
            try:
                path.close()
            except Exception:
                log.exception("path %s did not close", name)
        try:
            with self._driver.current():
                self._gates.close()
                self._destroy_streams(self._lanes)
                self._order_events.close()
                self._timing_events.close()
        except Exception:
            log.exception("the engine's streams and events were not given back")

    def _destroy_streams(self, lanes: Mapping[Direction, Lane]) -> None:
        for lane in lanes.values():
            try:
                self._driver.destroy_stream(lane.stream)
            except Exception:
                log.exception("a stream was not given back")


def torch_compute_stream(device: int) -> Callable[[], int]:
    """Asks torch, at each submit, which stream the model's kernels go to now."""
    import torch

    return lambda: int(torch.cuda.current_stream(device).cuda_stream)
