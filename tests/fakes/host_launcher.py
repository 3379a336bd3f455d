"""The copy kernel without a GPU and without Triton: the same rows moved by numpy, in stream order.

Says once more, in a few lines, what the kernel does with its arguments. That the two agree is the
business of ``tests/contract/test_device_paths.py``, where Triton's interpreter is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
from tests.fakes.driver import FakeDriver

from kvferry.transfer.kernels.launch import ARGUMENTS, CopyArguments, Launch, RowShape, Variant
from kvferry.transfer.layout import Int64s


class HostLauncher:
    """Moves the rows of every launch when the fake stream gets there."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def prepare(self, variant: Variant) -> Launch:
        def launch(programs: int, arguments: CopyArguments, stream: int) -> None:
            # The real launch reads its arguments during the call, so a late run needs its own.
            values = {name: int(getattr(arguments, name)) for name in ARGUMENTS}
            self._driver.enqueue_host_function(stream, _copy_rows(variant, values))

        return launch

    def close(self) -> None:
        pass


def _copy_rows(variant: Variant, values: dict[str, int]) -> Callable[[], None]:
    def run() -> None:
        for paged, packed, size in _rows(variant, **values):
            if variant.to_packed:
                ctypes.memmove(packed, paged, size)
            else:
                ctypes.memmove(paged, packed, size)

    return run


def _rows(
    variant: Variant,
    *,
    null_address: int,
    ids: int,
    num_blocks: int,
    tables: int,
    num_segments: int,
    segment_bytes: int,
    packed_base: int,
    packed_pitch: int,
    rows_per_block: int,
    rows_per_segment: int,
    first_row: int,
    last_row: int,
) -> Iterator[tuple[int, int, int]]:
    """Paged address, packed address and length of every row."""
    assert null_address == 0
    row_bytes = RowShape(variant.wide, variant.steps).row_bytes
    bases, strides, sizes, offsets = _words(tables, 4 * num_segments).reshape(4, -1)
    # Read when the kernel runs, not when it is launched: ids that come too late are wrong ones.
    blocks = _words(ids, num_blocks)
    slots = np.arange(num_blocks)
    if not variant.to_packed:
        slots = _words(ids + 8 * num_blocks, num_blocks)
    by_row = _words(tables + 32 * num_segments, 0 if variant.uniform else 2 * rows_per_block)
    for row in range(first_row, last_row):
        index, within = divmod(row, rows_per_block)
        if variant.uniform:
            segment, start = within // rows_per_segment, within % rows_per_segment * row_bytes
            size, offset = segment_bytes, segment * segment_bytes
        else:
            segment, start = int(by_row[within]), int(by_row[rows_per_block + within])
            size, offset = int(sizes[segment]), int(offsets[segment])
        paged = int(bases[segment]) + int(blocks[index]) * int(strides[segment]) + start
        packed = packed_base + int(slots[index]) * packed_pitch + offset + start
        yield paged, packed, min(size - start, row_bytes)


def _words(address: int, count: int) -> Int64s:
    return np.frombuffer(ctypes.string_at(address, 8 * count), dtype=np.int64)
