"""The decoder computes what a plain one computes, and its KV bytes ignore the schedule."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.tools.demo.model import KEY_TILE, TILE, Decoder, ModelShape, Span, limit_matrix_threads

BLOCK_TOKENS = 16
SMALL = ModelShape(
    vocab=199, width=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, hidden=96, seed=5
)
HYBRID = ModelShape(
    vocab=199,
    width=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden=96,
    windows=(None, 24, None, 100),
    seed=5,
)


@pytest.fixture(autouse=True, scope="module")
def one_matrix_thread() -> None:
    """Threads that spin for each other make these slow where tests run side by side."""
    limit_matrix_threads(1)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 199, length)


def poisoned_kv(shape: ModelShape, num_blocks: int) -> list[np.ndarray]:
    """KV tensors of NaN: reading an unwritten byte shows in the result."""
    return [
        np.full(shape.kv_shape(num_blocks, BLOCK_TOKENS), np.nan, np.float32)
        for _ in range(shape.num_layers)
    ]


def tables(shape: ModelShape, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """The same block ids in every group: each layer has its own tensor."""
    return (blocks,) * len(shape.group_windows)


def kv_of(kv: list[np.ndarray], blocks: np.ndarray, length: int) -> list[np.ndarray]:
    at = np.arange(length)
    return [layer[blocks[at // BLOCK_TOKENS], :, at % BLOCK_TOKENS] for layer in kv]


def dense_reference(decoder: Decoder, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits of the last token and each layer's (token, 2, head, dim) KV: whole sequence, float64.

    Written from the definitions, one head and one row at a time; shares no code with the decoder.
    """
    shape = decoder.shape
    length, dim = len(tokens), shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    x = decoder.embedding[tokens].astype(np.float64)

    def norm(rows: np.ndarray) -> np.ndarray:
        return rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + 1e-5)

    def rope(row: np.ndarray, position: int) -> np.ndarray:
        out = np.empty_like(row)
        for i in range(dim // 2):
            angle = position / shape.rope_theta ** (2 * i / dim)
            a, b = row[i], row[i + dim // 2]
            out[i] = a * np.cos(angle) - b * np.sin(angle)
            out[i + dim // 2] = a * np.sin(angle) + b * np.cos(angle)
        return out

    caches = []
    for layer in decoder.layers:
        projected = norm(x) @ layer.query_key_value.astype(np.float64)
        heads = projected.reshape(length, -1, dim)
        query = heads[:, : shape.num_heads]
        key = heads[:, shape.num_heads : shape.num_heads + shape.num_kv_heads]
        value = heads[:, shape.num_heads + shape.num_kv_heads :]
        query = np.array([[rope(head, p) for head in query[p]] for p in range(length)])
        key = np.array([[rope(head, p) for head in key[p]] for p in range(length)])
        caches.append(np.stack((key, value), axis=1))
        mixed = np.zeros((length, shape.num_heads, dim))
        for p in range(length):
            start = 0 if layer.window is None else max(0, p - layer.window + 1)
            for head in range(shape.num_heads):
                scores = key[start : p + 1, head // group] @ query[p, head] / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                mixed[p, head] = weights / weights.sum() @ value[start : p + 1, head // group]
        x = x + mixed.reshape(length, -1) @ layer.output.astype(np.float64)
        gate, up = np.split(norm(x) @ layer.gate_up.astype(np.float64), 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.astype(np.float64)
    return norm(x[-1:])[0] @ decoder.head.astype(np.float64), caches


@pytest.mark.parametrize("shape", [SMALL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("length", [1, TILE, KEY_TILE + 1, 150])
def test_agrees_with_a_dense_reference(shape: ModelShape, length: int) -> None:
    decoder = Decoder(shape)
    tokens = prompt(length)
    kv = poisoned_kv(shape, 16)
    blocks = np.random.default_rng(1).permutation(16)[: -(-length // BLOCK_TOKENS)]

    (token,) = decoder.forward([Span(tokens, 0, tables(shape, blocks))], kv)

    logits, caches = dense_reference(decoder, tokens)
    assert token == int(np.argmax(logits))
    for ours, theirs in zip(kv_of(kv, blocks, length), caches, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def served(shape: ModelShape, tokens: np.ndarray, cuts: list[int], *, mixed: bool) -> list[bytes]:
    """The KV bytes of ``tokens`` computed in chunks, alone or beside other requests."""
    decoder = Decoder(shape)
    kv = poisoned_kv(shape, 40)
    blocks = np.random.default_rng(len(cuts)).permutation(30)[: -(-len(tokens) // BLOCK_TOKENS)]
    other, other_at = prompt(120, seed=9), 0
    other_blocks = np.arange(30, 40)
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        spans = [Span(tokens[start:end], start, tables(shape, blocks))]
        if mixed and other_at < len(other):
            step = min(1 + end % 37, len(other) - other_at)
            rows = other[other_at : other_at + step]
            spans.insert(0, Span(rows, other_at, tables(shape, other_blocks)))
            other_at += step
        last = decoder.forward(spans, kv)[-1]
    return [*(layer.tobytes() for layer in kv_of(kv, blocks, len(tokens))), b"%d" % last]


@pytest.mark.parametrize("shape", [SMALL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize(
    "cuts",
    [[64, 128], list(range(7, 200, 7)), list(range(150, 200))],
    ids=["tiles", "sevens", "decode"],
)
def test_kv_bytes_ignore_chunks_and_batch(shape: ModelShape, cuts: list[int], mixed: bool) -> None:
    tokens = prompt(200)
    assert served(shape, tokens, cuts, mixed=mixed) == served(shape, tokens, [], mixed=False)
