"""Makes host memory usable chunk by chunk, in the background, while the first slots already serve.

Touching and pinning a pool takes from seconds to minutes. So the constructor returns when the first
chunk is ready, and threads make the others ready in batches::

    chunk      0      1      2      3      4      5   ...
             ready  ready  ready  being  ready  being
    ready slots  ──────────────┘  (a prefix: chunk 4 counts when chunk 3 is done)

A batch is touched by several threads, then pinned: fresh pages arrive at 8 GB/s while no page is
pinned, and at 3 GB/s beside pinning (NVIDIA H200 host, 16 vCPU, Linux 6.18).

One rule paces it beside a busy model: after each piece of work that the model notices, rest ``k``
times as long. ``k`` is 0 while the model is idle. After any fault the pool is merely smaller than
asked: what is ready stays ready.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from kvferry.core.quantities import GiB
from kvferry.errors import ConfigError
from kvferry.hostmem.limits import Machine, Placement, run_near, shortage
from kvferry.hostmem.slots import HostTier, populate

log = logging.getLogger(__name__)

NUM_THREADS = 16
"""At most one per processor. Pages that a hypervisor had yet to back arrived at 8 GB/s with 16
threads, at 6.3 GB/s with 8 (16 vCPU, Linux 6.18, 2026-11-15)."""

_PIN_REST = 9.0
"""The factor ``k`` for pinning: one chunk at a time, then a rest of nine times its duration.

The driver holds every kernel launch back while it pins, behind an unfair lock. Beside a step of one
graph and thirty small launches, with 64 MiB at a time, a step of 1.3 ms took 430 ms without rests,
1.04 to 1.15 times its own with ``k = 3``, and its own with ``k = 9``, which still pins 2.5 GB/s.
(One NVIDIA H200, driver 580, 2026-11.)
"""

_AHEAD_BYTES = 4 * GiB
"""Beside a busy model growth stops this far ahead of what was ever written: memory that is not
needed yet can wait for an idle engine."""

_TOUCH_REST = 0.5
"""The factor ``k`` for touching pages without a GPU: the model needs the processors itself."""

_BUSY_BATCH = 4
"""Chunks touched together beside a model on a GPU. Touching costs the model nothing."""

_LOOK_AGAIN_SECONDS = 0.005
_FAR_AHEAD_SECONDS = 0.05  # rarely: such a rest may last for hours, on the engine's interpreter
_CLOSE_SECONDS = 30.0


class Registrar(Protocol):
    """Makes host memory known to a driver; called from several threads at once."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin memory that is mapped and populated; raises what the driver says."""

    def unregister_host(self, address: int) -> None:
        """Undo one ``register_host``, while the memory is still mapped."""


class Pin(Enum):
    """Whether a pool that the driver will not pin may serve unpinned."""

    AUTO = "auto"  # with a warning
    REQUIRED = "required"  # no: refuse to start
    NEVER = "never"  # do not try


@dataclass(frozen=True)
class GrowthStats:
    """A snapshot of one rank's host memory.

    ``reason`` says why the growth stopped or why the memory is not pinned.
    """

    asked_bytes: int
    ready_bytes: int
    num_slots: int
    ready_slots: int
    is_pinned: bool
    is_growing: bool
    seconds: float
    placement: str
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        return self.ready_slots == self.num_slots

    @property
    def pinned_bytes(self) -> int:
        return self.ready_bytes if self.is_pinned else 0

    def __str__(self) -> str:
        rate = self.ready_bytes / max(self.seconds, 1e-9) / 1e9
        ready, asked = self.ready_bytes / GiB, self.asked_bytes / GiB
        pinned = "pinned" if self.is_pinned else "not pinned"
        state = "growing" if self.is_growing else "done" if self.is_whole else "stopped"
        line = (
            f"{ready:.2f} of {asked:.2f} GiB ready after {self.seconds:.2f} s ({rate:.1f} GB/s), "
            f"{pinned}, {self.placement}, {state}"
        )
        return f"{line}: {self.reason}" if self.reason else line


class Growth:
    """Owns the threads and the registrations of one host tier; leaves the memory to the tier.

    The slots from 0 to ``ready_slots`` can be used; either all of them are pinned or none is.
    Do not touch the others. Close it before the tier, when nothing copies any more.
    """

    def __init__(
        self,
        host: HostTier,
        *,
        registrar: Registrar | None = None,
        pin: Pin = Pin.AUTO,
        busy: Callable[[], bool] = lambda: False,
        wanted: Callable[[], float] | None = None,
        placement: Placement | None = None,
        machine: Machine | None = None,
        num_threads: int | None = None,
        close_timeout: float = _CLOSE_SECONDS,
    ) -> None:
        """Return when the first chunk is ready; ConfigError if not even that can be had.

        ``busy`` says whether the model runs now, ``wanted`` how many slots were ever written (both
        called from any thread). ``machine`` is asked before every batch whether memory is left;
        None where the pages exist already.
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
        self._num_threads = max(1, min(num_threads or NUM_THREADS, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._finished = threading.Event()
        self._closing = False
        self._done = bytearray(len(self._chunks))
        self._num_prefix = 0  # chunks from the first on that are ready
        self._registered: set[int] = set()  # by address
        self._reason = ""
        self._seconds = 0.0
        self._rest_until = 0.0
        self._began = time.monotonic()
        self._make_first_ready()
        if len(self._chunks) == 1:
            self._end()
            return
        threading.Thread(target=self._run, name="kvferry-grow-0", daemon=True).start()

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
        return GrowthStats(
            asked_bytes=self._chunks.num_bytes,
            ready_bytes=self._ready_bytes,
            num_slots=self._chunks.num_slots,
            ready_slots=self.ready_slots,
            is_pinned=self.is_pinned and bool(self._num_prefix),
            is_growing=not self._finished.is_set(),
            seconds=self._seconds or time.monotonic() - self._began,
            placement=self._placement.words,
            reason=self._reason,
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until growth has ended; False if ``timeout`` seconds passed before."""
        return self._finished.wait(timeout)

    def close(self) -> None:
        """Stop growing and unregister everything. Safe to call twice, and during growth.

        Waits for the chunks in hand. If the driver never returns from a call, the memory stays
        mapped: taking it away under the driver would crash the process.
        """
        self._closing = True
        self._stop.set()
        if not self._finished.wait(self._close_timeout):
            log.error("a thread is stuck while it pins host memory; the memory is left to it")
            return
        self._num_prefix = 0
        self._unregister(list(self._registered))
        self._bytes = self._bytes[:0].copy()  # ours was the last hold on the mapping

    @property
    def _ready_bytes(self) -> int:
        if not self._num_prefix:
            return 0
        last = self._chunks[self._num_prefix - 1]
        return last.start + last.num_bytes

    # -- growing --------------------------------------------------------------------------------

    def _make_first_ready(self) -> None:
        """Chunk 0, alone: it decides whether the pool is pinned."""
        try:
            self._require_room([0])
            self._populate(0)
        except (OSError, MemoryError) as error:
            raise ConfigError(f"host: not even the first chunk could be had: {error}") from error
        if self._registrar is None and self._pin is Pin.REQUIRED:
            raise ConfigError("host_pin: required, but there is no driver to pin host memory with")
        try:
            self._register(0)
        except Exception as error:
            words = f"host memory cannot be pinned: {error}"
            if self._pin is Pin.REQUIRED:
                raise ConfigError(f"host_pin: required, but {words}") from error
            self._reason, self._registrar = words, None
            log.warning("%s. Copies are correct but slow", words)
        self._mark_ready(0)

    def _run(self) -> None:
        first = 1
        try:
            run_near(self._placement)
            while not self._stop.is_set() and (batch := self._next_batch(first)):
                self._require_room(batch)
                if self._registrar is not None:
                    self._on_threads(self._populate, batch)
                    self._pin_batch(batch)
                else:
                    self._rest()
                    self._work(self._make_ready, batch, _TOUCH_REST)
                first = batch[-1] + 1
        except Exception as error:  # the pool stays smaller; a dead thread would not say so
            self._give_up(f"chunk {self._num_prefix} of {len(self._chunks)}", error)
        finally:
            self._end()

    def _next_batch(self, first: int) -> Sequence[int]:
        """The chunks to touch together: few beside a busy model, so that it yields soon."""
        count = self._num_threads
        if self._busy():
            count = min(count, _BUSY_BATCH) if self._registrar is not None else 1
        return range(first, min(first + count, len(self._chunks)))

    def _pin_batch(self, batch: Sequence[int]) -> None:
        """All at once while the model is idle, else one chunk at a time with rests between."""
        waiting = deque(batch)
        while waiting and not self._stop.is_set():
            self._rest()
            chunks = [waiting.popleft() for _ in range(1 if self._busy() else len(waiting))]
            self._work(self._make_ready, chunks, _PIN_REST)

    def _work(self, work: Callable[[int], None], items: Sequence[int], factor: float) -> None:
        """Do what the model notices; the next rest is ``factor`` times as long as it takes."""
        began = time.monotonic()
        self._on_threads(work, items)
        now = time.monotonic()
        self._rest_until = now + factor * (now - began)

    def _rest(self) -> None:
        """Return when the rest is over and more memory is needed, or the model is idle."""
        while self._busy() and not self._stop.is_set():
            left = self._rest_until - time.monotonic()
            if left > 0:
                self._stop.wait(min(left, _LOOK_AGAIN_SECONDS))
            elif self._is_far_ahead():
                self._stop.wait(_FAR_AHEAD_SECONDS)
            else:
                break

    def _is_far_ahead(self) -> bool:
        if self._wanted is None or self._registrar is None:
            return False
        return (self.ready_slots - self._wanted()) * self._chunks.pitch >= _AHEAD_BYTES

    def _on_threads(self, work: Callable[[int], None], items: Sequence[int]) -> None:
        """Do ``work`` for all items, this thread and helpers together; raises the first fault."""
        left = deque(items)
        faults: list[Exception] = []

        def share() -> None:
            with suppress(IndexError):  # nothing is left
                while not faults:
                    item = left.popleft()
                    try:
                        work(item)
                    except Exception as error:
                        faults.append(error)

        def share_nearby() -> None:
            run_near(self._placement)
            share()

        helpers = [
            threading.Thread(target=share_nearby, name=f"kvferry-grow-{number}", daemon=True)
            for number in range(1, min(len(items), self._num_threads))
        ]
        with suppress(RuntimeError):  # a process that may have fewer threads is slower
            for helper in helpers:
                helper.start()
        share()
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
        if faults:
            raise faults[0]

    def _require_room(self, batch: Sequence[int]) -> None:
        """Stop before the kernel has to kill a process for memory."""
        if self._machine is not None:
            needed = sum(self._chunks[index].num_bytes for index in batch)
            if short := shortage(self._machine, needed):
                raise MemoryError(short)

    def _populate(self, index: int) -> None:
        # Before the driver does: it would fault pages in one by one, under a lock of all threads.
        chunk = self._chunks[index]
        if not self._stop.is_set():
            populate(self._bytes[chunk.start : chunk.start + chunk.num_bytes])

    def _make_ready(self, index: int) -> None:
        """Pin a chunk that is populated or, where nothing is pinned, populate it."""
        if self._registrar is None:
            self._populate(index)
        if not self._stop.is_set():
            self._register(index)
            self._mark_ready(index)

    def _register(self, index: int) -> None:
        if self._registrar is None:
            return
        chunk = self._chunks[index]
        address = int(self._bytes.ctypes.data) + chunk.start
        self._registrar.register_host(address, chunk.num_bytes)
        with self._lock:
            self._registered.add(address)

    def _mark_ready(self, index: int) -> None:
        with self._lock:
            self._done[index] = True
            while self._num_prefix < len(self._done) and self._done[self._num_prefix]:
                self._num_prefix += 1

    # -- the end --------------------------------------------------------------------------------

    def _give_up(self, where: str, error: Exception) -> None:
        kind = "" if isinstance(error, MemoryError) else f"{type(error).__name__}: "
        with self._lock:
            self._reason = "; ".join(filter(None, (self._reason, f"{where}: {kind}{error}")))
        self._stop.set()

    def _end(self) -> None:
        """Unregister chunks behind one that failed, and report."""
        end = int(self._bytes.ctypes.data) + self._ready_bytes
        self._unregister([address for address in self._registered if address >= end])
        self._seconds = time.monotonic() - self._began
        if not self._closing:
            stats = replace(self.stats(), is_growing=False)
            log.log(logging.INFO if stats.is_whole else logging.WARNING, "host memory: %s", stats)
        self._finished.set()

    def _unregister(self, addresses: list[int]) -> None:
        for address in addresses:
            assert self._registrar is not None, "what is registered was registered by one"
            try:
                self._registrar.unregister_host(address)
            except Exception as error:  # the others must still be given back
                log.warning("host memory stays registered: %s", error)
            with self._lock:
                self._registered.discard(address)
