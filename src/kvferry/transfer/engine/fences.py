"""One transfer between submit and receipt, as the engine's parts know it."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.errors import DeadlineError, DriverError
from kvferry.transfer.driver.base import Driver, EventPool
from kvferry.types import Outcome, Rank, Receipt, TransferId

log = logging.getLogger(__name__)

NUM_WORDS = 1024
"""Gates that may be shut at once; one more, and compute waits the old way."""
_RANGE = 1 << 32
_SCRATCH_BYTES = 16


@dataclass(eq=False)
class LoadGate:
    """One number that compute waits for. It is opened once, by a stream or by the host."""

    address: int
    value: int
    since: float = field(default_factory=time.monotonic)

    @property
    def is_open(self) -> bool:
        # As a stream compares them: a number that has become another gate's is past this one's.
        return (_word(self.address).value - self.value) % _RANGE < _RANGE // 2

    def open_now(self) -> None:
        """From the host: nothing is left to wait for, or nobody should wait any longer."""
        if not self.is_open:
            _word(self.address).value = self.value


class Gates:
    """Owns the pinned numbers, taken by ``prepare``; leaves streams and loads to the engine.

    A number is used again when the gate it was has been opened.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._base = 0
        self._scratch = 0
        self._next = 0
        self._last: list[LoadGate | None] = [None] * NUM_WORDS

    @property
    def is_prepared(self) -> bool:
        """Whether there are any: not before ``prepare``, nor where the driver has none."""
        return bool(self._base)

    def prepare(self) -> None:
        """Take the memory, where the driver has gates; none is shut before."""
        if self._driver.has_values:
            try:
                self._base = self._driver.alloc_host(4 * NUM_WORDS)
                ctypes.memset(self._base, 0, 4 * NUM_WORDS)
                self._scratch = self._driver.alloc_device(_SCRATCH_BYTES)
            except DriverError as error:
                log.warning("loads hold their callers until they are queued: %s", error)
                self.close()

    def shut(self) -> LoadGate | None:
        """A gate nobody waits for yet; None when there is none left."""
        before = self._last[self._next]
        if before is not None and not before.is_open:
            return None
        value = 1 if before is None else (before.value + 1) % _RANGE
        gate = self._last[self._next] = LoadGate(self._base + 4 * self._next, value)
        self._next = (self._next + 1) % NUM_WORDS
        return gate

    def hold(self, gate: LoadGate, stream: int) -> None:
        """Keep what is queued on ``stream`` from now on behind the gate."""
        self._driver.stream_wait_value(stream, gate.address, gate.value)

    def open_behind(self, gate: LoadGate, stream: int) -> None:
        """Open it when all that ``stream`` holds by now has ended."""
        self._driver.stream_write_value(stream, gate.address, gate.value)

    def copy_some(self, stream: int) -> None:
        """Queue the smallest of copies to the device, to nobody's memory."""
        self._driver.copy_async(self._scratch, self._base, _SCRATCH_BYTES, stream)

    def close(self) -> None:
        """Open all gates and give the memory back. Safe to call twice."""
        if self._base:
            for gate in self._last:
                if gate is not None:
                    gate.open_now()
        base, self._base = self._base, 0
        scratch, self._scratch = self._scratch, 0
        for give, address in ((self._driver.free_host, base), (self._driver.free_device, scratch)):
            try:
                if address:
                    give(address)
            except DriverError as error:
                log.warning("the memory of gates was not given back: %s", error)


def _word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


# ------------------------------------------------------------------------------------------------
# One transfer between submit and receipt, as the engine's parts know it.


@dataclass(eq=False)
class Submission:
    """One transfer between submit and receipt."""

    transfer_id: TransferId
    path: str = ""
    beside_model: bool = False
    num_runs: int = 1
    num_bytes: int = 0
    ready: int | None = None
    """Event recorded on the compute stream at submit; the copy comes after it."""
    start: int | None = None
    marks: list[int] = field(default_factory=list)
    """Events, one for each part that is queued, in their order."""
    end: int | None = None
    queued: bool = False
    """Nothing more will be queued for it; only its end is awaited."""
    reason: str = ""
    """Why it failed: the first fault, empty while there is none."""
    seconds: float = 0.0
    trouble_since: float | None = None
    gate: LoadGate | None = None
    """Shut while compute waits for this load though it is not queued yet."""
    after: Submission | None = None
    """A load that compute waits for; so may this, which is queued only once that one is."""

    @property
    def is_free(self) -> bool:
        """Whether nothing it comes behind is still being queued."""
        return self.after is None or self.after.queued

    def fail(self, error: BaseException) -> None:
        if not self.reason:
            self.reason = f"{type(error).__name__}: {error}"

    def receipt(self, rank: Rank) -> Receipt:
        """How it ended."""
        if self.reason:
            return Receipt(
                self.transfer_id,
                rank,
                Outcome.FAILED,
                self.reason,
                path=self.path,
                beside_model=self.beside_model,
                num_runs=self.num_runs,
            )
        return Receipt(
            self.transfer_id,
            rank,
            Outcome.OK,
            num_bytes=self.num_bytes,
            seconds=self.seconds,
            path=self.path,
            beside_model=self.beside_model,
            num_runs=self.num_runs,
        )


# ------------------------------------------------------------------------------------------------
# Where a submission ends on its stream, and whether the card has got there.


class Fences:
    """Records and asks for the ends of one lane's submissions; leaves these to the lane.

    ``patience`` is how long a driver may refuse to say whether a copy is over.
    """

    def __init__(
        self, name: str, driver: Driver, stream: int, timing_events: EventPool, patience: float
    ) -> None:
        self._name = name
        self._driver = driver
        self._timing_events = timing_events
        self._patience = patience
        self.stream = stream

    def fence(self, submission: Submission) -> int:
        if submission.end is None:
            event = self._timing_events.take()
            try:
                self._driver.record_event(event, self.stream)
            except Exception:
                self._timing_events.give(event)
                raise
            submission.end = event
        return submission.end

    def is_over(self, submission: Submission) -> bool:
        try:
            with self._driver.current():
                if not self._driver.event_is_done(self.fence(submission)):
                    return False
                self._measure(submission)
        except Exception as error:
            submission.fail(error)
            return self._give_up(submission)
        for event in (submission.start, submission.end):
            if event is not None:
                self._timing_events.give(event)
        return True

    def _measure(self, submission: Submission) -> None:
        if submission.start is None or submission.end is None or submission.reason:
            return
        try:
            submission.seconds = self._driver.elapsed_seconds(submission.start, submission.end)
        except Exception as error:
            # Often the late news of a copy that went wrong: not a receipt to call good.
            submission.fail(error)

    def _give_up(self, submission: Submission) -> bool:
        """Whether the driver has refused to answer for so long that it never will.

        Its events stay with the pool, unused, until the engine closes: they may be pending.
        """
        now = time.monotonic()
        if submission.trouble_since is None:
            submission.trouble_since = now
        if now - submission.trouble_since < self._patience:
            return False
        log.error(
            "%s lane: gave up on transfer %d: %s",
            self._name,
            submission.transfer_id,
            submission.reason,
        )
        return True


# ------------------------------------------------------------------------------------------------
# Which compute streams may wait at a gate: those that share no channel with our streams.
#
# A driver has a few channels to the card (8, unless told otherwise) and puts streams on them as it
# likes. What one stream waits for holds up all work queued later on its channel: with an event that
# is at worst slow, with a gate it is for ever, if the held work is what should open the gate.
# (On one
# NVIDIA H200, 2026-11-16, a gate on the default stream held nobody up; gates on 32 others held
# all.)
# No call tells, so it is tried out once for each compute stream, while that has nothing to do.


TRIAL_SECONDS = 2e-3
"""An idle stream gets there in some ten microseconds."""


class Channels:
    """Owns what was found out about compute streams; leaves gates and streams to the engine."""

    def __init__(self, driver: Driver, gates: Gates, events: EventPool) -> None:
        self._driver = driver
        self._gates = gates
        self._events = events
        self._is_apart: dict[int, bool] = {}
        self._unknown: int | None = None

    def is_apart(self, compute: int) -> bool:
        """Whether a gate on this stream holds up none of ours; no, as long as it was not tried."""
        found = self._is_apart.get(compute)
        if found is None:
            self._unknown = compute
        return bool(found)

    def wants_trial(self, compute: int) -> bool:
        """Whether somebody asked for this one, and it was not tried yet."""
        return compute == self._unknown and compute not in self._is_apart

    def try_out(self, compute: int, streams: Iterable[int]) -> None:
        """Hold ``compute``, which is idle, and see whether ``streams``, idle too, still work."""
        gate = self._gates.shut() if self._gates.is_prepared else None
        if gate is None:
            return
        self._unknown = None
        self._is_apart[compute] = False
        events: list[int] = []
        try:
            self._gates.hold(gate, compute)
            for stream in streams:
                events.append(self._events.take())
                # Copies have channels of their own.
                self._gates.copy_some(stream)
                self._driver.record_event(events[-1], stream)
            end = time.monotonic() + TRIAL_SECONDS
            waiting = list(events)
            while waiting and time.monotonic() < end:
                waiting = [event for event in waiting if not self._driver.event_is_done(event)]
            self._is_apart[compute] = not waiting
        except Exception as error:
            log.warning("whether compute may wait at gates could not be tried: %s", error)
        finally:
            gate.open_now()
            for event in events:  # whoever records one of them anew makes it say the new thing
                self._events.give(event)


# ------------------------------------------------------------------------------------------------
# Who looks after gates that stay shut.


QUIET_LOOKS = 60
"""So often it looks in vain before it sleeps: to wake it holds up the load that shuts a gate."""


class GateWatch:
    """Opens gates that stay shut too long, once the loads behind them have been failed.

    Whoever shut in the device's threads or the interpreter (somebody who frees device memory, and
    waits for the very compute that waits for us) could otherwise hang for ever. Owns a thread,
    once there is a gate to watch. ``patience`` is how long queueing a load may take, ``timeout``
    how long all of it may.
    """

    def __init__(self, *, patience: float, timeout: float, every: float = 1.0) -> None:
        self._patience = patience
        self._timeout = timeout
        self._every = every
        self._shut: list[Submission] = []
        self._num_quiet = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Have a thread; False where the process may not have another one: then shut no gate."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="kvferry-gates", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("nobody can watch over gates, so loads hold their callers: %s", error)
                return False
            self._thread = thread
        return True

    def watch(self, load: Submission) -> None:
        self._shut.append(load)
        if not self._wake.is_set():  # else it looks by itself before long
            self._wake.set()

    def look(self) -> None:
        """Open what is overdue; after a while without any, sleep until there is another gate."""
        self._wake.clear()
        self._num_quiet = 0 if self._shut else self._num_quiet + 1
        for load in tuple(self._shut):
            gate = load.gate
            if gate is None or gate.is_open:
                self._shut.remove(load)
                continue
            shut = time.monotonic() - gate.since
            if shut > (self._timeout if load.queued else self._patience):
                what = "copied" if load.queued else "queued"
                load.fail(DeadlineError(f"was not {what} within {shut:.1f} s; compute went on"))
                log.error("transfer %d %s", load.transfer_id, load.reason)
                gate.open_now()
        if self._shut or self._num_quiet < QUIET_LOOKS:
            self._wake.set()

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            self._wake.wait()
            if self._closing.wait(self._every):
                return
            self.look()
