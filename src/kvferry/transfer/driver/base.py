"""The one thin layer between kvferry and a card: its driver, through ctypes.

Everything the copy engine asks of a card goes through ``Driver``, so that a fake can stand in for
all of it. Handles are plain integers. Every refusal is a DriverError in the driver's own words.
Nothing here imports torch, and nothing is compiled.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import ClosedError, DriverError

log = logging.getLogger(__name__)

Addresses = npt.NDArray[np.uint64]

SYSFS = Path("/sys/bus/pci/devices")
UNKNOWN_LINK = "unknown"

UNSAFE_STREAMS = frozenset((0, 1, 2))
"""The default stream and its two special handles (legacy, per-thread).

The batch copy refuses them, and on the legacy one a copy would wait for, and hold up, everything.
"""

SUCCESS = 0
NOT_READY = 600
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
HOST_PORTABLE = 1
CAPTURE_THREAD_LOCAL = 1

# Codes that say "not on this driver or card", the same in both libraries: a call that is missing
# (500), not supported (801), or (36) only in a newer driver.
UNSUPPORTED = frozenset((36, 500, 801))

_OUT = c_void_p  # the address of a result
CUDA, HIP = 0, 1
CALLS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "version": ("cuDriverGetVersion", "hipDriverGetVersion", (_OUT,)),
    "name": ("cuDeviceGetName", "hipDeviceGetName", (c_char_p, c_int, c_int)),
    "bus_id": ("cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId", (c_char_p, c_int, c_int)),
    "priorities": ("cuCtxGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange", (_OUT, _OUT)),
    "stream_create": (
        "cuStreamCreateWithPriority",
        "hipStreamCreateWithPriority",
        (_OUT, c_uint, c_int),
    ),
    "stream_destroy": ("cuStreamDestroy_v2", "hipStreamDestroy", (c_void_p,)),
    "stream_query": ("cuStreamQuery", "hipStreamQuery", (c_void_p,)),
    "stream_synchronize": ("cuStreamSynchronize", "hipStreamSynchronize", (c_void_p,)),
    "stream_wait_event": ("cuStreamWaitEvent", "hipStreamWaitEvent", (c_void_p, c_void_p, c_uint)),
    "event_create": ("cuEventCreate", "hipEventCreateWithFlags", (_OUT, c_uint)),
    "event_destroy": ("cuEventDestroy_v2", "hipEventDestroy", (c_void_p,)),
    "event_record": ("cuEventRecord", "hipEventRecord", (c_void_p, c_void_p)),
    "event_query": ("cuEventQuery", "hipEventQuery", (c_void_p,)),
    "event_elapsed": ("cuEventElapsedTime", "hipEventElapsedTime", (_OUT, c_void_p, c_void_p)),
    "alloc_device": ("cuMemAlloc_v2", "hipMalloc", (_OUT, c_size_t)),
    "free_device": ("cuMemFree_v2", "hipFree", (c_uint64,)),
    "alloc_host": ("cuMemHostAlloc", "hipHostMalloc", (_OUT, c_size_t, c_uint)),
    "free_host": ("cuMemFreeHost", "hipHostFree", (c_void_p,)),
    "register_host": ("cuMemHostRegister_v2", "hipHostRegister", (c_void_p, c_size_t, c_uint)),
    "unregister_host": ("cuMemHostUnregister", "hipHostUnregister", (c_void_p,)),
}
"""Entry points of both libraries, which mirror each other, and their signatures.

Signatures are set once per function: without them ctypes cuts addresses to 32 bits.
"""
CAPTURE_MODE = ("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode")


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


class Driver(ABC):
    """One driver library bound to one device; leaves streams, events and memory to its callers.

    Calls may come from any thread inside ``current()``.
    """

    library_number = CUDA
    """Which of the two names in ``CALLS`` is the library's."""

    batch_form = BatchForm.ABSENT
    """Set to ABSENT by the first caller that learns the batch copy is not supported after all."""

    max_batch: int | None = None
    """Most descriptors one batch call may carry; None where there is no limit."""

    has_values = False
    """Whether a stream can write a number to host memory, and another one wait for it."""

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self._device = device
        self._closed = False
        number = self.library_number
        self._names = {ours: (cuda, hip)[number] for ours, (cuda, hip, _) in CALLS.items()}
        self._calls = {ours: self.bind(self._names[ours], *CALLS[ours][2]) for ours in CALLS}
        # The calls made for every transfer, without a dictionary in between.
        self._event_record = self._calls["event_record"]
        self._event_query = self._calls["event_query"]
        self._stream_query = self._calls["stream_query"]
        self._stream_wait_event = self._calls["stream_wait_event"]
        self._exchange_capture_mode: Callable[..., int] | None = None
        with suppress(DriverError):  # a driver without it has no captures to break either
            self._exchange_capture_mode = self.bind(CAPTURE_MODE[self.library_number], _OUT)

    # -- refusals, in the driver's words -----------------------------------------------------

    def bind(self, name: str, *argtypes: Any) -> Callable[..., int]:
        """The library's function ``name``; DriverError when this driver does not have it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(f"this driver has no {name}", code=500, unsupported=True) from None
        function.argtypes = argtypes
        function.restype = c_int
        return function

    @abstractmethod
    def error_words(self, code: int) -> tuple[str, str]:
        """Name and description of an error code, from the library itself."""

    def check(self, code: int, asked: str) -> None:
        """Turn a code other than success into a DriverError that says what was asked."""
        if code != SUCCESS:
            name, words = self.error_words(code)
            raise DriverError(
                f"{asked}: {name} ({code}): {words}", code=code, unsupported=code in UNSUPPORTED
            )

    def _call(self, ours: str, *args: Any, asked: str = "") -> None:
        code = self._calls[ours](*args)
        if code != SUCCESS:
            self.check(code, f"{self._names[ours]}({asked})")

    # -- the device --------------------------------------------------------------------------

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Make the device current on this thread for a while, then restore what was."""

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Let this thread pin memory, or ask for events, while another one captures a graph.

        Without it the call is refused, and the other thread's capture is spoiled.
        """
        if self._exchange_capture_mode is None:
            yield
            return
        mode = c_int(CAPTURE_THREAD_LOCAL)
        self._exchange_capture_mode(byref(mode))
        try:
            yield
        finally:
            self._exchange_capture_mode(byref(mode))  # holds what was before

    def version(self) -> int:
        """The driver's version as a number: 13000 for CUDA 13.0."""
        version = c_int()
        self._call("version", byref(version))
        return version.value

    def identity(self) -> DeviceIdentity:
        """Name, driver and link of the device."""
        name, bus = (ctypes.create_string_buffer(256) for _ in range(2))
        self._call("name", name, len(name), self._device)
        self._call("bus_id", bus, len(bus), self._device)
        bus_id = bus.value.decode(errors="replace").lower()
        card = name.value.decode(errors="replace")
        return DeviceIdentity(card, self.version(), bus_id, pcie_link(bus_id))

    @abstractmethod
    def close(self) -> None:
        """Let go of the device. Safe to call twice."""

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ClosedError("the driver was closed; open a new one")

    # -- streams -----------------------------------------------------------------------------

    def create_stream(self, priority: Priority) -> int:
        """A stream that never waits for the default stream by itself."""
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._call("priorities", byref(least), byref(greatest))
        level = least.value if priority is Priority.LOW else greatest.value
        asked = f"priority {level}"
        self._call("stream_create", byref(stream), STREAM_NON_BLOCKING, level, asked=asked)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("stream_destroy", stream, asked=f"stream {stream:#x}")

    def stream_is_idle(self, stream: int) -> bool:
        """Whether all work queued on ``stream`` has ended."""
        code = self._stream_query(stream)
        if code == SUCCESS:
            return True
        if code != NOT_READY:
            self.check(code, f"{self._names['stream_query']}(stream {stream:#x})")
        return False

    def synchronize_stream(self, stream: int) -> None:
        """Block until all work queued on ``stream`` has ended."""
        self._call("stream_synchronize", stream, asked=f"stream {stream:#x}")

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Hold later work on ``stream`` until the last record of ``event`` so far is reached.

        Captures that record now: the event may be recorded anew at once.
        """
        code = self._stream_wait_event(stream, event, 0)
        if code != SUCCESS:
            asked = f"stream {stream:#x}, event {event:#x}"
            self.check(code, f"{self._names['stream_wait_event']}({asked})")

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        """Hold later work on ``stream`` until the 32-bit number at ``address`` is ``value``.

        Or one after it, up to half the range. The write may be queued later: the driver knows of no
        order between the two, so the work that writes it must not wait for the work that waits.
        """
        raise DriverError("streams cannot wait for values here", code=801, unsupported=True)

    def stream_write_value(self, stream: int, address: int, value: int) -> None:
        """Write the number once all work queued on ``stream`` has ended and can be seen."""
        raise DriverError("streams cannot write values here", code=801, unsupported=True)

    # -- events ------------------------------------------------------------------------------

    def create_event(self, *, timing: bool) -> int:
        event = c_void_p()
        self._call("event_create", byref(event), 0 if timing else EVENT_DISABLE_TIMING)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self._call("event_destroy", event, asked=f"event {event:#x}")

    def record_event(self, event: int, stream: int) -> None:
        code = self._event_record(event, stream)
        if code != SUCCESS:
            self.check(code, f"{self._names['event_record']}(event {event:#x}, stream {stream:#x})")

    def event_is_done(self, event: int) -> bool:
        """Whether the work before the last record has ended; raises the fault of that work."""
        code = self._event_query(event)
        if code == SUCCESS:
            return True
        if code != NOT_READY:
            self.check(code, f"{self._names['event_query']}(event {event:#x})")
        return False

    def elapsed_seconds(self, start: int, end: int) -> float:
        """Device time between two finished records of timing events."""
        milliseconds = c_float()
        self._call("event_elapsed", byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    # -- copies ------------------------------------------------------------------------------

    @abstractmethod
    def copy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """Queue one copy; the driver finds out which side is host memory."""

    @abstractmethod
    def copy_batch_async(
        self, dsts: Addresses, srcs: Addresses, sizes: Addresses, order: SourceOrder, stream: int
    ) -> None:
        """Queue many copies in one call; the arrays are read during the call only."""

    # -- memory ------------------------------------------------------------------------------

    def alloc_device(self, num_bytes: int) -> int:
        address = c_uint64()
        self._call("alloc_device", byref(address), num_bytes, asked=f"{num_bytes} bytes")
        return address.value

    def free_device(self, address: int) -> None:
        self._call("free_device", address, asked=f"{address:#x}")

    def alloc_host(self, num_bytes: int) -> int:
        """Pinned host memory; for small buffers (pools register memory of their own)."""
        address, asked = c_void_p(), f"{num_bytes} bytes"
        self._call("alloc_host", byref(address), num_bytes, HOST_PORTABLE, asked=asked)
        return address.value or 0

    def free_host(self, address: int) -> None:
        self._call("free_host", address, asked=f"{address:#x}")

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin memory the process already has, for every device."""
        asked = f"{num_bytes} bytes at {address:#x}"
        with self.beside_captures():
            self._call("register_host", address, num_bytes, HOST_PORTABLE, asked=asked)

    def unregister_host(self, address: int) -> None:
        with self.beside_captures():
            self._call("unregister_host", address, asked=f"{address:#x}")


class Handles:
    """Owns what a driver gave out, until ``close`` gives it back, the newest first."""

    def __init__(self) -> None:
        self._taken: list[tuple[Callable[[int], None], int]] = []

    def take(self, handle: int, give: Callable[[int], None]) -> int:
        """Own ``handle``, which ``give`` gives back; returns it."""
        self._taken.append((give, handle))
        return handle

    def close(self) -> None:
        """Give everything back. A refusal is logged and loses one handle. Safe to call twice."""
        while self._taken:
            give, handle = self._taken.pop()
            try:
                give(handle)
            except DriverError as error:
                log.warning("something taken from the driver was not given back: %s", error)


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
        handles = Handles()
        for event in events:
            handles.take(event, self._driver.destroy_event)
        handles.close()


def pcie_link(bus_id: str, sysfs: Path = SYSFS) -> str:
    """The widest link the card can have here, as in ``"32.0 GT/s PCIe x16"``.

    The maximum, not the current state: an idle card lowers its link, and a profile must not
    depend on whether the card happened to be idle. Guests often hide it: then ``"unknown"``.
    """
    # The driver may write the domain with eight digits, the kernel uses four.
    domain, _, rest = bus_id.lower().partition(":")
    device = sysfs / f"{domain[-4:]}:{rest}"
    try:
        speed = (device / "max_link_speed").read_text().strip()
        width = (device / "max_link_width").read_text().strip()
    except OSError:
        return UNKNOWN_LINK
    # 255 lanes is how the kernel spells "the card would not say".
    if not speed or speed.lower().startswith("unknown") or width in ("", "0", "255"):
        return UNKNOWN_LINK
    return f"{speed} x{width}"
