"""The low-level copy: arrays of addresses in, one driver call out."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from typing import Any

import numpy as np

from kvferry.errors import DriverError, InputError
from kvferry.transfer.driver.base import UNSAFE_STREAMS, Addresses, BatchForm, Driver, SourceOrder
from kvferry.transfer.driver.opening import open_driver

log = logging.getLogger(__name__)

DEBUG_VARIABLE = "KVFERRY_DEBUG"
"""Set to 1 to have every call look for destinations that overlap."""

_told: weakref.WeakSet[Driver] = weakref.WeakSet()


def swap_blocks_batch(
    src_ptrs: Any,
    dst_ptrs: Any,
    sizes: Any,
    *,
    is_src_access_order_any: bool = False,
    stream: Any,
    driver: Driver | None = None,
) -> None:
    """Queue ``sizes[i]`` bytes from ``src_ptrs[i]`` to ``dst_ptrs[i]`` on ``stream``, for all i.

    The arrays are int64 or uint64 vectors (numpy, or torch tensors on the CPU) and may be reused
    when the call returns. ``stream`` is a raw handle or a torch stream, never the default one, of
    the device that is current on this thread. No copies is no call. Without the driver's batch
    copy, copies are queued one by one.

    ``is_src_access_order_any`` lets the driver read the sources before earlier work on ``stream``
    has run, even now. Pass it only for sources that no one can write: host slots being loaded,
    never live KV being stored.
    """
    handle = int(getattr(stream, "cuda_stream", stream))
    _refuse_unsafe_stream(handle)
    srcs, dsts = _addresses(src_ptrs, "src_ptrs"), _addresses(dst_ptrs, "dst_ptrs")
    counts = _addresses(sizes, "sizes")
    if not len(srcs) == len(dsts) == len(counts):
        raise InputError(
            f"{len(srcs)} sources, {len(dsts)} destinations and {len(counts)} sizes; "
            "they must pair up"
        )
    if not len(counts):
        return
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        _refuse_overlap(dsts, counts)
    order = SourceOrder.ANY if is_src_access_order_any else SourceOrder.STREAM
    copy_batch(driver or _process_driver(), dsts, srcs, counts, order, handle)


def copy_batch(
    driver: Driver,
    dsts: Addresses,
    srcs: Addresses,
    sizes: Addresses,
    order: SourceOrder,
    stream: int,
) -> None:
    """The same without the checks; the one place that falls back from the batch call to a loop."""
    limit = driver.max_batch or len(sizes)
    for first in range(0, len(sizes), limit):
        part = slice(first, first + limit)
        if driver.batch_form is not BatchForm.ABSENT:
            try:
                driver.copy_batch_async(dsts[part], srcs[part], sizes[part], order, stream)
                continue
            except DriverError as error:
                # Only "not supported" leaves nothing queued for certain; any other refusal is news.
                if not error.unsupported:
                    raise
                driver.batch_form = BatchForm.ABSENT
                _tell_once(driver, str(error))
        else:
            _tell_once(driver, "this driver does not have it")
        copy_each(driver, dsts[part], srcs[part], sizes[part], stream)


def copy_each(
    driver: Driver, dsts: Addresses, srcs: Addresses, sizes: Addresses, stream: int
) -> None:
    """One driver call per copy, in stream order."""
    copy = driver.copy_async
    for dst, src, size in zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True):
        copy(dst, src, size, stream)


def _refuse_unsafe_stream(stream: int) -> None:
    """InputError for the default stream and its special handles."""
    if stream in UNSAFE_STREAMS:
        raise InputError(
            f"stream {stream} is a default stream, which a batch copy may not use; "
            "create a stream for copies"
        )


def _addresses(values: Any, name: str) -> Addresses:
    """A contiguous uint64 vector of positive numbers; a view where one is possible."""
    array = np.asarray(values.numpy() if hasattr(values, "data_ptr") else values)
    if array.ndim != 1:
        raise InputError(f"{name} must be a vector, got an array of shape {array.shape}")
    if not array.size:
        return np.empty(0, dtype=np.uint64)
    if array.dtype not in (np.int64, np.uint64):
        raise InputError(f"{name} must be int64 or uint64, got {array.dtype}")
    # Compared as int64: a negative number is a huge one in uint64, and no address is that large.
    signed = np.ascontiguousarray(array).view(np.int64)
    worst = int(np.argmin(signed))
    if signed[worst] <= 0:
        raise InputError(f"{name}[{worst}] is {array[worst]}; it must be positive")
    return signed.view(np.uint64)


def _refuse_overlap(dsts: Addresses, sizes: Addresses) -> None:
    order = np.argsort(dsts, kind="stable")
    ends = dsts[order] + sizes[order]
    hits = np.flatnonzero(ends[:-1] > dsts[order][1:])
    if hits.size:
        a, b = int(order[hits[0]]), int(order[hits[0] + 1])
        raise InputError(
            f"destinations {a} ({dsts[a]:#x}, {sizes[a]} bytes) and {b} ({dsts[b]:#x}, "
            f"{sizes[b]} bytes) overlap; a batch has no order of its own"
        )


def _tell_once(driver: Driver, why: str) -> None:
    if driver not in _told:
        _told.add(driver)
        log.warning(
            "batch copies are not available (%s); copying one segment per call instead", why
        )


@functools.cache
def _process_driver() -> Driver:
    return open_driver()
