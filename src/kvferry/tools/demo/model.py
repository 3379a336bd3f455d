"""A small decoder over paged KV whose bytes do not depend on how the work was scheduled.

Matrix libraries round differently for different shapes. So every row of every product is computed
at one fixed place in a fixed shape, chosen by the token's position alone:

::

    position   0 1 2 ... 15 | 16 17 ... 31 | ...        row of a tile = position % TILE
    tile       [ TILE rows x fan_in ] @ [ fan_in x fan_out ]         always this shape
    attention  [ QUERY_TILE rows ] x [ KEY_TILE keys ], both counted from position 0,
               partial sums added from the first key tile to the last

Absent rows and keys are zero or masked to an exact zero. So the rest of the batch, the chunks of a
prompt, and whether earlier KV was computed or loaded cannot change a bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.cache import reach

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

TILE = 16
QUERY_TILE = 4
KEY_TILE = 64
EPSILON = np.float32(1e-5)


@dataclass(frozen=True)
class ModelShape:
    """Everything that fixes the model: the sizes, the windows and the seed of its weights.

    ``windows`` has one entry per layer: ``None`` for full attention, or how many tokens back
    (itself included) a token may look.
    """

    vocab: int = 1024
    width: int = 256
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 512
    windows: tuple[int | None, ...] = ()
    max_tokens: int = 4096
    rope_theta: float = 10_000.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)

    @property
    def group_windows(self) -> tuple[int | None, ...]:
        """The windows that occur, in order of their first layer: one group each."""
        return tuple(dict.fromkeys(self.windows))

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The group of each layer."""
        return tuple(self.group_windows.index(window) for window in self.windows)

    def groups(self, block_tokens: int) -> tuple[reach.Group, ...]:
        """The KV groups for kvferry."""
        return tuple(
            reach.FullAttention(block_tokens)
            if window is None
            else reach.SlidingWindow(block_tokens, window=window)
            for window in self.group_windows
        )

    def kv_shape(self, num_blocks: int, block_tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's paged KV tensor."""
        return (num_blocks, 2, block_tokens, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, eq=False)
class Span:
    """Tokens of one request to compute now: positions ``start`` to ``start + len(tokens)``.

    ``tables`` are the request's block tables, one per group; each covers all those positions and
    what they look back at.
    """

    tokens: Ints
    start: int
    tables: tuple[Ints, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class _Layer:
    query_key_value: Floats
    output: Floats
    gate_up: Floats
    down: Floats
    group: int
    window: int | None


class Decoder:
    """Owns the weights and the forward pass. The caller owns the KV tensors and the schedule."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        rng = np.random.default_rng(shape.seed)

        def weight(fan_in: int, fan_out: int) -> Floats:
            values = rng.standard_normal((fan_in, fan_out), dtype=np.float32)
            return values / np.float32(np.sqrt(fan_in))

        query = shape.num_heads * shape.head_dim
        key = shape.num_kv_heads * shape.head_dim
        self.embedding = rng.standard_normal((shape.vocab, shape.width), dtype=np.float32)
        self.layers = tuple(
            _Layer(
                query_key_value=weight(shape.width, query + 2 * key),
                output=weight(query, shape.width),
                gate_up=weight(shape.width, 2 * shape.hidden),
                down=weight(shape.hidden, shape.width),
                group=group,
                window=window,
            )
            for group, window in zip(shape.layer_groups, shape.windows, strict=True)
        )
        self.head = weight(shape.width, shape.vocab)
        half = shape.head_dim // 2
        turns = np.arange(shape.max_tokens)[:, None] * shape.rope_theta ** (-np.arange(half) / half)
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
        batch = _Batch(spans, kv[0].shape[2])
        x = batch.tiling.to_tiles(self.embedding[batch.tokens])
        for layer, cache in zip(self.layers, kv, strict=True):
            x = x + self._attend(layer, _norm(x), batch, cache)
            gate, up = np.split(_norm(x) @ layer.gate_up, 2, axis=-1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down
        last_rows = np.array([rows.stop - 1 for rows in batch.slices])
        last = Tiling(batch.positions[last_rows])
        logits = last.to_tiles(batch.tiling.to_rows(x)[last_rows])
        logits = last.to_rows(_norm(logits) @ self.head)
        return [int(token) for token in logits.argmax(axis=-1)]

    def _attend(self, layer: _Layer, x: Floats, batch: _Batch, cache: Floats) -> Floats:
        shape = self.shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        projected = batch.tiling.to_rows(x @ layer.query_key_value)
        projected = projected.reshape(len(projected), heads + 2 * kv_heads, shape.head_dim)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        query = _rotate(projected[:, :heads], cos, sin)
        # Every span's KV is written before any span reads: a span may attend to another's blocks.
        block_ids = batch.block_ids[layer.group]
        cache[block_ids, 0, batch.offsets] = _rotate(
            projected[:, heads : heads + kv_heads], cos, sin
        )
        cache[block_ids, 1, batch.offsets] = projected[:, heads + kv_heads :]
        mixed = np.empty((len(projected), heads * shape.head_dim), np.float32)
        for span, rows in zip(batch.spans, batch.slices, strict=True):
            mixed[rows] = paged_attention(query[rows], span, layer, cache)
        return batch.tiling.to_tiles(mixed) @ layer.output


def paged_attention(query: Floats, span: Span, layer: _Layer, cache: Floats) -> Floats:
    """Causal attention of one span's rows over its block table; rows of heads * head_dim."""
    _, _, _, kv_heads, head_dim = cache.shape
    num_rows, heads, _ = query.shape
    window = layer.window
    first_row = span.start - span.start % QUERY_TILE
    num_query_tiles = -(-(span.end - first_row) // QUERY_TILE)
    first_key = 0 if window is None else max(0, span.start - window + 1) // KEY_TILE * KEY_TILE
    num_key_tiles = -(-(span.end - first_key) // KEY_TILE)

    # Queries as (query tile, 1, KV head, heads of the group * QUERY_TILE, head_dim).
    tiles = np.zeros((num_query_tiles * QUERY_TILE, heads, head_dim), np.float32)
    tiles[span.start - first_row : span.end - first_row] = query * np.float32(head_dim**-0.5)
    tiles = tiles.reshape(num_query_tiles, QUERY_TILE, kv_heads, heads // kv_heads, head_dim)
    tiles = tiles.transpose(0, 2, 3, 1, 4).reshape(num_query_tiles, 1, kv_heads, -1, head_dim)
    key, value = _gather(span, span.tables[layer.group], cache, first_key, num_key_tiles)

    scores = np.matmul(tiles, key.transpose(0, 2, 3, 1))
    at = first_row + np.arange(num_query_tiles * QUERY_TILE).reshape(-1, 1, QUERY_TILE, 1)
    back = first_key + np.arange(num_key_tiles * KEY_TILE).reshape(1, -1, 1, KEY_TILE)
    hidden = back > at if window is None else (back > at) | (back <= at - window)
    by_head = scores.reshape(num_query_tiles, num_key_tiles, heads, QUERY_TILE, KEY_TILE)
    np.copyto(by_head, np.float32(-np.inf), where=hidden[:, :, None])
    # Rows of the tile outside the span may see nothing at all; their result is not used.
    peak = scores.max(axis=-1, keepdims=True).max(axis=1, keepdims=True)
    scores -= np.maximum(peak, np.float32(-1e30))
    np.exp(scores, out=scores)
    sums = scores.sum(axis=-1, keepdims=True)
    mixed = np.matmul(scores, value.transpose(0, 2, 1, 3))
    total, result = sums[:, 0], mixed[:, 0]
    for tile in range(1, num_key_tiles):  # the order of these additions is part of the contract
        total += sums[:, tile]
        result += mixed[:, tile]
    result = result / np.maximum(total, np.float32(1e-30))
    rows = result.reshape(num_query_tiles, heads, QUERY_TILE, head_dim).transpose(0, 2, 1, 3)
    return rows.reshape(-1, heads * head_dim)[span.start - first_row :][:num_rows]


def _gather(
    span: Span, table: Ints, cache: Floats, first_key: int, num_key_tiles: int
) -> tuple[Floats, Floats]:
    """Keys and values from ``first_key`` on as (key tile, KEY_TILE, KV head, head_dim)."""
    _, _, block_tokens, kv_heads, head_dim = cache.shape
    first, last = first_key // block_tokens, -(-span.end // block_tokens)
    flat = np.zeros((2, num_key_tiles * KEY_TILE, kv_heads, head_dim), np.float32)
    paged = flat.reshape(2, -1, block_tokens, kv_heads, head_dim)
    blocks = table[first:last]
    paged[:, : last - first] = cache[blocks].swapaxes(0, 1)
    # Behind the last token, and where a window has passed, lie old bytes of other requests. They
    # must not reach a sum, not even times 0.
    paged[:, : last - first][:, blocks < 0] = 0
    flat[:, span.end - first_key :] = 0
    key, value = flat.reshape(2, num_key_tiles, KEY_TILE, kv_heads, head_dim)
    return key, value


class _Batch:
    """Where each token of a step goes: its tile row, its KV block and offset."""

    def __init__(self, spans: Sequence[Span], block_tokens: int) -> None:
        self.spans = spans
        self.tokens = np.concatenate([span.tokens for span in spans])
        self.positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        places = [np.arange(span.start, span.end) // block_tokens for span in spans]
        self.block_ids = [
            np.concatenate([table[place] for table, place in zip(group, places, strict=True)])
            for group in zip(*(span.tables for span in spans), strict=True)
        ]
        self.offsets = self.positions % block_tokens
        ends = np.cumsum([len(span.tokens) for span in spans])
        self.slices = [
            slice(int(end) - len(span.tokens), int(end))
            for span, end in zip(spans, ends, strict=True)
        ]
        self.tiling = Tiling(self.positions)


class Tiling:
    """Puts rows into tiles so that a row's place depends on its position only.

    Row with position p goes to row ``p % TILE`` of the first tile where that row is still free.
    """

    def __init__(self, positions: Ints) -> None:
        used = [0] * TILE
        places = np.empty(len(positions), np.int64)
        for i, residue in enumerate((positions % TILE).tolist()):
            places[i] = used[residue] * TILE + residue
            used[residue] += 1
        self._places = places
        self._num_tiles = max(used)

    def to_tiles(self, rows: Floats) -> Floats:
        """(rows, width) to (tiles, TILE, width), absent rows zero."""
        tiles = np.zeros((self._num_tiles * TILE, rows.shape[-1]), np.float32)
        tiles[self._places] = rows
        return tiles.reshape(self._num_tiles, TILE, rows.shape[-1])

    def to_rows(self, tiles: Floats) -> Floats:
        """(tiles, TILE, width) back to (rows, width)."""
        rows: Floats = tiles.reshape(-1, tiles.shape[-1])[self._places]
        return rows


def _norm(x: Floats) -> Floats:
    normed: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON)
    return normed


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def limit_matrix_threads(count: int) -> bool:
    """Let OpenBLAS use ``count`` threads from now on. One leaves the other cores to the copies.

    Returns:
        False if numpy uses another matrix library, which is then left as it is.
    """
    try:
        module = import_module("numpy._core._multiarray_umath")
    except ImportError:  # numpy 1
        module = import_module("numpy.core._multiarray_umath")
    library = ctypes.CDLL(str(module.__file__))  # finds symbols of what it is linked to as well
    for prefix in ("scipy_openblas", "openblas"):  # the build of numpy decides the name
        for suffix in ("64_", ""):
            setter = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
            if setter is not None:
                setter(ctypes.c_int(count))
                return True
    return False
