"""Layouts from tensors as vLLM's backends shape them; numpy arrays stand in for torch's."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.connectors.vllm.geometry import layouts_of
from kvferry.errors import LayoutError

NUM_BLOCKS = 12


def blocks_of(layout, memory):
    """Every block as the bytes its segments name, in slot order."""
    start = memory.ctypes.data
    flat = memory.reshape(-1).view(np.uint8)
    return [
        np.concatenate(
            [
                flat[base - start + block * stride :][:size]
                for base, stride, size in zip(
                    layout.bases, layout.strides, layout.sizes, strict=True
                )
            ]
        )
        for block in range(layout.num_blocks)
    ]


def numbered(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def assert_covers(layout, memory):
    """Blocks are disjoint and together all of the memory."""
    together = np.concatenate(blocks_of(layout, memory)).view(np.float32)
    assert np.array_equal(np.sort(together), np.sort(memory.ravel()))


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 32, 64], ids="blocks={}".format)
def test_packed_keys_and_values(num_blocks):
    """As many blocks as tokens in a block: the axis in front counts the blocks."""
    memory = numbered(num_blocks, 2, 32, 8)
    (layout,) = layouts_of({"layer": memory}, [["layer"]], num_blocks)
    assert (layout.num_segments, layout.block_bytes) == (1, 2 * 32 * 8 * 4)
    for block, content in enumerate(blocks_of(layout, memory)):
        assert np.array_equal(content.view(np.float32), memory[block].ravel())


def test_keys_and_values_apart():
    memory = numbered(2, NUM_BLOCKS, 16, 4)
    (layout,) = layouts_of({"layer": memory}, [["layer"]], NUM_BLOCKS)
    assert layout.num_segments == 2
    for block, content in enumerate(blocks_of(layout, memory)):
        assert np.array_equal(content.view(np.float32), memory[:, block].ravel())


def test_kernels_that_work_on_parts_of_a_block():
    memory = numbered(NUM_BLOCKS * 4, 2, 16, 4)
    (layout,) = layouts_of({"layer": memory}, [["layer"]], NUM_BLOCKS)
    assert (layout.num_segments, layout.num_blocks) == (1, NUM_BLOCKS)
    for block, content in enumerate(blocks_of(layout, memory)):
        assert np.array_equal(content.view(np.float32), memory[block * 4 : block * 4 + 4].ravel())


def test_layers_inside_blocks_make_one_segment():
    memory = numbered(NUM_BLOCKS, 3, 2, 16, 4)
    layers = {f"layer{n}": memory[:, n] for n in range(3)}
    (layout,) = layouts_of(layers, [list(layers)], NUM_BLOCKS)
    assert layout.num_segments == 1
    assert_covers(layout, memory)


def test_layers_one_after_the_other_in_one_storage():
    memory = numbered(3, NUM_BLOCKS, 2, 16, 4)
    layers = {f"layer{n}": memory[n] for n in range(3)}
    (layout,) = layouts_of(layers, [list(layers)], NUM_BLOCKS)
    assert layout.num_segments == 3
    assert_covers(layout, memory)


def test_permuted_inside_a_block():
    """Heads before tokens in memory, tokens before heads in the shape: bytes stay opaque."""
    memory = numbered(NUM_BLOCKS, 2, 4, 16, 8)
    (layout,) = layouts_of({"layer": memory.transpose(0, 1, 3, 2, 4)}, [["layer"]], NUM_BLOCKS)
    assert layout.num_segments == 1
    assert_covers(layout, memory)


def test_groups_that_lie_over_each_other():
    memory = numbered(NUM_BLOCKS, 2, 16, 4)
    first, second = layouts_of({"full": memory, "window": memory}, [["full"], ["window"]], 12)
    assert np.array_equal(first.bases, second.bases)
    assert_covers(first, memory)


def test_layers_that_share_their_cache_count_once():
    memory = numbered(NUM_BLOCKS, 2, 16, 4)
    (layout,) = layouts_of({"a": memory, "b": memory}, [["a", "b"]], NUM_BLOCKS)
    assert layout.block_bytes == 2 * 16 * 4 * 4


def test_states_of_several_parts():
    state, convolution = numbered(NUM_BLOCKS, 4, 8), numbered(NUM_BLOCKS, 3, 4)
    (layout,) = layouts_of({"mamba": [state, convolution]}, [["mamba"]], NUM_BLOCKS)
    assert layout.sizes.tolist() == [4 * 8 * 4, 3 * 4 * 4]


def test_a_padded_page_leaves_its_padding_out():
    memory = numbered(NUM_BLOCKS, 160)
    (layout,) = layouts_of({"layer": memory[:, :128]}, [["layer"]], NUM_BLOCKS)
    assert layout.block_bytes == 128 * 4
    assert layout.strides.tolist() == [160 * 4]


def test_layers_of_other_ranks_are_left_out():
    memory = numbered(NUM_BLOCKS, 2, 16, 4)
    (layout,) = layouts_of({"layer1": memory}, [["layer0", "layer1"]], NUM_BLOCKS)
    assert layout.num_segments == 1


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ({}, "no KV tensor"),
        ({"layer": numbered(7, 5)}, "counts 12 blocks"),
    ],
)
def test_what_cannot_be_described_is_refused(caches, words):
    with pytest.raises(LayoutError, match=words):
        layouts_of(caches, [["layer"]], NUM_BLOCKS)


def test_two_blocks_may_be_keys_and_values():
    with pytest.raises(LayoutError, match="clearly"):
        layouts_of({"layer": numbered(2, 2, 16, 4)}, [["layer"]], 2)
