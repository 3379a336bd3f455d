"""The CUDA driver API (libcuda.so.1) through ctypes: kvferry calls a GPU only through it.

Handles are plain integers. Every error code of the driver becomes a DriverError with its text.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import ClosedError, DriverError

log = logging.getLogger(__name__)

Addresses = npt.NDArray[np.uint64]

SUCCESS = 0
NOT_READY = 600
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
HOST_PORTABLE = 1
CAPTURE_THREAD_LOCAL = 1

# Error codes of calls that this driver or card lacks: not found (500), not supported (801), only
# in a newer driver (36).
UNSUPPORTED = frozenset((36, 500, 801))

_OUT = c_void_p  # the address of a result
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuDriverGetVersion": (_OUT,),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuCtxGetStreamPriorityRange": (_OUT, _OUT),
    "cuStreamCreateWithPriority": (_OUT, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (_OUT, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (_OUT, c_void_p, c_void_p),
    "cuMemAlloc_v2": (_OUT, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (_OUT, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
}
"""Entry points and their signatures. Without a signature ctypes cuts addresses to 32 bits."""


class Priority(Enum):
    """Priority of a stream."""

    LOW = "low"
    HIGH = "high"


class BatchForm(Enum):
    """The signature of ``cuMemcpyBatchAsync`` in this driver, by the version that introduced it."""

    ABSENT = 0
    WITH_FAIL_INDEX = 12080  # CUDA 12.8: nine arguments, failIdx before the stream
    WITHOUT_FAIL_INDEX = 13000  # CUDA 13: eight


@dataclass(frozen=True)
class DeviceIdentity:
    """Name, driver version and PCI bus id of a GPU."""

    name: str
    driver_version: int
    pci_bus_id: str


_BATCH_ARGUMENTS = (
    c_void_p,  # dsts
    c_void_p,  # srcs
    c_void_p,  # sizes
    c_size_t,  # count
    c_void_p,  # attributes: CUmemcpyAttributes, six ints
    POINTER(c_size_t),  # index of the first copy that each attribute applies to
    c_size_t,  # number of attributes
)
IN_STREAM_ORDER = (c_int * 6)(1)
"""Copy attributes: the source is read in stream order. Other access orders allow reads before the
stream's waits, so a store with one of them could read half-written blocks."""

BATCH_WITH_FAIL_INDEX = ctypes.CFUNCTYPE(c_int, *_BATCH_ARGUMENTS, POINTER(c_size_t), c_void_p)
BATCH_WITHOUT_FAIL_INDEX = ctypes.CFUNCTYPE(c_int, *_BATCH_ARGUMENTS, c_void_p)

_FORMS: dict[BatchForm, Any] = {
    BatchForm.WITHOUT_FAIL_INDEX: BATCH_WITHOUT_FAIL_INDEX,
    BatchForm.WITH_FAIL_INDEX: BATCH_WITH_FAIL_INDEX,
}
"""The prototype of each form, the newest first."""


class PushedContext:
    """Makes a CUDA context current in a ``with`` block: the thread may use another device."""

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context
        self._push = driver.bind("cuCtxPushCurrent_v2", c_void_p)
        self._pop = driver.bind("cuCtxPopCurrent_v2", c_void_p)
        self._popped = byref(c_void_p())

    def __enter__(self) -> None:
        code = self._push(self._context)
        if code:
            self._driver.check(code, "cuCtxPushCurrent()")

    def __exit__(self, *_: object) -> None:
        self._pop(self._popped)


class Driver:
    """The driver library bound to one device; owns a reference to its primary context.

    Leaves streams, events and memory to its callers. Any thread may call it inside ``current()``.
    """

    batch_form = BatchForm.ABSENT
    """Form of the batch copy; a caller whose batch copy is refused as unsupported sets ABSENT."""

    def __init__(self, library: Any, device: int = 0) -> None:
        self._library = library
        self._closed = False
        self._calls = {name: self.bind(name, *argtypes) for name, argtypes in _CALLS.items()}
        self._copy = self._calls["cuMemcpyAsync"]
        self._event_query = self._calls["cuEventQuery"]
        self._event_record = self._calls["cuEventRecord"]
        self._stream_wait = self._calls["cuStreamWaitEvent"]
        self._exchange_capture_mode: Callable[..., int] | None = None
        with suppress(DriverError):  # a driver without the call cannot capture graphs either
            self._exchange_capture_mode = self.bind("cuThreadExchangeStreamCaptureMode", _OUT)
        self.check(self.bind("cuInit", c_uint)(0), "cuInit()")
        handle, context = c_int(), c_void_p()
        get = self.bind("cuDeviceGet", c_void_p, c_int)
        self.check(get(byref(handle), device), f"cuDeviceGet({device})")
        self._device = handle.value
        self._batch: Callable[..., int] | None = None
        self._resolve_batch()
        retain = self.bind("cuDevicePrimaryCtxRetain", c_void_p, c_int)
        self.check(retain(byref(context), self._device), f"cuDevicePrimaryCtxRetain({device})")
        self._pushed = PushedContext(self, context.value or 0)

    @classmethod
    def open(cls, device: int = 0) -> Driver:
        """Load this machine's driver for ``device``; DriverError if there is none."""
        try:
            return cls(ctypes.CDLL("libcuda.so.1"), device)
        except OSError as error:
            raise DriverError(f"no NVIDIA driver could be loaded: {error}") from None

    # -- errors ------------------------------------------------------------------------------

    def bind(self, name: str, *argtypes: Any) -> Callable[..., int]:
        """Return the library's function ``name``; DriverError if this driver lacks it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(f"this driver has no {name}", code=500, unsupported=True) from None
        function.argtypes = argtypes
        function.restype = c_int
        return function

    def check(self, code: int, asked: str) -> None:
        """Raise a DriverError for any code but success; ``asked`` describes the call."""
        if code == SUCCESS:
            return
        words = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            self.bind(function, c_int, c_void_p)(code, byref(text))
            words.append((text.value or b"unknown error").decode())
        raise DriverError(
            f"{asked}: {words[0]} ({code}): {words[1]}", code=code, unsupported=code in UNSUPPORTED
        )

    def _call(self, name: str, *args: Any, asked: str = "") -> None:
        code = self._calls[name](*args)
        if code != SUCCESS:
            numbers = ", ".join(f"{arg:#x}" for arg in args if isinstance(arg, int))
            self.check(code, f"{name}({asked or numbers})")

    # -- the device --------------------------------------------------------------------------

    def current(self) -> AbstractContextManager[None]:
        """Return a context in which the device is current on this thread."""
        if self._closed:
            raise ClosedError("the driver was closed; open a new one")
        return self._pushed

    @contextmanager
    def allow_during_capture(self) -> Iterator[None]:
        """Let this thread pin memory or query events while another thread captures a graph.

        Without it the driver refuses the call and invalidates the other thread's capture.
        """
        if self._exchange_capture_mode is None:
            yield
            return
        mode = c_int(CAPTURE_THREAD_LOCAL)
        self._exchange_capture_mode(byref(mode))
        try:
            yield
        finally:
            self._exchange_capture_mode(byref(mode))  # ``mode`` now holds the previous mode

    def version(self) -> int:
        """Return the driver's version as a number: 13000 for CUDA 13.0."""
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return version.value

    def identity(self) -> DeviceIdentity:
        """Return name, driver version and bus id of the device."""
        name, bus = (ctypes.create_string_buffer(256) for _ in range(2))
        self._call("cuDeviceGetName", name, len(name), self._device)
        self._call("cuDeviceGetPCIBusId", bus, len(bus), self._device)
        bus_id = bus.value.decode(errors="replace").lower()
        card = name.value.decode(errors="replace")
        return DeviceIdentity(card, self.version(), bus_id)

    def close(self) -> None:
        """Release the primary context. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.bind("cuDevicePrimaryCtxRelease_v2", c_int)(self._device)

    # -- streams -----------------------------------------------------------------------------

    def create_stream(self, priority: Priority) -> int:
        """Create a stream that does not synchronize with the default stream."""
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        level = least.value if priority is Priority.LOW else greatest.value
        asked = f"priority {level}"
        self._call(
            "cuStreamCreateWithPriority", byref(stream), STREAM_NON_BLOCKING, level, asked=asked
        )
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize_stream(self, stream: int) -> None:
        """Block until all work queued on ``stream`` has ended."""
        self._call("cuStreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Make later work on ``stream`` wait for the most recent record of ``event``."""
        code = self._stream_wait(stream, event, 0)
        if code:
            self.check(code, f"cuStreamWaitEvent({stream:#x}, {event:#x}, 0x0)")

    # -- events ------------------------------------------------------------------------------

    def create_event(self, *, timing: bool) -> int:
        event = c_void_p()
        self._call("cuEventCreate", byref(event), 0 if timing else EVENT_DISABLE_TIMING)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record_event(self, event: int, stream: int) -> None:
        code = self._event_record(event, stream)
        if code:
            self.check(code, f"cuEventRecord({event:#x}, {stream:#x})")

    def event_is_done(self, event: int) -> bool:
        """Whether the work before the last record has ended; DriverError if that work failed."""
        code = self._event_query(event)
        if code == SUCCESS:
            return True
        if code != NOT_READY:
            self.check(code, f"cuEventQuery(event {event:#x})")
        return False

    def elapsed_seconds(self, start: int, end: int) -> float:
        """Return the device time between two timing events whose records are both done."""
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    # -- copies ------------------------------------------------------------------------------

    def copy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """Queue one copy; the driver recognizes which address is host memory."""
        code = self._copy(dst, src, num_bytes, stream)
        if code:
            self.check(code, f"cuMemcpyAsync({num_bytes} bytes from {src:#x} to {dst:#x})")

    def copy_batch_async(
        self, dsts: Addresses, srcs: Addresses, sizes: Addresses, stream: int
    ) -> None:
        """Queue many copies in one call; the driver reads the arrays only during the call."""
        if self._batch is None:
            raise DriverError("this driver has no cuMemcpyBatchAsync", code=500, unsupported=True)
        arguments: list[Any] = [
            _address(dsts),
            _address(srcs),
            _address(sizes),
            len(sizes),
            IN_STREAM_ORDER,
            byref(c_size_t(0)),
            1,
        ]
        if self.batch_form is BatchForm.WITH_FAIL_INDEX:
            arguments.append(byref(c_size_t()))
        code = self._batch(*arguments, stream)
        if code:
            self.check(code, f"cuMemcpyBatchAsync({len(sizes)} copies, stream {stream:#x})")

    # -- memory ------------------------------------------------------------------------------

    def alloc_device(self, num_bytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), num_bytes, asked=f"{num_bytes} bytes")
        return address.value

    def free_device(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def alloc_host(self, num_bytes: int) -> int:
        """Allocate pinned host memory, for small buffers (pools register their own memory)."""
        address, asked = c_void_p(), f"{num_bytes} bytes"
        self._call("cuMemHostAlloc", byref(address), num_bytes, HOST_PORTABLE, asked=asked)
        return address.value or 0

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin memory that the process has already mapped, for all devices; from any thread."""
        asked = f"{num_bytes} bytes at {address:#x}"
        with self.current(), self.allow_during_capture():
            self._call("cuMemHostRegister_v2", address, num_bytes, HOST_PORTABLE, asked=asked)

    def unregister_host(self, address: int) -> None:
        """Undo one ``register_host``, while the memory is still mapped."""
        with self.current(), self.allow_during_capture():
            self._call("cuMemHostUnregister", address)

    # -- the batch copy ----------------------------------------------------------------------

    def _resolve_batch(self, newest_form: BatchForm = BatchForm.WITHOUT_FAIL_INDEX) -> None:
        """Look up the newest form of the batch copy that this driver has."""
        self.batch_form, self._batch = BatchForm.ABSENT, None
        try:
            look_up = self.bind(
                "cuGetProcAddress_v2", c_char_p, c_void_p, c_int, c_uint64, c_void_p
            )
        except DriverError:
            return  # older than CUDA 12, so without the batch copy too
        newest = min(self.version(), newest_form.value)
        for form, prototype in _FORMS.items():
            # A driver asked for a newer form than its own may return its older one, and nine
            # arguments would be called as eight. So check the driver's version first.
            if form.value > newest:
                continue
            address, status = c_void_p(), c_int()
            code = look_up(b"cuMemcpyBatchAsync", byref(address), form.value, 0, byref(status))
            if code == 0 and address.value:
                self.batch_form = form
                self._batch = prototype(address.value)
                return


def _address(array: Addresses) -> int:
    """Return an array's address; ``array.ctypes.data`` takes three times as long."""
    return ctypes.addressof(c_char.from_buffer(array.data))


class Handles:
    """Owns streams, events and memory of a driver; ``close`` releases them, the newest first."""

    def __init__(self) -> None:
        self._taken: list[tuple[Callable[[int], None], int]] = []

    def take(self, handle: int, give: Callable[[int], None]) -> int:
        """Own ``handle``, which ``give`` releases; return it."""
        self._taken.append((give, handle))
        return handle

    def close(self) -> None:
        """Release everything. An error is logged and leaks one handle. Safe to call twice."""
        while self._taken:
            give, handle = self._taken.pop()
            try:
                give(handle)
            except DriverError as error:
                log.warning("something taken from the driver was not given back: %s", error)


class EventPool:
    """Reuses events; owns all of them until ``close``. Safe to use from several threads."""

    def __init__(self, driver: Driver, *, timing: bool) -> None:
        self._driver = driver
        self._timing = timing
        self._free: list[int] = []
        self._all = Handles()

    def take(self) -> int:
        """Return a free event, or a new one; DriverError if the driver refuses it."""
        try:
            return self._free.pop()
        except IndexError:
            event = self._driver.create_event(timing=self._timing)
            return self._all.take(event, self._driver.destroy_event)

    def give(self, event: int) -> None:
        """Give back an event whose last record is done, or that is never queried again."""
        self._free.append(event)

    def close(self) -> None:
        """Destroy all events, also those in use: the driver lets pending ones end first."""
        self._free.clear()
        self._all.close()
