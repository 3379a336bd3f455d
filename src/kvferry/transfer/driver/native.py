"""What the CUDA and HIP drivers have in common, bound through ctypes.

The two libraries mirror each other call by call; a subclass names its entry points and adds what
differs. Signatures are set once per function: without them ctypes cuts addresses to 32 bits.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from kvferry.errors import ClosedError, DriverError
from kvferry.transfer.driver.base import BatchForm, DeviceIdentity, Priority, pcie_link

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
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "driver_version": (_OUT,),
    "device_name": (c_char_p, c_int, c_int),
    "pci_bus_id": (c_char_p, c_int, c_int),
    "priority_range": (_OUT, _OUT),
    "stream_create": (_OUT, c_uint, c_int),
    "stream_destroy": (c_void_p,),
    "stream_query": (c_void_p,),
    "stream_synchronize": (c_void_p,),
    "stream_wait_event": (c_void_p, c_void_p, c_uint),
    "event_create": (_OUT, c_uint),
    "event_destroy": (c_void_p,),
    "event_record": (c_void_p, c_void_p),
    "event_query": (c_void_p,),
    "event_elapsed": (_OUT, c_void_p, c_void_p),
    "alloc_device": (_OUT, c_size_t),
    "free_device": (c_uint64,),
    "alloc_host": (_OUT, c_size_t, c_uint),
    "free_host": (c_void_p,),
    "register_host": (c_void_p, c_size_t, c_uint),
    "unregister_host": (c_void_p,),
}


class NativeDriver(ABC):
    """Owns the binding of one driver library to one device; leaves streams to its callers."""

    NAMES: Mapping[str, str]
    """Our name of each entry point in SIGNATURES to the library's."""

    max_batch: int | None = None
    has_values = False

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self._device = device
        self._closed = False
        self.batch_form = BatchForm.ABSENT
        self._calls = {ours: self.bind(self.NAMES[ours], *SIGNATURES[ours]) for ours in SIGNATURES}
        # The calls made for every transfer, without a dictionary in between.
        self._event_record = self._calls["event_record"]
        self._event_query = self._calls["event_query"]
        self._stream_query = self._calls["stream_query"]
        self._stream_wait_event = self._calls["stream_wait_event"]
        self._exchange_capture_mode: Callable[..., int] | None = None
        with suppress(DriverError):  # a driver without it has no captures to break either
            self._exchange_capture_mode = self.bind(self.NAMES["exchange_capture_mode"], _OUT)

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
            self.check(code, f"{self.NAMES[ours]}({asked})")

    # -- the device --------------------------------------------------------------------------

    def version(self) -> int:
        """The driver's version as a number: 13000 for CUDA 13.0."""
        version = c_int()
        self._call("driver_version", byref(version))
        return version.value

    def identity(self) -> DeviceIdentity:
        name, bus = (ctypes.create_string_buffer(256) for _ in range(2))
        self._call("device_name", name, len(name), self._device)
        self._call("pci_bus_id", bus, len(bus), self._device)
        bus_id = bus.value.decode(errors="replace").lower()
        return DeviceIdentity(
            name=name.value.decode(errors="replace"),
            driver_version=self.version(),
            pci_bus_id=bus_id,
            link=pcie_link(bus_id),
        )

    # -- streams -----------------------------------------------------------------------------

    def create_stream(self, priority: Priority) -> int:
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._call("priority_range", byref(least), byref(greatest))
        tier = least.value if priority is Priority.LOW else greatest.value
        self._call(
            "stream_create", byref(stream), STREAM_NON_BLOCKING, tier, asked=f"priority {tier}"
        )
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("stream_destroy", stream, asked=f"stream {stream:#x}")

    def stream_is_idle(self, stream: int) -> bool:
        code = self._stream_query(stream)
        if code == SUCCESS:
            return True
        if code != NOT_READY:
            self.check(code, f"{self.NAMES['stream_query']}(stream {stream:#x})")
        return False

    def synchronize_stream(self, stream: int) -> None:
        self._call("stream_synchronize", stream, asked=f"stream {stream:#x}")

    def stream_wait_event(self, stream: int, event: int) -> None:
        code = self._stream_wait_event(stream, event, 0)
        if code != SUCCESS:
            self.check(
                code,
                f"{self.NAMES['stream_wait_event']}(stream {stream:#x}, event {event:#x})",
            )

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        raise DriverError("streams cannot wait for values here", code=801, unsupported=True)

    def stream_write_value(self, stream: int, address: int, value: int) -> None:
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
            self.check(code, f"{self.NAMES['event_record']}(event {event:#x}, stream {stream:#x})")

    def event_is_done(self, event: int) -> bool:
        code = self._event_query(event)
        if code == SUCCESS:
            return True
        if code != NOT_READY:
            self.check(code, f"{self.NAMES['event_query']}(event {event:#x})")
        return False

    def elapsed_seconds(self, start: int, end: int) -> float:
        milliseconds = c_float()
        self._call("event_elapsed", byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    # -- memory ------------------------------------------------------------------------------

    def alloc_device(self, num_bytes: int) -> int:
        address = c_uint64()
        self._call("alloc_device", byref(address), num_bytes, asked=f"{num_bytes} bytes")
        return address.value

    def free_device(self, address: int) -> None:
        self._call("free_device", address, asked=f"{address:#x}")

    def alloc_host(self, num_bytes: int) -> int:
        address = c_void_p()
        self._call(
            "alloc_host", byref(address), num_bytes, HOST_PORTABLE, asked=f"{num_bytes} bytes"
        )
        return address.value or 0

    def free_host(self, address: int) -> None:
        self._call("free_host", address, asked=f"{address:#x}")

    def register_host(self, address: int, num_bytes: int) -> None:
        with self.beside_captures():
            self._call(
                "register_host",
                address,
                num_bytes,
                HOST_PORTABLE,
                asked=f"{num_bytes} bytes at {address:#x}",
            )

    def unregister_host(self, address: int) -> None:
        with self.beside_captures():
            self._call("unregister_host", address, asked=f"{address:#x}")

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

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ClosedError("the driver was closed; open a new one")
