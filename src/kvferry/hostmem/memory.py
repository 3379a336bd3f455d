"""One rank's host memory: sized, mapped, made usable in the background, closed.

Touching and pinning a pool takes from seconds to minutes. So the constructor returns when the first
chunk is ready, and threads make the others ready in batches. Slots become usable as a prefix.

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
from typing import Protocol

from kvferry.core.lifecycle import Closing
from kvferry.core.quantities import GiB, format_size
from kvferry.errors import ConfigError
from kvferry.hostmem.limits import Machine, find_placement, run_near, shortage, size_for
from kvferry.hostmem.slots import (
    CHUNK_BYTES,
    Chunks,
    HostTier,
    PrivateMemory,
    SharedMemory,
    populate,
)
from kvferry.settings.kinds import Auto

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


class HostMemory(Closing):
    """A rank's slots and the threads that make them usable; owns their registrations.

    The slots from 0 to ``ready_slots`` can be used; either all of them are pinned or none is.
    Do not touch the others. Open the pool with ``num_ready=0`` and call the scheduler's
    ``note_ready`` at every step.
    """

    def __init__(
        self,
        asked: int | Auto,
        slot_bytes: int,
        *,
        registrar: Registrar | None = None,
        pin: str = "auto",
        busy: Callable[[], bool] = lambda: False,
        wanted: Callable[[], float] | None = None,
        pci_bus_id: str | None = None,
        num_ranks: int | None = None,
        machine: Machine | None = None,
        shared: SharedMemory | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        num_threads: int = NUM_THREADS,
    ) -> None:
        """``asked`` bytes, for each of ``num_ranks`` on this host that ask for the same.

        Returns when the first chunk is ready. ``registrar`` pins with the GPU's driver (None: not
        pinned), as ``pin`` says (``Config.host_pin``). ``pci_bus_id`` names the GPU to be near to.
        ``busy`` says whether the model runs now, ``wanted`` how many slots were ever written (both
        called from any thread). ``shared`` memory counts once, not once per rank. ConfigError, with
        the limit and the remedy, where the machine cannot give this much.
        """
        machine = machine if machine is not None else Machine()
        if shared is None:
            ranks = num_ranks if num_ranks is not None else machine.num_ranks_here()
            size = size_for(asked, machine, num_ranks=ranks)
        else:
            size = shared.bytes.nbytes
        if size < slot_bytes:
            words = f"host: {format_size(size)} hold no block of {slot_bytes} bytes; give it more"
            raise ConfigError(words)
        pitch = Chunks.lay_out(1, slot_bytes, chunk_bytes).pitch
        chunks = Chunks.lay_out(max(1, size // pitch), slot_bytes, chunk_bytes)
        if shared is not None and (shared.slots.slot_bytes, shared.slots.pitch) != (
            slot_bytes,
            chunks.pitch,
        ):
            raise ConfigError(
                f"the shared host memory has {shared.slots}. This rank's blocks have "
                f"{slot_bytes} bytes every {chunks.pitch}. All ranks must share one layout"
            )
        memory = shared if shared is not None else PrivateMemory(chunks.num_bytes)
        self.tier = HostTier(chunks.num_slots, slot_bytes, chunks=chunks, memory=memory)
        self._shared = shared
        self._bytes = memory.bytes[: chunks.num_bytes]
        self._chunks = chunks
        self._registrar = registrar if pin != "never" else None
        self._busy = busy
        self._wanted = wanted
        self._placement = find_placement(pci_bus_id, machine.read)
        # Pages that another rank has made take no room.
        self._machine = machine if shared is None or shared.is_creator else None
        self._num_threads = max(1, min(num_threads, os.cpu_count() or 1))
        self._stop = threading.Event()
        self._finished = threading.Event()
        self._num_ready = 0  # chunks, from the first on
        self._registered: set[int] = set()  # by address
        self._reason = ""
        self._seconds = 0.0
        self._rest_until = 0.0
        self._began = time.monotonic()
        self._make_first_ready(pin)
        threading.Thread(target=self._grow, name="kvferry-grow-0", daemon=True).start()

    @property
    def num_slots(self) -> int:
        return self.tier.num_slots

    @property
    def ready_slots(self) -> int:
        """How many slots, from slot 0 on, can be used. Never shrinks until ``close``."""
        return self._chunks[self._num_ready - 1].slots_after if self._num_ready else 0

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU's kernels may access the slots; else only copies by the driver may.

        Known from the start, never changes.
        """
        return self._registrar is not None

    @property
    def chunk_bytes(self) -> int:
        """Distance between registrations: one copy must not cross from one to the next."""
        return self._chunks.chunk_bytes

    def stats(self) -> GrowthStats:
        return GrowthStats(
            asked_bytes=self._chunks.num_bytes,
            ready_bytes=self._ready_bytes,
            num_slots=self.num_slots,
            ready_slots=self.ready_slots,
            is_pinned=self.is_pinned and bool(self._num_ready),
            is_growing=not self._finished.is_set(),
            seconds=self._seconds or time.monotonic() - self._began,
            placement=self._placement.words,
            reason=self._reason,
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until growth has ended; False if ``timeout`` seconds passed before."""
        return self._finished.wait(timeout)

    def close(self) -> None:
        """Stop growing, unregister, unmap. Nothing may be copying. Safe to call twice.

        Waits for the chunks in hand. If the driver never returns from a call, the memory stays
        mapped: taking it away under the driver would crash the process.
        """
        self._stop.set()
        if self._finished.wait(_CLOSE_SECONDS):
            self._num_ready = 0
            self._unregister(list(self._registered))
            self._bytes = self._bytes[:0].copy()  # ours was the last hold on the mapping
        else:
            log.error("a thread is stuck while it pins host memory; the memory is left to it")
        self.tier.close()
        if self._shared is not None:
            self._shared.close()

    @property
    def _ready_bytes(self) -> int:
        if not self._num_ready:
            return 0
        last = self._chunks[self._num_ready - 1]
        return last.start + last.num_bytes

    # -- growing --------------------------------------------------------------------------------

    def _make_first_ready(self, pin: str) -> None:
        """Chunk 0, alone: it decides whether the pool is pinned."""
        try:
            self._require_room([0])
            self._populate(0)
        except (OSError, MemoryError) as error:
            raise ConfigError(f"host: not even the first chunk could be had: {error}") from error
        if self._registrar is None and pin == "required":
            raise ConfigError("host_pin: required, but there is no driver to pin host memory with")
        try:
            self._register(0)
        except Exception as error:
            words = f"host memory cannot be pinned: {error}"
            if pin == "required":
                raise ConfigError(f"host_pin: required, but {words}") from error
            self._reason, self._registrar = words, None
            log.warning("%s. Copies are correct but slow", words)
        self._num_ready = 1

    def _grow(self) -> None:
        try:
            while not self._stop.is_set() and self._num_ready < len(self._chunks):
                batch = self._next_batch()
                self._require_room(batch)
                if self._registrar is not None:
                    # Before the driver does: it would fault pages in one by one, under a lock.
                    self._on_threads(self._populate, batch)
                    self._pin(batch)
                else:
                    self._rest()
                    self._work(self._populate, batch, _TOUCH_REST)
        except Exception as error:  # the pool stays smaller; a dead thread would not say so
            kind = "" if isinstance(error, MemoryError) else f"{type(error).__name__}: "
            where = f"chunk {self._num_ready} of {len(self._chunks)}"
            self._reason = "; ".join(filter(None, (self._reason, f"{where}: {kind}{error}")))
        self._end()

    def _next_batch(self) -> Sequence[int]:
        """The chunks to touch together: few beside a busy model, so that it yields soon."""
        count = self._num_threads
        if self._busy():
            count = min(count, _BUSY_BATCH) if self._registrar is not None else 1
        return range(self._num_ready, min(self._num_ready + count, len(self._chunks)))

    def _pin(self, batch: Sequence[int]) -> None:
        """All at once while the model is idle, else one chunk at a time with rests between."""
        while batch and not self._stop.is_set():
            self._rest()
            count = 1 if self._busy() else len(batch)
            self._work(self._register, batch[:count], _PIN_REST)
            batch = batch[count:]

    def _work(self, work: Callable[[int], None], batch: Sequence[int], factor: float) -> None:
        """Do what the model notices; the next rest is ``factor`` times as long as it takes."""
        began = time.monotonic()
        self._on_threads(work, batch)
        now = time.monotonic()
        self._rest_until = now + factor * (now - began)
        if not self._stop.is_set():  # else some were left out
            self._num_ready += len(batch)

    def _rest(self) -> None:
        """Return when the rest is over and more memory is needed, or the model is idle."""
        while self._busy() and not self._stop.is_set():
            left = self._rest_until - time.monotonic()
            if left > 0:
                self._stop.wait(min(left, _LOOK_AGAIN_SECONDS))
            elif (
                self._wanted is not None
                and self._registrar is not None
                and (self.ready_slots - self._wanted()) * self._chunks.pitch >= _AHEAD_BYTES
            ):
                self._stop.wait(_FAR_AHEAD_SECONDS)
            else:
                break

    def _on_threads(self, work: Callable[[int], None], items: Sequence[int]) -> None:
        """Do ``work`` for all items, this thread and helpers together; raises the first fault."""
        left = deque(items)
        faults: list[Exception] = []

        def share() -> None:
            run_near(self._placement)
            with suppress(IndexError):  # nothing is left
                while not faults:
                    item = left.popleft()
                    try:
                        work(item)
                    except Exception as error:
                        faults.append(error)

        helpers = [
            threading.Thread(target=share, name=f"kvferry-grow-{number}", daemon=True)
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
        chunk = self._chunks[index]
        if not self._stop.is_set():
            populate(self._bytes[chunk.start : chunk.start + chunk.num_bytes])

    def _register(self, index: int) -> None:
        if self._registrar is None or self._stop.is_set():
            return
        chunk = self._chunks[index]
        address = int(self._bytes.ctypes.data) + chunk.start
        self._registrar.register_host(address, chunk.num_bytes)
        self._registered.add(address)

    # -- the end --------------------------------------------------------------------------------

    def _end(self) -> None:
        """Unregister what lies behind a chunk that failed, and report."""
        end = int(self._bytes.ctypes.data) + self._ready_bytes
        self._unregister([address for address in self._registered if address >= end])
        self._seconds = time.monotonic() - self._began
        stats = replace(self.stats(), is_growing=False)
        if stats.is_whole:
            log.info("host memory: %s", stats)
        elif not self._stop.is_set():
            log.warning("host memory: %s", stats)
        self._finished.set()

    def _unregister(self, addresses: list[int]) -> None:
        for address in addresses:
            assert self._registrar is not None, "what is registered was registered by one"
            try:
                self._registrar.unregister_host(address)
            except Exception as error:  # the others must still be given back
                log.warning("host memory stays registered: %s", error)
            self._registered.discard(address)
