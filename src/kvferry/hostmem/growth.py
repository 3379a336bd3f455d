"""Makes host memory usable chunk by chunk, in the background, while the first slots already serve.

Touching and pinning a pool takes from seconds to minutes, so nobody waits for it: the constructor
returns when the first chunk is ready, and threads do the rest::

    chunk      0      1      2      3      4      5   ...
             ready  ready  ready  being  ready  being
    ready slots  ──────────────┘  (a prefix: chunk 4 counts when chunk 3 is done)

Whatever goes wrong, the pool is merely smaller than asked: what is ready stays ready.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvferry.core.quantities import GiB
from kvferry.errors import ConfigError
from kvferry.hostmem.limits import Machine, pin_advice, shortage
from kvferry.hostmem.mapping import populate, populate_together
from kvferry.hostmem.numa import Placement, run_near
from kvferry.hostmem.slots import Chunk, HostTier

_PHASES_LOOK_AGAIN_SECONDS = 0.05


class Phases:
    """Says who may go on; once ``stop`` is set, nobody waits any more.

    Only speed depends on it: a thread that is let through early does no harm.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._changed = threading.Condition()
        self._num_touching = 0
        self._num_pinning = 0  # those that wait for their turn counted in

    @contextmanager
    def touching(self) -> Iterator[None]:
        with self._changed:
            self._wait_until(lambda: not self._num_pinning)
            self._num_touching += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_touching -= 1
                self._changed.notify_all()

    @contextmanager
    def pinning(self) -> Iterator[None]:
        with self._changed:
            self._num_pinning += 1
            self._wait_until(lambda: not self._num_touching)
        try:
            yield
        finally:
            with self._changed:
                self._num_pinning -= 1
                self._changed.notify_all()

    def _wait_until(self, may_go: Callable[[], bool]) -> None:
        while not may_go() and not self._stop.is_set():
            self._changed.wait(_PHASES_LOOK_AGAIN_SECONDS)


# ------------------------------------------------------------------------------------------------
# Makes host memory usable chunk by chunk, in the background, while the first slots already serve.
#
# Touching and pinning a pool takes from seconds to minutes, so nobody waits for it: the constructor
# returns when the first chunk is ready, and threads do the rest::
#
#     chunk      0      1      2      3      4      5   ...
#              ready  ready  ready  being  ready  being
#     ready slots  ──────────────┘  (a prefix: chunk 4 counts when chunk 3 is done)
#
# Whatever goes wrong, the pool is merely smaller than asked: what is ready stays ready.

log = logging.getLogger(__name__)

NUM_THREADS = 16
"""At most one for each processor. Pages a hypervisor has yet to back came at 8 GB/s with 16, at
6.3 with 8, before they were pinned. (16 vCPU, Linux 6.18, 2026-11-15.)"""

_PIN_REST = 9.0
"""While the model is busy one thread at a time pins, then nobody does for this many times as long.

The driver holds every launch back while it pins, behind a lock that is not fair. Beside a step of
one graph and thirty small launches, 64 MiB at a time: without rests a step of 1.3 ms took 430, with
rests of three times the work 1.04 to 1.15 times its own, with nine its own, still at 2.5 GB/s.
Touching pages cost it nothing, with four threads either. (One NVIDIA H200, driver 580, 2026-11.)
"""

_PLENTY_BYTES = 4 * GiB
_PLENTY_REST = 99.0
"""The same where so much of what is ready was never written: what is not needed yet can wait for
an engine that rests. With rests of nine times a server that was given work at once served 15.9
requests/s in its first round, and 17.3 where the pool was whole before it (one round each, and such
rounds differ by more; one NVIDIA H200, vLLM 0.26, 2026-11-18), though 6.7 GiB were ready when it
began and 4.2 were written in it. What these rests bring has not been measured on a card.
"""

_BUSY_TOUCHING = 4
"""So many threads touch pages while the model is busy on its GPU: pinning never waits for them."""

_TOUCH_REST = 0.5
"""Without a GPU the model needs the processors itself: one thread touches, then rests so long."""

_LOOK_AGAIN_SECONDS = 0.005
_CLOSE_SECONDS = 30.0
_NUM_REPORTS = 4  # lines of progress in the log


class Registrar(Protocol):
    """What lets a driver reach host memory; called from several threads at once."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin memory that is mapped and populated; raises what the driver says."""

    def unregister(self, address: int) -> None:
        """Undo one ``register``, while the memory is still mapped."""


class Pin(Enum):
    """Whether a pool that the driver will not pin may serve unpinned."""

    AUTO = "auto"  # with a warning
    REQUIRED = "required"  # no: refuse to start
    NEVER = "never"  # do not try


class GrowthState(Enum):
    """How far a growth is."""

    GROWING = "growing"
    DONE = "done"
    STOPPED = "stopped"  # before its end: by a fault, a shortage or close


@dataclass(frozen=True)
class GrowthStats:
    """A snapshot of one rank's host memory. ``reason`` says why it stopped or is not pinned."""

    progress: GrowthState
    asked_bytes: int
    ready_bytes: int
    pinned_bytes: int
    num_slots: int
    ready_slots: int
    seconds: float
    rest_seconds: float
    placement: str
    reason: str = ""

    @property
    def is_pinned(self) -> bool:
        return self.pinned_bytes > 0

    def __str__(self) -> str:
        rate = self.ready_bytes / max(self.seconds, 1e-9) / 1e9
        line = (
            f"{self.ready_bytes / GiB:.2f} of {self.asked_bytes / GiB:.2f} GiB ready after "
            f"{self.seconds:.2f} s ({rate:.1f} GB/s), "
            f"{'pinned' if self.is_pinned else 'not pinned'}, {self.placement}, "
            f"{self.progress.value}"
        )
        return f"{line}: {self.reason}" if self.reason else line


class Growth:
    """Owns the threads and the registrations of one host tier; leaves the memory to the tier.

    The slots from 0 to ``ready_slots`` can be used; either all of them are pinned or none is.
    Nothing may touch the others. Close it before the tier, when nothing copies any more.
    """

    def __init__(
        self,
        host: HostTier,
        *,
        registrar: Registrar | None = None,
        pin: Pin = Pin.AUTO,
        busy: Callable[[], bool] | None = None,
        wanted: Callable[[], float] | None = None,
        placement: Placement | None = None,
        machine: Machine | None = None,
        num_threads: int | None = None,
        close_timeout: float = _CLOSE_SECONDS,
    ) -> None:
        """Return when the first chunk is ready; raise only if not even that can be had.

        ``busy`` says whether the model runs now (called from any thread): growth goes slowly then,
        and slower still as long as far fewer slots are ``wanted`` than are ready.
        ``machine`` is asked before every chunk whether there is memory left; None: do not ask, the
        pages are there already.
        """
        self._bytes = host.bytes  # keeps it mapped, whatever becomes of the tier
        self._chunks = host.chunks
        self._registrar = registrar if pin is not Pin.NEVER else None
        self._pin = pin
        self._busy = busy
        self._wanted = wanted
        self._placement = placement if placement is not None else Placement("anywhere")
        self._machine = machine
        self._close_timeout = close_timeout
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._phases = Phases(self._stop)
        self._alone = threading.Lock()  # held by who pins beside a busy model, and rests after it
        self._finished = threading.Event()
        self._closing = False
        self._next = 1
        self._done = bytearray(len(self._chunks))
        self._num_prefix = 0  # chunks from the first on that are ready
        self._registered: dict[int, int] = {}  # address: bytes
        self._progress = GrowthState.GROWING
        self._reason = ""
        self._seconds = 0.0
        self._rest_seconds = 0.0
        self._began = time.monotonic()
        count = min(num_threads or NUM_THREADS, os.cpu_count() or 1, len(self._chunks) - 1)
        self._num_running = max(count, 0)
        self._make_first_ready()
        self._threads: list[threading.Thread] = []
        self._start(count)

    # -- looking --------------------------------------------------------------------------------

    @property
    def ready_slots(self) -> int:
        """How many slots, from slot 0 on, can be used. Never shrinks until ``close``."""
        prefix = self._num_prefix
        return self._chunks[prefix - 1].slots_after if prefix else 0

    @property
    def is_pinned(self) -> bool:
        """Whether the driver reaches the ready slots; known from the start, never changes."""
        return self._registrar is not None

    def stats(self) -> GrowthStats:
        with self._lock:
            prefix = self._num_prefix
            last = self._chunks[prefix - 1] if prefix else None
            return GrowthStats(
                progress=self._progress,
                asked_bytes=self._chunks.num_bytes,
                ready_bytes=last.start + last.num_bytes if last else 0,
                pinned_bytes=sum(self._registered.values()),
                num_slots=self._chunks.num_slots,
                ready_slots=last.slots_after if last else 0,
                seconds=self._seconds or time.monotonic() - self._began,
                rest_seconds=self._rest_seconds,
                placement=self._placement.words,
                reason=self._reason,
            )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it grows no more; False if that took longer than ``timeout``."""
        return self._finished.wait(timeout)

    # -- growing --------------------------------------------------------------------------------

    def _make_first_ready(self) -> None:
        """Chunk 0, alone: it decides whether the pool is pinned."""
        first = self._chunks[0]
        try:
            self._require_room(first)
            populate_together(self._bytes[: first.num_bytes], max(1, self._num_running))
        except (OSError, MemoryError) as error:
            raise ConfigError(f"host: not even the first chunk could be had: {error}") from error
        if self._registrar is not None:
            try:
                self._register(first)
            except Exception as error:
                advice = pin_advice(self._machine or Machine(), self._chunks.num_bytes)
                words = f"host memory cannot be pinned ({error}): {advice}"
                if self._pin is Pin.REQUIRED:
                    raise ConfigError(f"host_pin: required, but {words}") from error
                self._reason = words
                self._registrar = None
                log.warning("%s. Copies are correct but slow", words)
        elif self._pin is Pin.REQUIRED:
            raise ConfigError("host_pin: required, but there is no driver to pin host memory with")
        self._mark(0)

    def _start(self, count: int) -> None:
        """So many threads, or as many as the process may have: fewer are merely slower."""
        for k in range(count):
            thread = threading.Thread(
                target=self._run, args=(k,), name=f"kvferry-grow-{k}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("host memory grows with %d threads, not %d: %s", k, count, error)
                if k == 0:
                    self._give_up(None, error)
                break
            self._threads.append(thread)
        if len(self._threads) < count or count <= 0:
            with self._lock:  # the missing ones kept those that ran from being the last
                self._num_running -= max(count, 0) - len(self._threads)
                last = self._num_running == 0
            if last:
                self._end()

    def _run(self, number: int) -> None:
        index = None
        try:
            run_near(self._placement)
            while (index := self._take(number)) is not None:
                chunk = self._chunks[index]
                self._require_room(chunk)
                began = time.monotonic()
                with self._phases.touching():
                    self._populate(chunk)
                if self._registrar is not None:
                    self._pin_and_mark(index)
                else:
                    self._mark(index)
                    took = time.monotonic() - began
                    self._rest(lambda: _TOUCH_REST * took)  # noqa: B023
        except Exception as error:  # the pool stays smaller; a dead thread would say nothing
            self._give_up(index, error)
        finally:
            with self._lock:
                self._num_running -= 1
                last = self._num_running == 0
            if last:
                self._end()

    def _pin_and_mark(self, index: int) -> None:
        """Beside a busy model: when nobody else pins or rests from it."""
        is_alone = self._wait_to_be_alone()
        try:
            with self._phases.pinning():
                began = time.monotonic()
                self._register(self._chunks[index])
                took = time.monotonic() - began
            self._mark(index)
            if is_alone:
                self._rest(lambda: took * (_PLENTY_REST if self._has_plenty() else _PIN_REST))
        finally:
            if is_alone:
                self._alone.release()

    def _wait_to_be_alone(self) -> bool:
        """False once the model is not busy, or all is to stop: no need to be alone then."""
        while not self._stop.is_set() and self._is_busy():
            if self._alone.acquire(timeout=_LOOK_AGAIN_SECONDS):
                return True
        return False

    def _take(self, number: int) -> int | None:
        """The next chunk to make ready. While the model is busy, only the first threads get one."""
        most = _BUSY_TOUCHING if self._registrar is not None else 1
        while number >= most and not self._stop.is_set() and self._is_busy():
            if self._next >= len(self._chunks):
                break
            self._stop.wait(_LOOK_AGAIN_SECONDS)
        with self._lock:
            if self._stop.is_set() or self._next >= len(self._chunks):
                return None
            self._next += 1
            return self._next - 1

    def _is_busy(self) -> bool:
        return self._busy is not None and self._busy()

    def _has_plenty(self) -> bool:
        """Whether what is ready will do for a while."""
        if self._wanted is None:
            return False
        return (self.ready_slots - self._wanted()) * self._chunks.pitch >= _PLENTY_BYTES

    def _rest(self, seconds: Callable[[], float]) -> None:
        """For as long as the model stays busy, so many seconds at most; asked again and again."""
        began = time.monotonic()
        while (left := began + seconds() - time.monotonic()) > 0 and self._is_busy():
            if self._stop.wait(min(left, _LOOK_AGAIN_SECONDS)):
                break
        with self._lock:
            self._rest_seconds += time.monotonic() - began

    def _require_room(self, chunk: Chunk) -> None:
        """Stop before the kernel has to kill someone for memory."""
        if self._machine is not None:
            # The other threads are about to touch a chunk each, too.
            ahead = max(1, self._num_running) * self._chunks.chunk_bytes
            left = self._chunks.num_bytes - chunk.start
            if short := shortage(self._machine, min(ahead, left)):
                raise MemoryError(short)

    def _populate(self, chunk: Chunk) -> None:
        # By this thread, before the driver does: it would fault the pages in one by one, under a
        # lock that all threads share.
        populate(self._bytes[chunk.start : chunk.start + chunk.num_bytes])

    def _register(self, chunk: Chunk) -> None:
        assert self._registrar is not None
        address = int(self._bytes.ctypes.data) + chunk.start
        self._registrar.register(address, chunk.num_bytes)
        with self._lock:
            self._registered[address] = chunk.num_bytes

    def _mark(self, index: int) -> None:
        with self._lock:
            before = self._num_prefix
            self._done[index] = True
            while self._num_prefix < len(self._done) and self._done[self._num_prefix]:
                self._num_prefix += 1
            parts = [n * _NUM_REPORTS // len(self._done) for n in (before, self._num_prefix)]
        if parts[0] < parts[1] < _NUM_REPORTS:
            log.info("host memory: %s", self.stats())

    def _give_up(self, index: int | None, error: Exception) -> None:
        where = f"chunk {index} of {len(self._chunks)}" if index is not None else "a thread"
        kind = "" if isinstance(error, MemoryError) else f"{type(error).__name__}: "
        with self._lock:
            self._reason = "; ".join(filter(None, (self._reason, f"{where}: {kind}{error}")))
        self._stop.set()

    def _end(self) -> None:
        """The last thread leaves: give back chunks behind one that failed, and say what is."""
        ready = self._chunks[self._num_prefix - 1]
        end = int(self._bytes.ctypes.data) + ready.start + ready.num_bytes
        if not self._stop.is_set() or self._reason:
            self._unregister([address for address in self._registered if address >= end])
        self._seconds = time.monotonic() - self._began
        whole = self._num_prefix == len(self._chunks)
        self._progress = GrowthState.DONE if whole else GrowthState.STOPPED
        if not self._closing:
            log.log(logging.INFO if whole else logging.WARNING, "host memory: %s", self.stats())
        self._finished.set()

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop growing and unregister everything. Safe to call twice, and while it grows.

        Waits for the chunks in hand. If the driver holds a thread for ever, the memory stays
        mapped: taking it away under the driver would crash the process.
        """
        self._closing = True
        self._stop.set()
        if not self._finished.wait(self._close_timeout):
            log.error("a thread is stuck while it pins host memory; the memory is left to it")
            return
        for thread in self._threads:
            thread.join()
        self._num_prefix = 0
        self._unregister(list(self._registered))
        self._bytes = self._bytes[:0].copy()  # ours was the last hold on the mapping

    def _unregister(self, addresses: list[int]) -> None:
        for address in addresses:
            try:
                assert self._registrar is not None
                self._registrar.unregister(address)
            except Exception as error:  # the others must still be given back
                log.warning("host memory stays registered: %s", error)
            with self._lock:
                self._registered.pop(address, None)
