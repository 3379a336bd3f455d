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


SHAPES = {
    "keys and values packed": ((NUM_BLOCKS, 2, 32, 8), lambda m: {"a": m}, lambda m, b: m[b], 1),
    "as many blocks as tokens": ((32, 2, 32, 8), lambda m: {"a": m}, lambda m, b: m[b], 1),
    "more blocks than tokens": ((64, 2, 32, 8), lambda m: {"a": m}, lambda m, b: m[b], 1),
    "keys and values apart": (
        (2, NUM_BLOCKS, 16, 4),
        lambda m: {"a": m},
        lambda m, b: m[:, b],
        2,
    ),
    "a kernel that works on parts of a block": (
        (NUM_BLOCKS * 4, 2, 16, 4),
        lambda m: {"a": m},
        lambda m, b: m[b * 4 : b * 4 + 4],
        1,
    ),
    "layers inside blocks": (
        (NUM_BLOCKS, 3, 2, 16, 4),
        lambda m: {name: m[:, n] for n, name in enumerate("abc")},
        lambda m, b: m[b],
        1,
    ),
    "layers one after the other": (
        (3, NUM_BLOCKS, 2, 16, 4),
        lambda m: {name: m[n] for n, name in enumerate("abc")},
        lambda m, b: m[:, b],
        3,
    ),
    "heads before tokens in memory": (
        (NUM_BLOCKS, 2, 4, 16, 8),
        lambda m: {"a": m.transpose(0, 1, 3, 2, 4)},
        lambda m, b: m[b],
        1,
    ),
    "layers that share their cache, and one of another rank": (
        (NUM_BLOCKS, 2, 16, 4),
        lambda m: {"a": m, "b": m},
        lambda m, b: m[b],
        1,
    ),
}


@pytest.mark.parametrize(("shape", "layers", "of", "segments"), SHAPES.values(), ids=SHAPES)
def test_blocks_are_found_in_tensors_of_any_shape(shape, layers, of, segments):
    """Each block's segments are its bytes and no others."""
    memory = numbered(*shape)
    num_blocks = shape[0] if shape[0] in (32, 64) else NUM_BLOCKS
    (layout,) = layouts_of(layers(memory), [["a", "b", "c"]], num_blocks)
    assert (layout.num_segments, layout.num_blocks) == (segments, num_blocks)
    for block, content in enumerate(blocks_of(layout, memory)):
        assert np.array_equal(np.sort(content.view(np.float32)), np.sort(of(memory, block).ravel()))


def test_groups_that_lie_over_each_other():
    memory = numbered(NUM_BLOCKS, 2, 16, 4)
    first, second = layouts_of({"full": memory, "window": memory}, [["full"], ["window"]], 12)
    assert np.array_equal(first.bases, second.bases)
    assert first.num_segments == second.num_segments == 1


def test_states_of_several_parts():
    state, convolution = numbered(NUM_BLOCKS, 4, 8), numbered(NUM_BLOCKS, 3, 4)
    (layout,) = layouts_of({"mamba": [state, convolution]}, [["mamba"]], NUM_BLOCKS)
    assert layout.sizes.tolist() == [4 * 8 * 4, 3 * 4 * 4]


def test_a_padded_page_leaves_its_padding_out():
    memory = numbered(NUM_BLOCKS, 160)
    (layout,) = layouts_of({"layer": memory[:, :128]}, [["layer"]], NUM_BLOCKS)
    assert layout.block_bytes == 128 * 4
    assert layout.strides.tolist() == [160 * 4]


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
