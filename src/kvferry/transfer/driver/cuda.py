"""The CUDA driver: libcuda.so.1 through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from kvferry.errors import DriverError
from kvferry.transfer.driver.base import Addresses, BatchForm, Driver, SourceOrder


class MemcpyLocation(ctypes.Structure):
    """CUmemLocation; a hint that only managed memory uses."""

    _fields_ = (("type", c_int), ("id", c_int))


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", c_int),
        ("source_hint", MemcpyLocation),
        ("destination_hint", MemcpyLocation),
        ("flags", c_uint),
    )


_BATCH_ARGUMENTS = (
    c_void_p,  # dsts
    c_void_p,  # srcs
    c_void_p,  # sizes
    c_size_t,  # count
    POINTER(MemcpyAttributes),
    POINTER(c_size_t),  # index of the first copy each attribute holds for
    c_size_t,  # number of attributes
)
BATCH_WITH_FAIL_INDEX = ctypes.CFUNCTYPE(c_int, *_BATCH_ARGUMENTS, POINTER(c_size_t), c_void_p)
BATCH_WITHOUT_FAIL_INDEX = ctypes.CFUNCTYPE(c_int, *_BATCH_ARGUMENTS, c_void_p)

_FORMS: tuple[tuple[BatchForm, int, Any], ...] = (
    (BatchForm.WITHOUT_FAIL_INDEX, 13000, BATCH_WITHOUT_FAIL_INDEX),
    (BatchForm.WITH_FAIL_INDEX, 12080, BATCH_WITH_FAIL_INDEX),
)


_WAIT_UNTIL_AT_LEAST = 0  # counted around the end of the range
_WRITE_AFTER_ALL_BEFORE = 0


class PushedContext:
    """Makes a context current; entered for every transfer, so it is a class and not a generator.

    Push and pop, not set: the caller's thread may be working on another device.
    """

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


class CudaDriver(Driver):
    """Owns a reference to the device's primary context, the one torch uses too."""

    def __init__(self, library: Any, device: int = 0) -> None:
        super().__init__(library, device)
        self._copy = self.bind("cuMemcpyAsync", c_uint64, c_uint64, c_size_t, c_void_p)
        self.check(self.bind("cuInit", c_uint)(0), "cuInit()")
        handle = c_int()
        get = self.bind("cuDeviceGet", c_void_p, c_int)
        self.check(get(byref(handle), device), f"cuDeviceGet({device})")
        self._device = handle.value
        self._batch: Callable[..., int] | None = None
        self._resolve_batch()
        self._resolve_values()
        context = c_void_p()
        retain = self.bind("cuDevicePrimaryCtxRetain", c_void_p, c_int)
        self.check(retain(byref(context), self._device), f"cuDevicePrimaryCtxRetain({device})")
        self._pushed = PushedContext(self, context.value or 0)

    @classmethod
    def open(cls, device: int = 0) -> CudaDriver:
        """Load libcuda; OSError where there is none."""
        return cls(ctypes.CDLL("libcuda.so.1"), device)

    def current(self) -> AbstractContextManager[None]:
        self._refuse_if_closed()
        return self._pushed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.bind("cuDevicePrimaryCtxRelease_v2", c_int)(self._device)

    def error_words(self, code: int) -> tuple[str, str]:
        words = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            found = self.bind(function, c_int, c_void_p)(code, byref(text))
            known = found == 0 and text.value is not None
            words.append(text.value.decode() if known and text.value else "unknown error")
        return words[0], words[1]

    def copy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        code = self._copy(dst, src, num_bytes, stream)
        if code:
            self.check(code, f"cuMemcpyAsync({num_bytes} bytes from {src:#x} to {dst:#x})")

    def copy_batch_async(
        self, dsts: Addresses, srcs: Addresses, sizes: Addresses, order: SourceOrder, stream: int
    ) -> None:
        if self._batch is None:
            raise DriverError("this driver has no cuMemcpyBatchAsync", code=500, unsupported=True)
        attributes = MemcpyAttributes(source_order=order.value)
        arguments: list[Any] = [
            _address(dsts),
            _address(srcs),
            _address(sizes),
            len(sizes),
            byref(attributes),
            byref(c_size_t(0)),
            1,
        ]
        failed = c_size_t(len(sizes))
        if self._batch_has_fail_index:
            arguments.append(byref(failed))
        code = self._batch(*arguments, stream)
        if code:
            asked = f"{len(sizes)} copies, {order.name}, stream {stream:#x}"
            if failed.value < len(sizes):
                i = failed.value
                asked += f"; copy {i}: {sizes[i]} bytes from {srcs[i]:#x} to {dsts[i]:#x}"
            self.check(code, f"cuMemcpyBatchAsync({asked})")

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        code = self._wait_value(stream, address, value, _WAIT_UNTIL_AT_LEAST)
        if code:
            self.check(code, f"cuStreamWaitValue32(stream {stream:#x}, {value} at {address:#x})")

    def stream_write_value(self, stream: int, address: int, value: int) -> None:
        code = self._write_value(stream, address, value, _WRITE_AFTER_ALL_BEFORE)
        if code:
            self.check(code, f"cuStreamWriteValue32(stream {stream:#x}, {value} at {address:#x})")

    def _resolve_values(self) -> None:
        """Numbers in host memory: the second form only, the first one must be switched on."""
        signature = (c_void_p, c_uint64, c_uint32, c_uint)
        with suppress(DriverError):
            self._wait_value = self.bind("cuStreamWaitValue32_v2", *signature)
            self._write_value = self.bind("cuStreamWriteValue32_v2", *signature)
            self.has_values = True

    def _resolve_batch(self, newest_form: BatchForm = BatchForm.WITHOUT_FAIL_INDEX) -> None:
        """Find the batch copy by the version of its form, asking this driver, not a header."""
        self.batch_form, self._batch, self._batch_has_fail_index = BatchForm.ABSENT, None, False
        try:
            look_up = self.bind(
                "cuGetProcAddress_v2", c_char_p, c_void_p, c_int, c_uint64, c_void_p
            )
        except DriverError:
            return  # older than CUDA 12, so without the batch copy too
        version = self.version()
        newest = next((needs for form, needs, _ in _FORMS if form is newest_form), 0)
        for form, needs, prototype in _FORMS:
            # A driver asked for a form newer than itself may answer with its older one: nine
            # arguments called as eight. So what it is comes before what it says.
            if version < needs or needs > newest:
                continue
            address, status = c_void_p(), c_int()
            code = look_up(b"cuMemcpyBatchAsync", byref(address), needs, 0, byref(status))
            if code == 0 and address.value:
                self.batch_form = form
                self._batch_has_fail_index = form is BatchForm.WITH_FAIL_INDEX
                self._batch = prototype(address.value)
                return


def _address(array: Addresses) -> int:
    """Where the numbers are; ``array.ctypes.data`` takes three times as long to say it."""
    if array.flags.writeable:
        return ctypes.addressof(c_char.from_buffer(array.data))
    return int(array.ctypes.data)
