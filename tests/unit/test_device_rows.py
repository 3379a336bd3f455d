"""Cutting a layout into rows, and rows into chunks: every byte once, as wide as addresses allow."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.transfer.kernels.launch import RowShape, RowTable, common_alignment, row_shape
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths import kernel, staged


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
        ([16384] * 4, RowShape(wide=True, steps=8)),
        ([2048] * 4, RowShape(wide=True, steps=4)),
        ([16] * 4, RowShape(wide=True, steps=1)),
        ([4608] * 4, RowShape(wide=True, steps=8)),
        ([576] * 4, RowShape(wide=True, steps=2)),
        ([18432] * 4, RowShape(wide=True, steps=8)),
        ([4104] * 4, RowShape(wide=False, steps=8)),
        ([1234] * 4, RowShape(wide=False, steps=8)),
        ([37] * 4, RowShape(wide=False, steps=1)),
    ],
)
def test_accesses_are_as_wide_as_the_alignment_allows(sizes: list[int], shape: RowShape) -> None:
    given_layout = layout(sizes)
    assert row_shape(given_layout, common_alignment(given_layout)) == shape


@pytest.mark.parametrize(
    ("size", "programs"), [(16384, 2), (2048, 2), (1234, 3), (520, 7), (16, 16)]
)
def test_short_rows_take_more_of_the_card(size: int, programs: int) -> None:
    given_layout = layout([size] * 4)
    shape = row_shape(given_layout, common_alignment(given_layout))
    rows = RowTable(given_layout, shape)
    assert kernel.GRID.programs_for(rows) == programs
    assert staged.GRID.programs_for(rows) == staged.GRID.programs
