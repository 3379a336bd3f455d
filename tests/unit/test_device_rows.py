"""Cutting a layout into rows: every byte once, none twice, as wide as addresses allow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.kernels.launch import RowShape, RowTable, common_alignment, row_shape
from kvferry.transfer.layout import GroupLayout


def layout(sizes: list[int], *, base: int = 4096, stride: int | None = None) -> GroupLayout:
    lengths = np.array(sizes, dtype=np.int64)
    stride = stride or -(-int(lengths.max()) // 16) * 16
    return GroupLayout(
        bases=base + np.arange(len(sizes), dtype=np.int64) * stride * 100,
        strides=np.full(len(sizes), stride),
        sizes=lengths,
        num_blocks=100,
    )


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ([16384] * 4, RowShape(width=8, vector=2, steps=8)),
        ([2048] * 4, RowShape(width=8, vector=2, steps=4)),
        ([16] * 4, RowShape(width=8, vector=2, steps=1)),
        ([4608] * 4, RowShape(width=8, vector=2, steps=8)),
        ([576] * 4, RowShape(width=8, vector=2, steps=2)),
        ([18432] * 4, RowShape(width=8, vector=2, steps=8)),
        ([4104] * 4, RowShape(width=8, vector=1, steps=8)),
        ([4100] * 4, RowShape(width=4, vector=1, steps=8)),
        ([4097] * 4, RowShape(width=1, vector=1, steps=8)),
    ],
)
def test_accesses_are_as_wide_as_the_alignment_allows(sizes: list[int], shape: RowShape) -> None:
    given_layout = layout(sizes)
    assert row_shape(given_layout, common_alignment(given_layout)) == shape


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8, 16]))
def test_rows_cover_the_block_once(sizes: list[int], alignment: int) -> None:
    sizes = [size * alignment for size in sizes]
    given_layout = layout(sizes)
    rows = RowTable(given_layout, row_shape(given_layout, alignment))
    lengths = np.minimum(given_layout.sizes[rows.segments] - rows.starts, rows.shape.row_bytes)
    assert (lengths > 0).all()
    ends = rows.places + lengths
    assert rows.places[0] == 0
    assert ends[-1] == given_layout.block_bytes
    assert np.array_equal(rows.places[1:], ends[:-1])
    assert len(rows.segments) == rows.rows_per_block


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=4), st.integers(0, 10**6), st.booleans())
def test_a_row_and_its_position_find_each_other(sizes: list[int], number: int, even: bool) -> None:
    sizes = [8192] * 3 if even else sizes
    given_layout = layout(sizes)
    rows = RowTable(given_layout, row_shape(given_layout, common_alignment(given_layout)))
    row = number % (rows.rows_per_block * 7)
    position = rows.position_of(row)
    assert rows.row_at(position) == row
    assert rows.row_at(position + 1) in (row, row + 1)
    assert rows.position_of(rows.rows_per_block * 7) == 7 * given_layout.block_bytes
