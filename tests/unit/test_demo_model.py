"""The decoder's bytes are the same whatever the schedule."""

from __future__ import annotations

import numpy as np

from kvferry.tools.demo.model import BLOCK_TOKENS, Decoder, ModelShape, Span

LENGTH = 200
SHAPE = ModelShape(
    vocab=199, width=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, hidden=96, seed=5
)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 199, length)


def served(decoder: Decoder, tokens: np.ndarray, cuts: list[int]) -> tuple[int, list[np.ndarray]]:
    """The next token and the KV, in chunks, beside another request where there are some."""
    size = SHAPE.kv_shape(40)
    # NaN: a token that reads a byte which was never written shows in the result.
    kv = [np.full(size, np.nan, np.float32) for _ in range(SHAPE.num_layers)]
    blocks = np.random.default_rng(len(cuts)).permutation(30)[: -(-len(tokens) // BLOCK_TOKENS)]
    other, other_at = prompt(120, seed=9), 0
    last = -1
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        spans = [Span(tokens[start:end], start, blocks)]
        rows = other[other_at : other_at + 1 + end % 37]
        if cuts and len(rows):
            spans.insert(0, Span(rows, other_at, np.arange(30, 40)))
            other_at += len(rows)
        last = decoder.forward(spans, kv)[-1]
    at = np.arange(len(tokens))
    return last, [layer[blocks[at // BLOCK_TOKENS], :, at % BLOCK_TOKENS] for layer in kv]


def test_kv_bytes_ignore_chunks_batch_and_blocks() -> None:
    decoder, tokens = Decoder(SHAPE), prompt(LENGTH)
    token, whole = served(decoder, tokens, [])
    assert not any(np.isnan(layer).any() for layer in whole)
    for cuts in ([64, 128], list(range(7, LENGTH, 7)), list(range(150, LENGTH))):
        ours, kv = served(decoder, tokens, cuts)
        assert ours == token
        for layer, expected in zip(kv, whole, strict=True):
            np.testing.assert_array_equal(layer, expected)
    changed = served(decoder, np.concatenate(([tokens[0] + 1], tokens[1:])), [])[1]
    assert (changed[-1][-1] != whole[-1][-1]).any(), "the last token sees the first"
    assert len({served(decoder, prompt(LENGTH, seed), [])[0] for seed in range(8)}) > 3
