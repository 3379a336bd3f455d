"""KV tensors in every layout we support, with guard bytes wherever a layout leaves room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.transfer.layout import GroupLayout, describe

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

GUARD = 24


@dataclass(frozen=True, eq=False)
class Kv:
    """One group's tensors: what the card sees, what owns the bytes, and a block as bytes."""

    layout: GroupLayout
    memory: tuple[Bytes, ...]
    parts: Callable[[int], list[Array]]
    """The arrays of one block in slot order; writing to them writes the block."""

    def block(self, block: int) -> bytes:
        return b"".join(part.tobytes() for part in self.parts(block))

    def set_block(self, block: int, content: bytes) -> None:
        at = 0
        for part in self.parts(block):
            part[...] = np.frombuffer(content[at : at + part.nbytes], part.dtype).reshape(
                part.shape
            )
            at += part.nbytes

    def snapshot(self) -> list[bytes]:
        """All memory, guards and other blocks included."""
        return [memory.tobytes() for memory in self.memory]


class _Maker:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.memory: list[Bytes] = []

    def tensor(self, shape: tuple[int, ...], dtype: Any, *, pad: int = 0) -> Array:
        """Random bytes with guards around, and ``pad`` bytes after every first-axis entry."""
        itemsize = np.dtype(dtype).itemsize
        inner = int(np.prod(shape[1:])) * itemsize
        total = GUARD + shape[0] * (inner + pad) + GUARD
        memory = self.rng.integers(0, 256, total, dtype=np.uint8)
        self.memory.append(memory)
        strides = [inner + pad]
        for extent in shape[1:]:
            strides.append(strides[-1] // extent if len(strides) > 1 else inner // extent)
        return np.ndarray(shape, dtype, buffer=memory.data, offset=GUARD, strides=tuple(strides))


def _layers(make: _Maker, num_blocks: int, page: int, dtype: Any, layers: int = 3) -> Kv:
    tensors = [make.tensor((num_blocks, page), dtype) for _ in range(layers)]
    return _kv(make, tensors, 0, lambda b: [t[b] for t in tensors])


def _guarded(make: _Maker, num_blocks: int, page: int, dtype: Any) -> Kv:
    tensors = [make.tensor((num_blocks, page), dtype, pad=GUARD) for _ in range(3)]
    return _kv(make, tensors, 0, lambda b: [t[b] for t in tensors])


def _split(make: _Maker, num_blocks: int, page: int, dtype: Any) -> Kv:
    tensors = [make.tensor((2, num_blocks, page), dtype) for _ in range(2)]
    return _kv(make, tensors, 1, lambda b: [t[i, b] for t in tensors for i in range(2)])


def _packed(make: _Maker, num_blocks: int, page: int, dtype: Any) -> Kv:
    tensors = [make.tensor((num_blocks, 2, page), dtype) for _ in range(2)]
    return _kv(make, tensors, 0, lambda b: [t[b] for t in tensors])


def _block_outermost(make: _Maker, num_blocks: int, page: int, dtype: Any) -> Kv:
    storage = make.tensor((num_blocks, 3, 2, page), dtype)
    return _kv(make, [storage[:, i] for i in range(3)], 0, lambda b: [storage[b]])


def _mixed(make: _Maker, num_blocks: int, page: int, dtype: Any) -> Kv:
    tensors = [make.tensor((num_blocks, page * factor), dtype) for factor in (1, 3, 2)]
    return _kv(make, tensors, 0, lambda b: [t[b] for t in tensors])


def _kv(make: _Maker, tensors: list[Array], axis: int, parts: Callable[[int], list[Array]]) -> Kv:
    return Kv(describe(tensors, block_axis=axis), tuple(make.memory), parts)


LAYOUTS: dict[str, Callable[[_Maker, int, int, Any], Kv]] = {
    "layers": _layers,
    "guarded": _guarded,
    "split": _split,
    "packed": _packed,
    "block-outermost": _block_outermost,
    "mixed": _mixed,
}


def make_kv(
    layout: str, *, num_blocks: int = 7, page: int = 48, dtype: Any = np.int8, seed: int = 0
) -> Kv:
    """KV tensors of ``page`` elements per segment, filled with random bytes."""
    return LAYOUTS[layout](_Maker(seed), num_blocks, page, dtype)
