"""Numbers in pinned host memory that a stream waits for: compute waits at one for unqueued loads.

An event can be waited for only when it is recorded, so only when all of a load is queued. A flag
can be waited for before: a stream waits until the number at an address has its value, and whatever
ends the load writes the value later, from a stream or from the host.

A driver has a few channels to the card (8 by default) and puts streams on them as it likes, and a
wait holds up all work queued later on its channel. With a flag that lasts for ever if the held work
is what should set it. (One NVIDIA H200, 2026-11-16: a flag on the default stream held no other
stream up; flags on 32 other streams held up all.) No call tells, so :class:`FlagProbe` tries it out
once per compute stream, while that stream has nothing to do.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.errors import DeadlineError, DriverError
from kvferry.transfer.driver import Driver, EventPool, Handles
from kvferry.types import TransferId

log = logging.getLogger(__name__)

NUM_FLAGS = 1024
"""Flags that may be unset at once; with one more, compute waits until its loads are queued."""
PROBE_SECONDS = 2e-3
"""An idle stream gets there in some ten microseconds."""
IDLE_CHECKS = 60
"""Checks without an unset flag before the watchdog sleeps: to wake it delays a load."""
_RANGE = 1 << 32
_SCRATCH_BYTES = 16


@dataclass(eq=False)
class HostFlag:
    """One number that compute waits for. It is set once, by a stream or by the host."""

    address: int
    value: int
    since: float = field(default_factory=time.monotonic)

    @property
    def is_set(self) -> bool:
        # Compared as a stream does: the number of a later flag here is past this one's.
        return (_word(self.address).value - self.value) % _RANGE < _RANGE // 2

    def set_now(self) -> None:
        """Set it from the host: nothing is left to wait for, or the wait must end."""
        if not self.is_set:
            _word(self.address).value = self.value


class HostFlags:
    """Owns the pinned numbers, taken by ``prepare``; leaves streams and loads to the engine.

    A number serves the next flag when the flag before it has been set.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handles = Handles()
        self._base = 0
        self._scratch = 0
        self._next = 0
        self._last: list[HostFlag | None] = [None] * NUM_FLAGS

    @property
    def is_prepared(self) -> bool:
        """Whether there are flags: not before ``prepare``, nor where the driver has none."""
        return bool(self._base)

    def prepare(self) -> None:
        """Take the memory, where the driver can wait for values; no flag is made before."""
        if self._driver.has_values:
            try:
                driver, take = self._driver, self._handles.take
                self._base = take(driver.alloc_host(4 * NUM_FLAGS), driver.free_host)
                ctypes.memset(self._base, 0, 4 * NUM_FLAGS)
                self._scratch = take(driver.alloc_device(_SCRATCH_BYTES), driver.free_device)
            except DriverError as error:
                log.warning("callers of loads wait until these are queued: %s", error)
                self.close()

    def make(self) -> HostFlag | None:
        """An unset flag that no stream waits for yet; None when there is none left."""
        before = self._last[self._next]
        if before is not None and not before.is_set:
            return None
        value = 1 if before is None else (before.value + 1) % _RANGE
        flag = self._last[self._next] = HostFlag(self._base + 4 * self._next, value)
        self._next = (self._next + 1) % NUM_FLAGS
        return flag

    def hold(self, flag: HostFlag, stream: int) -> None:
        """Keep work queued on ``stream`` from now on behind the flag."""
        self._driver.stream_wait_value(stream, flag.address, flag.value)

    def set_behind(self, flag: HostFlag, stream: int) -> None:
        """Set it when all that ``stream`` holds by now has ended."""
        self._driver.stream_write_value(stream, flag.address, flag.value)

    def copy_some(self, stream: int) -> None:
        """Queue the smallest of copies to the device, into memory of our own."""
        self._driver.copy_async(self._scratch, self._base, _SCRATCH_BYTES, stream)

    def close(self) -> None:
        """Set all flags and give the memory back. Safe to call twice."""
        if self._base:
            for flag in self._last:
                if flag is not None:
                    flag.set_now()
        self._base = self._scratch = 0
        self._handles.close()


def _word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


class FlagProbe:
    """Finds out which compute streams may wait for flags without holding up our streams."""

    def __init__(self, driver: Driver, flags: HostFlags, events: EventPool) -> None:
        self._driver = driver
        self._flags = flags
        self._events = events
        self._is_safe: dict[int, bool] = {}
        self._wanted: int | None = None

    def is_safe(self, compute: int) -> bool:
        """Whether a flag on this stream holds up none of ours; no, until it was probed."""
        found = self._is_safe.get(compute)
        if found is None:
            self._wanted = compute
        return bool(found)

    def is_wanted(self, compute: int) -> bool:
        """Whether ``is_safe`` was asked for this stream and it was not probed yet."""
        return compute == self._wanted and compute not in self._is_safe

    def probe(self, compute: int, streams: Iterable[int]) -> None:
        """Hold ``compute``, which is idle, and see whether ``streams``, idle too, still work."""
        flag = self._flags.make() if self._flags.is_prepared else None
        if flag is None:
            return
        self._wanted = None
        self._is_safe[compute] = False
        events: list[int] = []
        try:
            self._flags.hold(flag, compute)
            for stream in streams:
                events.append(self._events.take())
                # Copies have channels of their own.
                self._flags.copy_some(stream)
                self._driver.record_event(events[-1], stream)
            end = time.monotonic() + PROBE_SECONDS
            waiting = list(events)
            while waiting and time.monotonic() < end:
                waiting = [event for event in waiting if not self._driver.event_is_done(event)]
            self._is_safe[compute] = not waiting
        except Exception as error:
            log.warning("whether compute may wait for flags could not be probed: %s", error)
        finally:
            flag.set_now()
            for event in events:  # a pending one may be recorded anew
                self._events.give(event)


class FlaggedLoad(Protocol):
    """A load that compute waits for by a flag."""

    transfer_id: TransferId
    flag: HostFlag | None
    queued: bool

    def fail(self, error: BaseException) -> None: ...


class FlagWatchdog:
    """Sets flags that stay unset too long, once the loads behind them have been failed.

    A caller may hold the device's threads or the interpreter while it waits for the compute that
    waits for us (freeing device memory does): without the watchdog both would hang for ever. Owns a
    thread, once there is a flag to watch. ``patience`` is how long queueing a load may take,
    ``timeout`` how long all of it may.
    """

    def __init__(self, *, patience: float, timeout: float, every: float = 1.0) -> None:
        self._patience = patience
        self._timeout = timeout
        self._every = every
        self._loads: list[FlaggedLoad] = []
        self._num_idle = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Have a thread; False where the process may have no more: then use no flag."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="kvferry-flags", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("no thread can watch flags, so loads hold their callers: %s", error)
                return False
            self._thread = thread
        return True

    def watch(self, load: FlaggedLoad) -> None:
        """Watch the flag of ``load``."""
        self._loads.append(load)
        if not self._wake.is_set():  # else it checks by itself before long
            self._wake.set()

    def check(self) -> None:
        """Set overdue flags; after a while without any, sleep until there is another one."""
        self._wake.clear()
        self._num_idle = 0 if self._loads else self._num_idle + 1
        for load in tuple(self._loads):
            flag = load.flag
            if flag is None or flag.is_set:
                self._loads.remove(load)
                continue
            age = time.monotonic() - flag.since
            if age > (self._timeout if load.queued else self._patience):
                what = "copied" if load.queued else "queued"
                words = f"was not {what} within {age:.1f} s; compute went on"
                load.fail(DeadlineError(words))
                log.error("transfer %d %s", load.transfer_id, words)
                flag.set_now()
        if self._loads or self._num_idle < IDLE_CHECKS:
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
            self.check()
