"""The CPU device: paged KV in ordinary memory, copied asynchronously by threads. numpy only."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from kvferry.errors import ClosedError, InputError, LayoutError
from kvferry.transfer.engine.contract import Event, Stream
from kvferry.transfer.layout import GroupLayout, LayerParts
from kvferry.types import (
    DEVICE,
    FIRST_RANK,
    HOST,
    Outcome,
    Rank,
    Receipt,
    SlotArray,
    Transfer,
    TransferId,
)


class CpuParts:
    """The loads in parts of one engine that are not over: an event for each part."""

    def __init__(self, loads: Stream, compute: Stream | None) -> None:
        """Without a compute stream the caller computes: it is the one to wait."""
        self._loads = loads
        self._compute = compute
        self._marks: dict[TransferId, list[Event]] = {}

    def begin(self, transfer_id: TransferId, parts: Sequence[Callable[[], object]]) -> None:
        """Queue one part after the other; nothing in them can fail."""
        marks = self._marks[transfer_id] = []
        for part in parts:
            self._loads.run(part)
            marks.append(self._loads.record())

    def ended(self, transfer_id: TransferId) -> None:
        self._marks.pop(transfer_id, None)

    def num_landed(self, transfer_id: TransferId) -> int | None:
        """See ``PartwiseEngine``."""
        marks = self._marks.get(transfer_id)
        return None if marks is None else sum(mark.synchronize(0) for mark in marks)

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        """See ``PartwiseEngine``."""
        for transfer_id in transfer_ids:
            marks = self._marks.get(transfer_id)
            if marks:
                mark = marks[min(number, len(marks) - 1)]
                self._compute.wait(mark) if self._compute is not None else mark.synchronize()


# ------------------------------------------------------------------------------------------------
# The CPU device: paged KV in ordinary memory, copied asynchronously by threads. numpy only.

Rows = npt.NDArray[np.uint8]
"""Blocks as rows of bytes, one row per slot."""


class CpuEngine:
    """A copy engine over KV tensors in ordinary memory.

    Owns one stream per direction; leaves the tensors, the host slots and the compute stream to
    their owners, who must outlive it. Without a compute stream the caller computes in its own
    thread, so whatever it wrote before ``submit`` is there.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        host: Rows,
        *,
        compute: Stream | None = None,
        rank: Rank = FIRST_RANK,
    ) -> None:
        for group, layout in enumerate(layouts):
            if layout.block_bytes > host.shape[1]:
                raise LayoutError(
                    f"a block of group {group} has {layout.block_bytes} bytes, "
                    f"a host slot only {host.shape[1]}"
                )
        self._groups = [_BlockViews(layout) for layout in layouts]
        self._cuts = [
            [(_BlockViews(part.layout), part.start) for part in LayerParts.of(layout).parts]
            for layout in layouts
        ]
        self._host = host
        self._compute = compute
        self._rank = rank
        self._loads = Stream("load")
        self._stores = Stream("store")
        self.parts = CpuParts(self._loads, compute)
        self._done: queue.SimpleQueue[Receipt] = queue.SimpleQueue()
        self._news = threading.Event()
        self._closed = False

    def submit(self, transfer: Transfer) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
        stream = self._loads if transfer.dst == DEVICE else self._stores
        if self._compute is not None:
            # A store must not read before the compute that writes its source, and a load must not
            # write while compute queued earlier still reads its destination.
            stream.wait(self._compute.record())
        if transfer.in_parts:
            self._submit_parts(transfer)
        else:
            stream.run(lambda: self._carry_out(transfer))

    def await_news(self, seconds: float) -> None:
        self._news.wait(seconds)

    def poll(self) -> list[Receipt]:
        receipts = []
        self._news.clear()  # before we look, or what comes meanwhile is news to nobody
        while True:
            try:
                receipts.append(self._done.get_nowait())
            except queue.Empty:
                return receipts
            self.parts.ended(receipts[-1].transfer_id)

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        if not self._closed:
            end = None if timeout is None else time.monotonic() + timeout
            for event in (self._loads.record(), self._stores.record()):
                event.synchronize(None if end is None else max(0.0, end - time.monotonic()))
        return self.poll()

    @contextmanager
    def begun_here(self, *, compute_waits: bool = False) -> Iterator[None]:
        yield
        if compute_waits:
            self.order_compute_after_loads()

    def order_compute_after_loads(self) -> None:
        if self._compute is not None:
            self._compute.wait(self._loads.record())

    def close(self) -> None:
        self._closed = True
        self._loads.close()
        self._stores.close()

    def _submit_parts(self, transfer: Transfer) -> None:
        """All that can go wrong is looked at here: once begun, it lands."""
        try:
            self._check(transfer)
        except Exception as error:
            self._end(_failed(transfer, self._rank, error))
            return
        began = time.perf_counter()
        self.parts.begin(
            transfer.id,
            [partial(v.load, transfer, self._host, at) for v, at in self._cuts[transfer.group]],
        )
        num_bytes = len(transfer) * self._groups[transfer.group].layout.block_bytes

        def end() -> None:
            seconds = time.perf_counter() - began
            self._end(Receipt(transfer.id, self._rank, Outcome.OK, "", num_bytes, seconds, "cpu"))

        self._loads.run(end)

    def _end(self, receipt: Receipt) -> None:
        self._done.put(receipt)
        self._news.set()

    def _carry_out(self, transfer: Transfer) -> None:
        self._end(self._copy(transfer))

    def _copy(self, transfer: Transfer) -> Receipt:
        start = time.perf_counter()
        try:
            num_bytes = self._move(transfer)
        except Exception as error:  # a copy thread that dies leaves its request waiting for ever
            return _failed(transfer, self._rank, error)
        seconds = time.perf_counter() - start
        return Receipt(transfer.id, self._rank, Outcome.OK, "", num_bytes, seconds, "cpu")

    def _move(self, transfer: Transfer) -> int:
        self._check(transfer)
        views = self._groups[transfer.group]
        move = views.store if transfer.src == DEVICE else views.load
        return move(transfer, self._host)

    def _check(self, transfer: Transfer) -> None:
        if {transfer.src, transfer.dst} != {DEVICE, HOST}:
            raise InputError(f"this engine cannot copy from {transfer.src} to {transfer.dst}")
        if not 0 <= transfer.group < len(self._groups):
            raise InputError(f"there are {len(self._groups)} groups, got group {transfer.group}")
        views = self._groups[transfer.group]
        stores = transfer.src == DEVICE
        blocks = transfer.src_slots if stores else transfer.dst_slots
        slots = transfer.dst_slots if stores else transfer.src_slots
        _require_within("device blocks", blocks, views.layout.num_blocks)
        _require_within("host slots", slots, len(self._host))


class _BlockViews:
    """One group's segments as arrays of shape (blocks, bytes) over the tensors' own memory."""

    def __init__(self, layout: GroupLayout) -> None:
        self.layout = layout
        self.segments: list[tuple[Rows, slice]] = []
        for base, stride, size, offset in zip(
            layout.bases.tolist(),
            layout.strides.tolist(),
            layout.sizes.tolist(),
            layout.offsets.tolist(),
            strict=True,
        ):
            span = (layout.num_blocks - 1) * stride + size
            run = np.frombuffer((ctypes.c_uint8 * span).from_address(base), dtype=np.uint8)
            view = np.lib.stride_tricks.as_strided(
                run, shape=(layout.num_blocks, size), strides=(stride, 1)
            )
            self.segments.append((view, slice(offset, offset + size)))

    def store(self, transfer: Transfer, host: Rows) -> int:
        blocks, slots = transfer.src_slots, transfer.dst_slots
        for view, place in self.segments:
            host[slots, place] = view[blocks]
        return len(transfer) * self.layout.block_bytes

    def load(self, transfer: Transfer, host: Rows, start: int = 0) -> int:
        """``start`` is where the first segment lies in a slot."""
        slots, blocks = transfer.src_slots, transfer.dst_slots
        for view, place in self.segments:
            view[blocks] = host[slots, start + place.start : start + place.stop]
        return len(transfer) * self.layout.block_bytes


def _failed(transfer: Transfer, rank: Rank, error: Exception) -> Receipt:
    return Receipt(transfer.id, rank, Outcome.FAILED, f"{type(error).__name__}: {error}")


def _require_within(what: str, numbers: SlotArray, count: int) -> None:
    # numpy would take -1 for the last one.
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= count:
        raise InputError(f"there are {count} {what}, asked for {low} to {high}")
