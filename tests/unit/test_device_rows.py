"""Cutting a layout into rows, and rows into chunks: every byte once, as wide as addresses allow."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.kernels.launch import RowShape, RowTable, common_alignment, row_shape
from kvferry.transfer.layout import GroupLayout
from kvferry.transfer.paths.staged import ChunkCursor


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


PAGE = 4096


def cut(sizes: list[int], num_blocks: int, slots: list[int]) -> list[tuple[int, ...]]:
    given_layout = layout(sizes)
    ids = np.arange(num_blocks, dtype=np.int64)
    job = CopyJob(Direction.STORE, given_layout, ids, ids, 0, given_layout.block_bytes)
    rows = RowTable(given_layout, row_shape(given_layout, common_alignment(given_layout)))
    found: list[tuple[int, ...]] = []
    chunk = ChunkCursor(job, rows)
    while chunk.num_left:
        left = chunk.num_left
        slot = slots[len(found) % len(slots)]
        chunk.fit(slot)
        found.append((chunk.first_row, chunk.last_row, chunk.start, chunk.end))
        assert chunk.end - chunk.start <= slot
        assert chunk.num_left == left - (chunk.end - chunk.start)
    assert found[0][0] == found[0][2] == 0
    assert found[-1][1] == num_blocks * rows.rows_per_block
    assert found[-1][3] == job.num_bytes
    return found


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    st.integers(1, 40),
    st.lists(st.sampled_from([PAGE, 2 * PAGE, 16 * PAGE]), min_size=1, max_size=3),
)
def test_chunks_cover_the_job_and_never_exceed_their_slot(
    sizes: list[int], num_blocks: int, slots: list[int]
) -> None:
    found = cut(sizes, num_blocks, slots)
    for before, after in itertools.pairwise(found):
        assert before[1] == after[0]
        assert before[3] == after[2]
        assert after[1] > after[0]
