"""A small decoder over paged KV whose bytes do not depend on how the work was scheduled.

Matrix libraries round differently for different shapes. Here every value is a whole number, and
every sum of products stays below 2**24, where float32 is exact in any order. So the rest of the
batch, the chunks of a prompt, and whether earlier KV was computed or loaded cannot change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

BLOCK_TOKENS = 16
_LARGEST = 127
_SPREAD = np.float32(32)
"""The usual magnitude of an activation."""

_MOST_WEIGHT = np.float32(16)
"""The attention weight of the best key. 4096 keys of this weight are summed exactly."""


@dataclass(frozen=True)
class ModelShape:
    """The model's sizes and the seed of its weights, which determine the model."""

    vocab: int = 1024
    width: int = 256
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 512
    max_tokens: int = 4096
    seed: int = 0

    def kv_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's paged KV tensor."""
        return (num_blocks, 2, BLOCK_TOKENS, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return 4 * self.num_layers * math.prod(self.kv_shape(1))


@dataclass(frozen=True, eq=False)
class Span:
    """Tokens of one request to compute now: positions ``start`` to ``start + len(tokens)``.

    ``table`` is the request's block table. It covers all positions up to the last of these.
    """

    tokens: Ints
    start: int
    table: Ints

    @property
    def positions(self) -> Ints:
        return np.arange(self.start, self.start + len(self.tokens))


@dataclass(frozen=True, eq=False)
class _Layer:
    query_key_value: Floats
    output: Floats
    gate_up: Floats
    down: Floats


class Decoder:
    """Owns the weights and the forward pass. The caller owns the KV tensors and the schedule."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        rng = np.random.default_rng(shape.seed)

        def weight(fan_in: int, fan_out: int) -> Floats:
            return rng.integers(-4, 5, (fan_in, fan_out)).astype(np.float32)

        query = shape.num_heads * shape.head_dim
        key = shape.num_kv_heads * shape.head_dim
        self.embedding = weight(shape.vocab, shape.width) * _SPREAD
        self.layers = tuple(
            _Layer(
                query_key_value=weight(shape.width, query + 2 * key),
                output=weight(query, shape.width),
                gate_up=weight(shape.width, 2 * shape.hidden),
                down=weight(shape.hidden, shape.width),
            )
            for _ in range(shape.num_layers)
        )
        self.head = weight(shape.width, shape.vocab)
        half = shape.head_dim // 2
        turns = np.arange(shape.max_tokens)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        self._cos = np.cos(turns).astype(np.float32)[:, None, :]
        self._sin = np.sin(turns).astype(np.float32)[:, None, :]

    def forward(self, spans: Sequence[Span], kv: Sequence[npt.NDArray[Any]]) -> list[int]:
        """Compute the spans and write their KV through the block tables.

        Spans may share blocks only where none of them writes.

        Returns:
            The next token of each span.
        """
        if not spans:
            return []
        ends = np.cumsum([len(span.tokens) for span in spans])
        positions = np.concatenate([span.positions for span in spans])
        x = self.embedding[np.concatenate([span.tokens for span in spans])]
        for layer, cache in zip(self.layers, kv, strict=True):
            mixed = self._attend(layer, _norm(x), positions, spans, cache)
            x = x + _project(mixed, layer.output)
            gate, up = np.split(_project(_norm(x), layer.gate_up), 2, axis=-1)
            x = x + _project(_round(np.maximum(gate, 0) * up / _SPREAD), layer.down)
        logits = _norm(x[ends - 1]) @ self.head
        return [int(token) for token in logits.argmax(axis=-1)]

    def _attend(
        self, layer: _Layer, x: Floats, positions: Ints, spans: Sequence[Span], cache: Floats
    ) -> Floats:
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        projected = _project(x, layer.query_key_value)
        projected = projected.reshape(len(x), heads + 2 * kv_heads, self.shape.head_dim)
        turned, value = projected[:, :-kv_heads], projected[:, -kv_heads:]
        turned = _rotate(turned, self._cos[positions], self._sin[positions])
        query, key = turned[:, :heads], turned[:, heads:]
        # Every span's KV is written before any span reads: a span may attend to another's blocks.
        blocks = [span.table[span.positions // BLOCK_TOKENS] for span in spans]
        places = np.concatenate(blocks), positions % BLOCK_TOKENS
        cache[places[0], 0, places[1]] = key
        cache[places[0], 1, places[1]] = value
        rows = np.split(query, np.cumsum([len(span.tokens) for span in spans])[:-1])
        mixed = [paged_attention(*each, cache) for each in zip(rows, spans, strict=True)]
        return np.concatenate(mixed)


def paged_attention(query: Floats, span: Span, cache: Floats) -> Floats:
    """Compute a span's causal attention over its block table. Returns rows of heads * head_dim.

    A key's weight falls linearly with its distance from the best key, down to zero.
    """
    kv_heads, head_dim = cache.shape[3:]
    num_rows, num_heads, _ = query.shape
    end = span.start + num_rows
    blocks = cache[span.table[: -(-end // BLOCK_TOKENS)]].swapaxes(0, 1)
    # Cut at ``end``: the last block may hold old bytes of other requests behind it.
    key, value = blocks.reshape(2, -1, kv_heads, head_dim)[:, :end]

    by_head = query.reshape(num_rows, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    scores = by_head.reshape(kv_heads, -1, head_dim) @ key.transpose(1, 2, 0)
    is_later = np.arange(end) > span.positions[:, None]
    np.copyto(scores.reshape(num_heads, num_rows, -1), np.float32(-np.inf), where=is_later)
    scores -= scores.max(axis=-1, keepdims=True)
    scores /= np.float32(128 * head_dim**0.5)
    weights = np.maximum(np.floor(scores) + _MOST_WEIGHT, 0)
    mixed = np.rint(weights @ value.swapaxes(0, 1) / weights.sum(axis=-1, keepdims=True))
    return mixed.reshape(num_heads, num_rows, head_dim).swapaxes(0, 1).reshape(num_rows, -1)


def _round(x: Floats) -> Floats:
    rounded: Floats = np.clip(np.rint(x), -_LARGEST, _LARGEST)
    return rounded


def _project(x: Floats, weight: Floats) -> Floats:
    return _round(x @ weight * np.float32(0.4 / len(weight) ** 0.5))


def _norm(x: Floats) -> Floats:
    squares = (x.astype(np.float64) ** 2).sum(axis=-1, keepdims=True) + 1
    return _round((x * (_SPREAD * np.sqrt(x.shape[-1] / squares))).astype(np.float32))


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    first, second = np.split(x, 2, axis=-1)
    return _round(np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1))
