"""Layouts against brute force: the table must name exactly the bytes numpy indexing reads."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from kvferry.errors import LayoutError
from kvferry.transfer.layout import GroupLayout, describe, find_overlap

Array = npt.NDArray[Any]

DTYPES = [np.int8, np.float16, np.float32, np.float64]


def read_block(layout: GroupLayout, block: int) -> bytes:
    """The bytes of one block as a host slot would hold them, read through the table."""
    out = bytearray(layout.block_bytes)
    for base, stride, size, offset in zip(
        layout.bases, layout.strides, layout.sizes, layout.offsets, strict=True
    ):
        out[offset : offset + size] = ctypes.string_at(int(base + block * stride), int(size))
    return bytes(out)


def random_bytes(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)


@given(
    layers=st.integers(1, 4),
    num_blocks=st.integers(1, 6),
    page=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    dtype=st.sampled_from(DTYPES),
    split=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_layer_outermost(
    layers: int, num_blocks: int, page: list[int], dtype: Any, split: bool, seed: int
) -> None:
    shape = (2, num_blocks, *page) if split else (num_blocks, *page)
    axis = 1 if split else 0
    tensors = [random_bytes(shape, dtype, seed + i) for i in range(layers)]
    layout = describe(tensors, block_axis=axis)
    assert layout.num_blocks == num_blocks
    for block in range(num_blocks):
        expected = b"".join(np.take(t, block, axis=axis).tobytes() for t in tensors)
        assert read_block(layout, block) == expected
    if split and num_blocks > 1:
        assert layout.num_segments == 2 * layers


@given(
    layers=st.integers(1, 4),
    num_blocks=st.integers(2, 6),
    page=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    kv_outside=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**32),
)
def test_block_outermost_is_one_segment_in_storage_order(
    layers: int, num_blocks: int, page: int, dtype: Any, kv_outside: bool, shuffle: Any, seed: int
) -> None:
    shape = (num_blocks, 2, layers, page) if kv_outside else (num_blocks, layers, 2, page)
    storage = random_bytes(shape, dtype, seed)
    views = [storage[:, :, i] if kv_outside else storage[:, i] for i in range(layers)]
    shuffle.shuffle(views)
    layout = describe(views, block_axis=0)
    assert layout.num_segments == 1
    for block in range(num_blocks):
        assert read_block(layout, block) == storage[block].tobytes()


@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    num_blocks=st.integers(2, 5),
    permutation=st.permutations(range(4)),
    dtype=st.sampled_from(DTYPES),
)
def test_permuted_views_are_read_by_stride_or_refused(
    sizes: list[int], num_blocks: int, permutation: list[int], dtype: Any
) -> None:
    shape = (num_blocks, *[*sizes, 1, 1][:3])
    storage = random_bytes(shape, dtype, 3)
    view = storage.transpose(permutation)
    layout = describe([view], block_axis=permutation.index(0))
    assert layout.num_segments == 1  # the storage is block-outermost, however it is looked at
    for block in range(num_blocks):
        assert read_block(layout, block) == storage[block].tobytes()


def test_axis_is_found_by_count() -> None:
    tensors = [np.zeros((2, 7, 16), np.int8), np.zeros((7, 32), np.int8)]
    assert describe(tensors, num_blocks=7).num_segments == 3


def test_format_names_byte_order_not_addresses_or_counts() -> None:
    small = describe([np.zeros((4, 16, 8), np.int8)], block_axis=0)
    large = describe([np.zeros((9, 16, 8), np.int8)], block_axis=0)
    permuted = describe([np.zeros((4, 8, 16), np.int8).transpose(0, 2, 1)], block_axis=0)
    wider = describe([np.zeros((4, 16, 4), np.int16)], block_axis=0)
    assert small.format == large.format
    # The same bytes per block, but token 0 of head 1 lies elsewhere: not exchangeable.
    assert len({small.format, permuted.format, wider.format}) == 3


BASE = np.zeros((8, 16, 32), np.int8)
REFUSED: dict[str, tuple[Any, dict[str, int], str]] = {
    "gap inside a page": ([BASE[:, :, :16]], {"block_axis": 0}, "tensor 0 is not contiguous"),
    "gap between tokens": ([BASE[:, ::2]], {"block_axis": 0}, "axis 1 steps 64"),
    "broadcast": ([as_strided(BASE, BASE.shape, (0, 32, 1))], {"block_axis": 0}, "repeats"),
    "no such axis": ([BASE], {"block_axis": 3}, "no axis 3"),
    "nothing to go by": ([BASE], {}, "name the block_axis"),
    "two axes fit": ([np.zeros((4, 4), np.int8)], {"num_blocks": 4}, "2 axes of extent 4"),
    "no axis fits": ([BASE], {"num_blocks": 5}, "0 axes of extent 5"),
    "counts differ": ([BASE, BASE[:4]], {"block_axis": 0}, "tensor 1 has 4 blocks"),
    "overlapping views": ([BASE[:, :9], BASE[:, 8:]], {"block_axis": 0}, "share bytes"),
    "no tensors": ([], {"block_axis": 0}, "at least one KV tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_tensor_and_the_reason(case: str) -> None:
    tensors, options, words = REFUSED[case]
    with pytest.raises(LayoutError, match=words):
        describe(tensors, **options)


@given(
    segments=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 24), st.integers(1, 12)),
        min_size=1,
        max_size=5,
    ),
    num_blocks=st.integers(1, 5),
)
def test_overlap_agrees_with_counting_bytes(
    segments: list[tuple[int, int, int]], num_blocks: int
) -> None:
    bases, strides, sizes = (
        np.array(column, dtype=np.int64) for column in zip(*segments, strict=True)
    )
    seen: set[int] = set()
    total = 0
    for base, stride, size in segments:
        for block in range(num_blocks):
            seen.update(range(base + block * stride, base + block * stride + size))
            total += size
    assert (find_overlap(bases, strides, sizes, num_blocks) is None) == (len(seen) == total)
