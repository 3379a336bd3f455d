"""Compute that waits for a load which is still being queued: gates in host memory.

::

    caller   load: first piece │ compute: wait for the gate │ more compute ...
    thread                       the other pieces │ load: open the gate
    card     compute ──────────────────────────────[gate]──▶ what reads the loaded blocks

An event can be waited for only once it is recorded, and it is recorded when the last piece is
queued. A gate can be waited for before: it is a number in pinned memory, which the load's stream
writes behind its last piece.

The driver sees no order between the two, so we keep it: **what may come behind a gate is queued
only when everything before the gate is**. Then no stream, slot or buffer of ours is ever held by
work that waits for what has not been queued yet. Nor is a gate shut on a stream that shares a
channel with ours (``channels.py``). What others do meanwhile we cannot know: a gate that stays shut
too long is opened by the host, and the load it stands for has failed (``gate_watch.py``).
"""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass, field

from kvferry.device.driver.base import Driver
from kvferry.errors import DriverError

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
