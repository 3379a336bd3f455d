"""One rank's host memory: its size, mapping, growth in the background and closing.

Touching and pinning a pool takes seconds to minutes. So the constructor returns when the first
chunk is ready, and threads make the other chunks ready in batches, in order of slot number.

Several threads touch a batch before it is pinned: fresh pages arrive at 8 GB/s while no page is
pinned, and at 3 GB/s beside pinning (NVIDIA H200 host, 16 vCPU, Linux 6.18).

Beside a busy model growth is paced: after work that slows the model, growth pauses ``k`` times as
long as the work took. ``k`` is 0 while the model is idle. After a fault the pool stays smaller than
asked; its ready slots stay ready.
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
from kvferry.hostmem.limits import Machine, bind_thread, find_placement, shortage, size_for
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
"""Threads that touch pages; at most one per processor. Pages not yet backed by the hypervisor came
at 8 GB/s with 16 threads, at 6.3 GB/s with 8 (16 vCPU, Linux 6.18, 2026-11-15)."""

_PIN_PAUSE_FACTOR = 9.0
"""The factor ``k`` for pinning: one chunk at a time, then a pause of nine times its duration.

While the driver pins, kernel launches wait behind an unfair lock. With 64 MiB at a time, a step of
1.3 ms (one graph and thirty small launches) took 430 ms without pauses. It took 1.04 to 1.15 times
as long with ``k = 3``, and no longer with ``k = 9``, which still pins 2.5 GB/s. (One NVIDIA H200,
driver 580, 2026-11.)
"""

_MOST_UNUSED_BYTES = 4 * GiB
"""Bytes of unused ready memory at which growth stops beside a busy model: growing further can wait
for an idle engine."""

_TOUCH_PAUSE_FACTOR = 0.5
"""The factor ``k`` for touching pages without a GPU, where the model needs the processors."""

_BUSY_BATCH = 4
"""Chunks touched per batch beside a model on a GPU. Touching does not slow the model."""

_POLL_SECONDS = 0.005
_SLOW_POLL_SECONDS = 0.05  # polls rarely, as such a pause may last hours and takes the GIL
_CLOSE_SECONDS = 30.0


class Registrar(Protocol):
    """Registers host memory with a GPU driver; called from several threads at once."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin memory that is mapped and populated; raises the driver's error."""

    def unregister_host(self, address: int) -> None:
        """Undo one ``register_host``, while the memory is still mapped."""


@dataclass(frozen=True)
class GrowthStats:
    """A snapshot of one rank's host memory.

    ``reason`` says why growth stopped or why the memory is not pinned.
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
    """Owns a rank's host slots, their registrations, and the threads that make them ready.

    Only the first ``ready_slots`` slots may be used; either all of them are pinned or none is. Open
    the pool with ``num_ready=0`` and call the scheduler's ``note_ready`` at every step.
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
        """Take ``asked`` bytes on a host where ``num_ranks`` ranks ask for as much.

        Returns when the first chunk is ready. ``registrar`` pins with the GPU's driver (None: not
        pinned); ``pin`` is ``Config.host_pin``. Pages come from the NUMA node of ``pci_bus_id``.
        ``busy`` returns whether the model runs now, ``wanted`` how many slots were ever written;
        both are called from any thread. ``shared`` memory counts once, not once per rank.
        ConfigError, with the limit and the remedy, if the machine has too little memory.
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
        # Only the creator of shared memory allocates its pages, so only it checks the limits.
        self._machine = machine if shared is None or shared.is_creator else None
        self._num_threads = max(1, min(num_threads, os.cpu_count() or 1))
        self._stop = threading.Event()
        self._finished = threading.Event()
        self._num_ready = 0  # ready chunks, from the first on
        self._registered: set[int] = set()  # by address
        self._reason = ""
        self._seconds = 0.0
        self._pause_until = 0.0
        self._began = time.monotonic()
        self._make_first_ready(pin)
        threading.Thread(target=self._grow, name="kvferry-grow-0", daemon=True).start()

    @property
    def num_slots(self) -> int:
        return self.tier.num_slots

    @property
    def ready_slots(self) -> int:
        """Number of usable slots, from slot 0 on. Never shrinks before ``close``."""
        return self._chunks[self._num_ready - 1].slots_after if self._num_ready else 0

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU's kernels may access the slots, not only copies by the driver.

        Never changes after the constructor.
        """
        return self._registrar is not None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one registration with the driver; one copy must not cross its end."""
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
        """Wait until growth has ended; False if ``timeout`` seconds passed first."""
        return self._finished.wait(timeout)

    def close(self) -> None:
        """Stop growth, unregister, unmap. No copy may be in flight. Safe to call twice.

        Waits for the chunks that threads are working on. If the driver never returns from a call,
        the memory stays mapped: unmapping it under the driver would crash the process.
        """
        self._stop.set()
        if self._finished.wait(_CLOSE_SECONDS):
            self._num_ready = 0
            self._unregister(list(self._registered))
            self._bytes = self._bytes[:0].copy()  # drops this object's reference to the mapping
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
        """Make chunk 0 ready and decide whether the pool is pinned."""
        try:
            self._require_memory([0])
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
                self._require_memory(batch)
                if self._registrar is not None:
                    # Before pinning: the driver would fault pages in one by one, under a lock.
                    self._in_parallel(self._populate, batch)
                    self._pin(batch)
                else:
                    self._wait_to_grow()
                    self._do_paced(self._populate, batch, _TOUCH_PAUSE_FACTOR)
        except Exception as error:  # the pool stays smaller; stats must give the reason
            kind = "" if isinstance(error, MemoryError) else f"{type(error).__name__}: "
            where = f"chunk {self._num_ready} of {len(self._chunks)}"
            self._reason = "; ".join(filter(None, (self._reason, f"{where}: {kind}{error}")))
        self._end()

    def _next_batch(self) -> Sequence[int]:
        """Return the chunks to touch together: few beside a busy model, so that growth yields."""
        count = self._num_threads
        if self._busy():
            count = min(count, _BUSY_BATCH) if self._registrar is not None else 1
        return range(self._num_ready, min(self._num_ready + count, len(self._chunks)))

    def _pin(self, batch: Sequence[int]) -> None:
        """Pin a batch: all at once while the model is idle, else chunk by chunk with pauses."""
        while batch and not self._stop.is_set():
            self._wait_to_grow()
            count = 1 if self._busy() else len(batch)
            self._do_paced(self._register, batch[:count], _PIN_PAUSE_FACTOR)
            batch = batch[count:]

    def _do_paced(self, work: Callable[[int], None], batch: Sequence[int], factor: float) -> None:
        """Do work that slows the model; the next pause takes ``factor`` times as long."""
        began = time.monotonic()
        self._in_parallel(work, batch)
        now = time.monotonic()
        self._pause_until = now + factor * (now - began)
        if not self._stop.is_set():  # else some chunks were skipped
            self._num_ready += len(batch)

    def _wait_to_grow(self) -> None:
        """Wait until the pause is over and more memory is needed, or the model is idle."""
        while self._busy() and not self._stop.is_set():
            left = self._pause_until - time.monotonic()
            if left > 0:
                self._stop.wait(min(left, _POLL_SECONDS))
            elif (
                self._wanted is not None
                and self._registrar is not None
                and (self.ready_slots - self._wanted()) * self._chunks.pitch >= _MOST_UNUSED_BYTES
            ):
                self._stop.wait(_SLOW_POLL_SECONDS)
            else:
                break

    def _in_parallel(self, work: Callable[[int], None], items: Sequence[int]) -> None:
        """Do ``work`` for all items on this thread and helper threads; raises the first fault."""
        left = deque(items)
        faults: list[Exception] = []

        def share() -> None:
            bind_thread(self._placement)
            with suppress(IndexError):  # no item is left
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
        with suppress(RuntimeError):  # no more threads may start: the others take longer
            for helper in helpers:
                helper.start()
        share()
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
        if faults:
            raise faults[0]

    def _require_memory(self, batch: Sequence[int]) -> None:
        """Raise MemoryError before the kernel would have to kill a process for memory."""
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
        """Unregister the chunks after one that failed, and log how growth ended."""
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
            except Exception as error:  # the other chunks must still be unregistered
                log.warning("host memory stays registered: %s", error)
            self._registered.discard(address)
