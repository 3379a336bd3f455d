"""From real KV tensors to a layout: per-block segment tables, by storage and strides.

::

    layer-outermost        one tensor per layer          block b: one segment per layer
      layer 0 [b0][b1][b2]...   layer 1 [b0][b1][b2]...
    K and V split          shape (2, blocks, ...)        block b: two segments per layer
      K [b0][b1]...  V [b0][b1]...
    block-outermost        one storage, layers inside    block b: one segment in all
      [b0: layer 0 | layer 1 | ...][b1: layer 0 | layer 1 | ...]
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvferry.device.layout.aliasing import find_overlap
from kvferry.device.layout.base import GroupLayout, Int64s
from kvferry.device.layout.tensor_view import TensorView, named_tensors, view_of
from kvferry.errors import LayoutError
from kvferry.integers import integer


class _Axis(NamedTuple):
    """One axis of a tensor; ``stride`` in bytes."""

    number: int
    extent: int
    stride: int


@dataclass(frozen=True)
class _Piece:
    """One run of bytes of block 0, before neighbours are merged."""

    base: int
    stride: int
    size: int
    label: str
    tensor: str


def describe(
    tensors: Mapping[str, Any] | Sequence[Any],
    *,
    block_axis: int | None = None,
    num_blocks: int | None = None,
) -> GroupLayout:
    """The layout of one group from its KV tensors, in layer order.

    ``tensors`` are numpy arrays or torch tensors, one or more per layer, by name or in order.
    ``block_axis`` is the axis that counts blocks, in every tensor. Left out, it is the one axis
    of each tensor whose extent is ``num_blocks``; where two axes have that extent, we refuse.

    Raises LayoutError, naming the tensor, for anything that cannot be described exactly: gaps
    inside a page, broadcast or reversed axes, overlapping blocks, counts that disagree.
    """
    views = [view_of(tensor, name) for name, tensor in named_tensors(tensors).items()]
    if not views:
        raise LayoutError("a group needs at least one KV tensor")
    if num_blocks is None:
        if block_axis is None:
            raise LayoutError("name the block_axis, or num_blocks to find it by")
        num_blocks = views[0].shape[_checked_axis(views[0], block_axis)]
    pieces: list[_Piece] = []
    for view in views:
        axis = _block_axis(view, block_axis, num_blocks)
        if view.shape[axis] != num_blocks:
            raise LayoutError(
                f"{view.name} has {view.shape[axis]} blocks on axis {axis} of shape {view.shape}; "
                f"the group has {num_blocks}"
            )
        pieces.extend(_pieces(view, axis))
    return _assemble(_in_slot_order(pieces, num_blocks), num_blocks)


def _checked_axis(view: TensorView, axis: int) -> int:
    axis, ndim = integer(axis, "block_axis"), len(view.shape)
    if not -ndim <= axis < ndim:
        raise LayoutError(f"{view.name} has no axis {axis}: its shape is {view.shape}")
    return axis % ndim


def _block_axis(view: TensorView, named: int | None, num_blocks: int) -> int:
    if named is not None:
        return _checked_axis(view, named)
    found = [axis for axis, extent in enumerate(view.shape) if extent == num_blocks]
    if len(found) != 1:
        raise LayoutError(
            f"{view.name} of shape {view.shape} has {len(found)} axes of extent {num_blocks}; "
            "name the block_axis"
        )
    return found[0]


def _pieces(view: TensorView, block_axis: int) -> list[_Piece]:
    """The runs of block 0 in one tensor, in the order of the axes that split them."""
    num_blocks, block_stride = view.shape[block_axis], view.strides[block_axis]
    all_axes = zip(range(len(view.shape)), view.shape, view.strides, strict=True)
    axes = [_Axis(*axis) for axis in all_axes if axis[0] != block_axis and axis[1] != 1]
    if num_blocks < 1 or any(axis.extent < 1 for axis in axes):
        raise LayoutError(f"{view.name} of shape {view.shape} holds no bytes")
    if any(axis.stride <= 0 for axis in axes) or (num_blocks > 1 and block_stride <= 0):
        raise LayoutError(
            f"{view.name} repeats or reverses an axis: strides {view.strides} bytes "
            f"for shape {view.shape}"
        )
    # Innermost first: each axis must start where the one inside it ends, or it splits the block.
    axes.sort(key=lambda axis: axis.stride)
    order = ",".join(f"{axis.number}x{axis.extent}" for axis in axes)
    run = view.itemsize
    while axes and axes[0].stride == run:
        run *= axes.pop(0).extent
    _refuse_gaps(view, axes, run, block_stride if num_blocks > 1 else None)
    axes.reverse()
    return [
        _Piece(
            base=view.address + sum(i * axis.stride for i, axis in zip(index, axes, strict=True)),
            stride=block_stride,
            size=run,
            label=f"{view.itemsize}[{order}]{index}",
            tensor=view.name,
        )
        for index in itertools.product(*(range(axis.extent) for axis in axes))
    ]


def _refuse_gaps(view: TensorView, axes: list[_Axis], run: int, block_stride: int | None) -> None:
    """Axes outside the block axis may split a block, and K and V inside; other gaps are padding."""
    inside = [axis for axis in axes if block_stride is None or axis.stride < block_stride]
    if len(inside) > 1 or (inside and inside[0].extent != 2):
        raise LayoutError(
            f"{view.name} is not contiguous inside a block: axis {inside[0].number} steps "
            f"{inside[0].stride} bytes over runs of {run} "
            f"(shape {view.shape}, strides {view.strides} bytes)"
        )


def _in_slot_order(pieces: list[_Piece], num_blocks: int) -> list[tuple[int, _Piece]]:
    """Pieces with their place in tensor order, as a slot will hold them.

    Tensor order, so that a slot's bytes never depend on where an allocator put a layer. Only
    when all pieces interleave block by block in one storage is their order in it theirs to keep,
    and sorting by address makes a block one run.
    """
    numbered = list(enumerate(pieces))
    low = min(piece.base for piece in pieces)
    high = max(piece.base + piece.size for piece in pieces)
    stride = pieces[0].stride
    one_storage = num_blocks > 1 and high - low <= stride
    if one_storage and all(piece.stride == stride for piece in pieces):
        numbered.sort(key=lambda item: item[1].base)
    return numbered


def _assemble(ordered: list[tuple[int, _Piece]], num_blocks: int) -> GroupLayout:
    _refuse_overlap([piece for _, piece in ordered], num_blocks)
    merged: list[_Piece] = []
    for _, piece in ordered:
        last = merged[-1] if merged else None
        # Merging past the block stride would take in the next block's bytes.
        if (
            last is not None
            and last.base + last.size == piece.base
            and (num_blocks == 1 or last.stride == piece.stride)
            and (num_blocks == 1 or last.size + piece.size <= last.stride)
        ):
            merged[-1] = replace(last, size=last.size + piece.size)
        else:
            merged.append(piece)
    bases, strides, sizes = _tables(merged)
    order = ";".join(f"{i}:{piece.label}:{piece.size}" for i, piece in ordered)
    ends = np.cumsum([piece.size for _, piece in ordered]).tolist()
    return GroupLayout(
        bases=bases,
        strides=strides,
        sizes=sizes,
        offsets=np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64),
        num_blocks=num_blocks,
        format=hashlib.sha256(order.encode()).hexdigest()[:16],
        spans=tuple(
            (piece.tensor, end - piece.size, end)
            for (_, piece), end in zip(ordered, ends, strict=True)
        ),
    )


def _refuse_overlap(pieces: list[_Piece], num_blocks: int) -> None:
    overlap = find_overlap(*_tables(pieces), num_blocks)
    if overlap is not None:
        names = dict.fromkeys(pieces[segment].tensor for segment in overlap.segments)
        raise LayoutError(f"blocks share bytes in {' and '.join(names)}: {overlap.words}")


def _tables(pieces: list[_Piece]) -> tuple[Int64s, Int64s, Int64s]:
    """Bases, strides and sizes."""
    table = np.array([(piece.base, piece.stride, piece.size) for piece in pieces], dtype=np.int64)
    bases, strides, sizes = table.T.copy()
    return bases, strides, sizes
