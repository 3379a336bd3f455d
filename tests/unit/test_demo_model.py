"""The decoder computes what a plain one computes, bit by bit and whatever the schedule."""

from __future__ import annotations

import numpy as np

from kvferry.tools.demo.model import BLOCK_TOKENS, Decoder, ModelShape, Span

LENGTH = 200
SHAPE = ModelShape(
    vocab=199, width=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, hidden=96, seed=5
)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 199, length)


def rounded(x: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(x), -127, 127)


def plain(decoder: Decoder, tokens: np.ndarray) -> tuple[int, list[np.ndarray]]:
    """The next token and each layer's (token, 2, head, dim) KV: one token, one head at a time.

    Written from the definitions in whole numbers; shares no code with the decoder.
    """
    shape, dim = decoder.shape, decoder.shape.head_dim
    heads, kv_heads = shape.num_heads, shape.num_kv_heads

    def norm(row: np.ndarray) -> np.ndarray:
        scale = 32 * np.sqrt(len(row) / (int((row.astype(np.int64) ** 2).sum()) + 1))
        return rounded((row * scale).astype(np.float32)).astype(np.int64)

    def project(row: np.ndarray, weight: np.ndarray) -> np.ndarray:
        scale = np.float32(0.4 / len(weight) ** 0.5)
        return rounded((row @ weight.astype(np.int64)).astype(np.float32) * scale).astype(np.int64)

    def rope(row: np.ndarray, at: int) -> np.ndarray:
        angles = at * 10_000.0 ** (-np.arange(dim // 2) / (dim // 2))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = row[: dim // 2].astype(np.float32), row[dim // 2 :].astype(np.float32)
        return rounded(np.concatenate((a * cos - b * sin, b * cos + a * sin))).astype(np.int64)

    x = decoder.embedding[tokens].astype(np.int64)
    caches = []
    for layer in decoder.layers:
        rows = [project(norm(row), layer.query_key_value).reshape(-1, dim) for row in x]
        query = [[rope(head, p) for head in row[:heads]] for p, row in enumerate(rows)]
        key = [[rope(h, p) for h in row[heads : heads + kv_heads]] for p, row in enumerate(rows)]
        cache = np.stack((np.array(key), np.array([row[-kv_heads:] for row in rows])), axis=1)
        caches.append(cache)
        for p in range(len(x)):
            seen = cache[: p + 1]
            mixed = np.empty((heads, dim), np.int64)
            for head in range(heads):
                keys, values = seen[:, :, head // (heads // kv_heads)].swapaxes(0, 1)
                scores = keys @ query[p][head]
                drops = (scores - scores.max()).astype(np.float32) / np.float32(128 * dim**0.5)
                weights = np.maximum(np.floor(drops) + 16, 0).astype(np.int64)
                mixed[head] = np.rint(
                    (weights @ values).astype(np.float32) / np.float32(weights.sum())
                )
            x[p] += project(mixed.reshape(-1), layer.output)
            gate, up = np.split(project(norm(x[p]), layer.gate_up), 2)
            inner = rounded((np.maximum(gate, 0) * up).astype(np.float32) / 32).astype(np.int64)
            x[p] += project(inner, layer.down)
    return int((norm(x[-1]) @ decoder.head.astype(np.int64)).argmax()), caches


def served(decoder: Decoder, tokens: np.ndarray, cuts: list[int]) -> tuple[int, list[np.ndarray]]:
    """The same from the paged decoder, in chunks, beside another request where there are some."""
    shape = decoder.shape
    size = shape.kv_shape(40)
    # NaN: a token that reads a byte which was never written shows in the result.
    kv = [np.full(size, np.nan, np.float32) for _ in range(shape.num_layers)]
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


def test_kv_bytes_are_exact_and_ignore_chunks_and_batch() -> None:
    decoder = Decoder(SHAPE)
    tokens = prompt(LENGTH)
    token, caches = plain(decoder, tokens)
    assert served(decoder, tokens[:1], [])[0] == plain(decoder, tokens[:1])[0]
    for cuts in ([], [64, 128], list(range(7, LENGTH, 7)), list(range(150, LENGTH))):
        ours, kv = served(decoder, tokens, cuts)
        assert ours == token
        for layer, expected in zip(kv, caches, strict=True):
            np.testing.assert_array_equal(layer, expected)
    assert len({served(decoder, prompt(LENGTH, seed), [])[0] for seed in range(8)}) > 3
