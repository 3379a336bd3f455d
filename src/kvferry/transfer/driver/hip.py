"""The HIP driver: libamdhip64.so through ctypes. Best effort: we have no such card to test on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from kvferry.errors import DriverError
from kvferry.transfer.driver.base import HIP, Addresses, BatchForm, Driver, SourceOrder
from kvferry.transfer.driver.cuda import BATCH_WITH_FAIL_INDEX, MemcpyAttributes

MEMCPY_DEFAULT = 4
ATTRIBUTES_SINCE = 71300000
"""ROCm 7.13: older runtimes refuse a batch that carries attributes, and read in stream order."""


class HipDriver(Driver):
    """Owns nothing on the device: HIP keeps the primary context by itself."""

    library_number = HIP

    # The runtime faults, without an error, on batches larger than this.
    max_batch: int | None = 8192

    def __init__(self, library: Any, device: int = 0) -> None:
        super().__init__(library, device)
        self._copy = self.bind("hipMemcpyAsync", c_void_p, c_void_p, c_size_t, c_int, c_void_p)
        self._get_device = self.bind("hipGetDevice", c_void_p)
        self._set_device = self.bind("hipSetDevice", c_int)
        self.check(self.bind("hipInit", c_uint)(0), "hipInit()")
        self._num_attributes = 1 if self.version() >= ATTRIBUTES_SINCE else 0
        self._batch: Callable[..., int] | None = None
        try:
            entry = self.bind("hipMemcpyBatchAsync", *BATCH_WITH_FAIL_INDEX._argtypes_)
        except DriverError:
            return
        self._batch = entry
        self.batch_form = BatchForm.WITH_FAIL_INDEX

    @classmethod
    def open(cls, device: int = 0) -> HipDriver:
        """Load libamdhip64; OSError where there is none."""
        return cls(ctypes.CDLL("libamdhip64.so"), device)

    @contextmanager
    def current(self) -> Iterator[None]:
        self._refuse_if_closed()
        before = c_int()
        self.check(self._get_device(byref(before)), "hipGetDevice()")
        self.check(self._set_device(self._device), f"hipSetDevice({self._device})")
        try:
            yield
        finally:
            self._set_device(before.value)

    def close(self) -> None:
        self._closed = True

    def error_words(self, code: int) -> tuple[str, str]:
        words = []
        for name in ("hipGetErrorName", "hipGetErrorString"):
            function = self.bind(name, c_int)
            function.restype = c_char_p  # type: ignore[attr-defined]
            text: Any = function(code)
            words.append(text.decode() if text else "unknown error")
        return words[0], words[1]

    def copy_async(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        code = self._copy(dst, src, num_bytes, MEMCPY_DEFAULT, stream)
        if code:
            self.check(code, f"hipMemcpyAsync({num_bytes} bytes from {src:#x} to {dst:#x})")

    def copy_batch_async(
        self, dsts: Addresses, srcs: Addresses, sizes: Addresses, order: SourceOrder, stream: int
    ) -> None:
        if self._batch is None:
            raise DriverError("this driver has no hipMemcpyBatchAsync", code=500, unsupported=True)
        attributes = MemcpyAttributes(source_order=order.value)
        failed = c_size_t(len(sizes))
        code = self._batch(
            dsts.ctypes.data,
            srcs.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            byref(attributes),
            byref(c_size_t(0)),
            self._num_attributes,
            byref(failed),
            stream,
        )
        if code:
            self.check(code, f"hipMemcpyBatchAsync({len(sizes)} copies, failed at {failed.value})")
