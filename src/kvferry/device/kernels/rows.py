"""How a layout is cut into rows for the copy kernel: pure arithmetic, no device.

A row is at most ``row_bytes`` contiguous bytes of one segment. Rows never cross a segment, so each
has one device address and one place in the block::

    segment 0 |---- row 0 ----|-- row 1 --|  segment 1 |---- row 2 ----|-- row 3 --|
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.device.layout.base import GroupLayout, Int64s

LANES = 32
"""Threads that share a row: one warp."""

MAX_STEPS = 8
"""Accesses in flight per thread. Eight of 16 bytes fill a PCIe Gen5 link from two multiprocessors
(one NVIDIA H200); more would not fit the registers of 1024 threads."""


@dataclass(frozen=True)
class RowShape:
    """The accesses that make up a row: what the kernel is compiled for."""

    width: int
    """Bytes of one element."""
    vector: int
    """Elements a thread moves in one access."""
    steps: int
    """Accesses of one thread per row."""

    @cached_property
    def row_bytes(self) -> int:
        return self.width * self.vector * LANES * self.steps


def common_alignment(layout: GroupLayout) -> int:
    """The largest number that divides every address, stride and size of ``layout``."""
    # Offsets are sums of sizes, so what divides the sizes divides them too.
    return math.gcd(*(int(np.gcd.reduce(a)) for a in (layout.bases, layout.strides, layout.sizes)))


def row_shape(layout: GroupLayout, alignment: int) -> RowShape:
    """The widest accesses that ``alignment`` allows, in rows that fit the segments."""
    if alignment % 16 == 0:
        width, vector = 8, 2
    else:
        width, vector = min(8, alignment & -alignment), 1
    step = width * vector * LANES
    total = int(layout.sizes.sum())

    def useful(steps: int) -> tuple[float, int]:
        """Accesses in flight that move bytes: a row longer than its segment idles some threads."""
        rows = -(-layout.sizes // (step * steps))
        return total / (float(rows.sum()) * step), -steps

    choices = [2**power for power in range(MAX_STEPS.bit_length())]
    return RowShape(width, vector, max(choices, key=useful))


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows of one block of a layout, and the tables the kernel finds them by."""

    layout: GroupLayout
    shape: RowShape

    @cached_property
    def rows_per_segment(self) -> Int64s:
        return -(-self.layout.sizes // self.shape.row_bytes)

    @cached_property
    def rows_per_block(self) -> int:
        return int(self.rows_per_segment.sum())

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all segments are equally long, so that a row's segment needs no table."""
        return bool((self.layout.sizes == self.layout.sizes[0]).all())

    @cached_property
    def segments(self) -> Int64s:
        """The segment of each row of a block."""
        return np.repeat(np.arange(self.layout.num_segments), self.rows_per_segment)

    @cached_property
    def starts(self) -> Int64s:
        """Where each row starts within its segment."""
        first = np.cumsum(self.rows_per_segment) - self.rows_per_segment
        return (np.arange(self.rows_per_block) - first[self.segments]) * self.shape.row_bytes

    @cached_property
    def places(self) -> Int64s:
        """Where each row starts within the packed block."""
        return self.layout.offsets[self.segments] + self.starts

    @cached_property
    def is_even(self) -> bool:
        """Whether all rows are full, so that rows and bytes are counted alike."""
        return not (self.layout.sizes % self.shape.row_bytes).any()

    def tables(self) -> Int64s:
        """All the kernel reads, as one array: four numbers per segment, two per row if mixed."""
        layout = self.layout
        parts = [layout.bases, layout.strides, layout.sizes, layout.offsets]
        if not self.is_uniform:
            parts += [self.segments, self.starts]
        return np.concatenate(parts).astype(np.int64)

    def row_at(self, position: int) -> int:
        """The last row that starts at or before byte ``position`` of blocks laid end to end."""
        if self.is_even:
            return position // self.shape.row_bytes
        block, within = divmod(position, self.layout.block_bytes)
        return block * self.rows_per_block + int(np.searchsorted(self.places, within, "right")) - 1

    def position_of(self, row: int) -> int:
        """The byte at which ``row`` starts in blocks laid end to end."""
        if self.is_even:
            return row * self.shape.row_bytes
        block, within = divmod(row, self.rows_per_block)
        return block * self.layout.block_bytes + int(self.places[within])
