"""What a GPU driver must offer: the one thin layer between kvferry and a card.

Everything the copy engine asks of a card goes through ``Driver``, so that a fake can stand in for
all of it. Handles are plain integers. Every refusal is a DriverError in the driver's own words.
Nothing here imports torch, and nothing is compiled.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import DriverError

log = logging.getLogger(__name__)

Addresses = npt.NDArray[np.uint64]

SYSFS = Path("/sys/bus/pci/devices")
UNKNOWN_LINK = "unknown"

UNSAFE_STREAMS = frozenset((0, 1, 2))
"""The default stream and its two special handles (legacy, per-thread).

The batch copy refuses them, and on the legacy one a copy would wait for, and hold up, everything.
"""


class SourceOrder(Enum):
    """When a batch copy may read its source. The write always lands in stream order.

    ANY allows the read before earlier waits on the stream, even at call time: on live KV that is
    a read of half-written blocks. Only a source that no one can be writing may be read so.
    """

    STREAM = 1
    ANY = 3


class Priority(Enum):
    """How urgent a stream's work is beside the model's."""

    LOW = "low"
    HIGH = "high"


class BatchForm(Enum):
    """Which form of the batch copy this driver has."""

    ABSENT = "absent"
    WITH_FAIL_INDEX = "12080"  # CUDA 12.8: nine arguments, failIdx before the stream
    WITHOUT_FAIL_INDEX = "13000"  # CUDA 13: eight


@dataclass(frozen=True)
class DeviceIdentity:
    """What a measurement on this device depends on."""

    name: str
    driver_version: int
    pci_bus_id: str
    link: str


class Driver(Protocol):
    """A GPU driver on one device. Calls may come from any thread inside ``current()``."""

    batch_form: BatchForm
    """Set to ABSENT by the first caller that learns the batch copy is not supported after all."""

    max_batch: int | None
    """Most descriptors one batch call may carry; None where there is no limit."""

    has_values: bool
    """Whether a stream can write a number to host memory, and another one wait for it."""

    def current(self) -> AbstractContextManager[None]:
        """Make the device current on this thread for a while, then restore what was."""

    def beside_captures(self) -> AbstractContextManager[None]:
        """Within it this thread disturbs no graph that another one captures."""

    def identity(self) -> DeviceIdentity:
        """Name, driver and link of the device."""

    def create_stream(self, priority: Priority) -> int:
        """A stream that never waits for the default stream by itself."""

    def destroy_stream(self, stream: int) -> None: ...

    def stream_is_idle(self, stream: int) -> bool:
        """Whether all work queued on ``stream`` has ended."""

    def synchronize_stream(self, stream: int) -> None:
        """Block until all work queued on ``stream`` has ended."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Hold later work on ``stream`` until the last record of ``event`` so far is reached.

        Captures that record now: the event may be recorded anew at once.
        """

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        """Hold later work on ``stream`` until the 32-bit number at ``address`` is ``value``.

        Or one after it, up to half the range. What writes it may be queued later: the driver knows
        of no order between the two, so nothing that writes it may wait for what waits for it.
        """

    def stream_write_value(self, stream: int, address: int, value: int) -> None:
        """Write the number once all work queued on ``stream`` has ended and can be seen."""

    def create_event(self, *, timing: bool) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def record_event(self, event: int, stream: int) -> None: ...

    def event_is_done(self, event: int) -> bool:
        """Whether the work before the last record has ended; raises what that work failed of."""

    def elapsed_seconds(self, start: int, end: int) -> float:
        """Device time between two finished records of timing events."""

    def copy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """Queue one copy; the driver finds out which side is host memory."""

    def copy_batch_async(
        self,
        dsts: Addresses,
        srcs: Addresses,
        sizes: Addresses,
        order: SourceOrder,
        stream: int,
    ) -> None:
        """Queue many copies in one call; the arrays are read during the call only."""

    def alloc_device(self, num_bytes: int) -> int: ...

    def free_device(self, address: int) -> None: ...

    def alloc_host(self, num_bytes: int) -> int:
        """Pinned host memory; for small buffers (pools register memory of their own)."""

    def free_host(self, address: int) -> None: ...

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin memory the process already has, for every device."""

    def unregister_host(self, address: int) -> None: ...

    def close(self) -> None:
        """Let go of the device. Safe to call twice."""


class EventPool:
    """Owns every event it ever handed out, until ``close``. Safe to use from several threads."""

    def __init__(self, driver: Driver, *, timing: bool) -> None:
        self._driver = driver
        self._timing = timing
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._all: set[int] = set()

    def take(self) -> int:
        """An event for the caller alone; DriverError when a new one is needed and refused."""
        with self._lock:
            if self._free:
                return self._free.pop()
            event = self._driver.create_event(timing=self._timing)
            self._all.add(event)
            return event

    def give(self, event: int) -> None:
        """Return an event whose last record is done, or that nothing will query any more."""
        with self._lock:
            self._free.append(event)

    def close(self) -> None:
        """Destroy every event, held or not: the driver lets pending ones end first."""
        with self._lock:
            events, self._all, self._free = self._all, set(), []
        for event in events:
            try:
                self._driver.destroy_event(event)
            except DriverError as error:
                log.warning("an event was not given back: %s", error)


def pcie_link(bus_id: str, sysfs: Path = SYSFS) -> str:
    """The widest link the card can have here, as in ``"32.0 GT/s PCIe x16"``.

    The maximum, not the current state: an idle card lowers its link, and a profile must not
    depend on whether the card happened to be idle. Guests often hide it: then ``"unknown"``.
    """
    device = sysfs / _canonical(bus_id)
    try:
        speed = (device / "max_link_speed").read_text().strip()
        width = (device / "max_link_width").read_text().strip()
    except OSError:
        return UNKNOWN_LINK
    # 255 lanes is how the kernel spells "the card would not say".
    if not speed or speed.lower().startswith("unknown") or width in ("", "0", "255"):
        return UNKNOWN_LINK
    return f"{speed} x{width}"


def _canonical(bus_id: str) -> str:
    """The driver may write the domain with eight digits, the kernel uses four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
