"""The layout of blocks: their segments on the device, and their byte order in a host slot.

The layout follows from storage and strides, never from shape alone: a server may permute its KV
tensors (heads before tokens, layers inside blocks) and keep the shapes::

    layer-outermost        one tensor per layer          block b: one segment per layer
      layer 0 [b0][b1][b2]...   layer 1 [b0][b1][b2]...
    K and V split          shape (2, blocks, ...)        block b: two segments per layer
      K [b0][b1]...  V [b0][b1]...
    block-outermost        one storage, layers inside    block b: one segment in all
      [b0: layer 0 | layer 1 | ...][b1: layer 0 | layer 1 | ...]

Blocks may be cut between layers into parts that arrive one after the other. The last part is half
as long as the others, because no later part arrives while the model reads it::

    slot      | layer 0 | layer 1 | layer 2 | layer 3 | layer 4 | layer 5 | layer 6 |
    parts     |-------- 0 --------|-------- 1 --------|-------- 2 --------|--- 3 ---|
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence, ValuesView
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.core.quantities import integer
from kvferry.errors import LayoutError

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GroupLayout:
    """The segments of one group's blocks, on the device and in a host slot.

    Segment ``s`` of device block ``b`` is the ``sizes[s]`` bytes at ``bases[s] + b * strides[s]``.
    In a host slot the segments follow each other without gaps. ``format`` identifies the byte order
    in a slot: slots may be exchanged only between equal formats. ``spans`` maps tensors to bytes of
    a slot: a tensor's name, its first byte, the byte after its last.
    """

    bases: Int64s
    strides: Int64s
    sizes: Int64s
    num_blocks: int
    format: str = ""
    spans: tuple[tuple[str, int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("bases", "strides", "sizes"):
            array = np.array(getattr(self, name), dtype=np.int64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
            if array.shape != (len(self.sizes),):
                raise LayoutError(
                    f"{name} has shape {array.shape}; all three tables need one entry per segment"
                )
        if not len(self.sizes) or int(self.sizes.min()) < 1:
            raise LayoutError("a block needs at least one segment, and a segment at least one byte")
        if self.num_blocks < 1:
            raise LayoutError(f"a layout needs at least one block, got {self.num_blocks}")

    @property
    def num_segments(self) -> int:
        return len(self.sizes)

    @cached_property
    def offsets(self) -> Int64s:
        """Byte at which each segment begins in a host slot."""
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def block_bytes(self) -> int:
        return int(self.sizes.sum())


def find_overlap(
    bases: Int64s, strides: Int64s, sizes: Int64s, num_blocks: int
) -> tuple[tuple[int, int], str] | None:
    """Return two segments that share a byte, and the blocks where, in words; None if none do.

    Compares only segments whose extents over all blocks meet: those of separate tensors do not.
    """
    ends = bases + (num_blocks - 1) * strides + sizes
    order = np.argsort(bases, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    for cluster in np.split(order, np.flatnonzero(bases[order][1:] >= reach[:-1]) + 1):
        first_ends, steps = bases[cluster] + sizes[cluster], strides[cluster]
        count, step = num_blocks, int(steps[0])
        if step > 0 and (steps == step).all():
            # With equal strides only nearby blocks can overlap, so the first few suffice.
            count = min(count, int(first_ends.max() - bases[cluster].min()) // step + 2)
        starts = (bases[cluster, None] + steps[:, None] * np.arange(count)).ravel()
        ends = starts + np.repeat(sizes[cluster], count)
        in_order = np.argsort(starts, kind="stable")
        hits = np.flatnonzero(ends[in_order][:-1] > starts[in_order][1:])
        if hits.size:
            places, blocks = np.divmod(in_order[hits[0] : hits[0] + 2], count)
            one, other = cluster[places].tolist()
            first, second = blocks.tolist()
            words = f"segment {one} of block {first} overlaps segment {other} of block {second}"
            return (one, other), words
    return None


_PLAIN_KINDS = "biufcmMV"
"""Kinds of numpy dtypes whose bytes are the values. Extensions such as bfloat16 are V."""


@dataclass(frozen=True)
class TensorView:
    """Address and geometry of one tensor; ``strides`` are in bytes."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def named_tensors(tensors: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    """Return a group's tensors by name, in layer order; unnamed ones are named by number.

    LayoutError for a single array: iterating it would take its blocks for layers.
    """
    if isinstance(tensors, Mapping):
        return {str(name): tensor for name, tensor in tensors.items()}
    is_text = isinstance(tensors, (str, bytes, bytearray, memoryview))
    if isinstance(tensors, (Sequence, ValuesView)) and not is_text:
        return {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}
    kind = type(tensors).__name__
    raise LayoutError(
        f"KV tensors come by name or in a list, one or more per layer, got a single {kind}: "
        "give a mapping, or [tensor] if there is only one"
    )


def view_of(tensor: Any, name: str) -> TensorView:
    """Return the view of a numpy array or a torch tensor (recognized without importing torch).

    LayoutError if its bytes have no address, or if a load could not write them.
    """
    if isinstance(tensor, TensorView):
        return tensor
    if isinstance(tensor, np.ndarray):
        return _of_numpy(tensor, name)
    if hasattr(tensor, "data_ptr"):
        return _of_torch(tensor, name)
    # Other objects may expose temporary buffers, which are freed before a copy.
    raise LayoutError(
        f"{name} is a {type(tensor).__name__}; a KV tensor must be a numpy array or a torch tensor"
    )


def _of_numpy(array: npt.NDArray[Any], name: str) -> TensorView:
    if array.dtype.hasobject or array.dtype.kind not in _PLAIN_KINDS:
        raise LayoutError(
            f"{name} is an array of {array.dtype} (references to objects, or text); KV must be "
            "numbers or plain records"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise LayoutError(f"{name} is a masked array, whose mask would be lost; give its .data")
    if not array.flags.writeable:
        raise LayoutError(f"{name} is read-only; blocks could never be loaded into it")
    address = int(array.__array_interface__["data"][0])
    return TensorView(name, address, array.shape, array.strides, array.itemsize)


def _of_torch(tensor: Any, name: str) -> TensorView:
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if layout != "torch.strided" or getattr(tensor, "is_nested", False):
        kind = layout.removeprefix("torch.") if layout != "torch.strided" else "nested"
        raise LayoutError(f"{name} is a {kind} tensor; KV must be dense, with a stride per axis")
    what = f"{name} (a {type(tensor).__name__} on {getattr(tensor, 'device', 'an unknown device')})"
    try:
        itemsize, address = int(tensor.element_size()), int(tensor.data_ptr())
        shape = tuple(int(extent) for extent in tensor.shape)
        strides = tuple(int(stride) * itemsize for stride in tensor.stride())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise LayoutError(f"{what} does not say where its bytes are: {error}") from error
    if not address and 0 not in shape:
        raise LayoutError(f"{what} has no memory: nothing to copy from")
    # Only on CPU: the kernel lists the addresses of device memory as inaccessible pages.
    if getattr(getattr(tensor, "device", None), "type", None) == "cpu" and _is_read_only(address):
        raise LayoutError(f"{name} is read-only memory; blocks could never be loaded into it")
    return TensorView(name, address, shape, strides, itemsize)


def _is_read_only(address: int) -> bool:
    """Whether memory is mapped read-only: torch does not know, and a load would crash."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            place, flags = line.split(None, 2)[:2]
            first, _, end = place.partition("-")
            if int(first, 16) <= address < int(end, 16):
                return "w" not in flags
    return False


class _Axis(NamedTuple):
    """One axis of a tensor; ``stride`` is in bytes."""

    number: int
    extent: int
    stride: int


@dataclass(frozen=True)
class _Piece:
    """A contiguous run of bytes of block 0, before adjacent pieces are merged to segments."""

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
    """Return the layout of one group from its KV tensors, in layer order.

    ``tensors`` are numpy arrays or torch tensors, one or more per layer, by name or in order.
    ``block_axis`` is the axis that counts blocks, in every tensor. By default it is the only axis
    of each tensor with extent ``num_blocks``; LayoutError if two axes have that extent.

    Raises LayoutError, with the tensor's name, for any layout it cannot describe exactly: gaps
    inside a page, broadcast or reversed axes, overlapping blocks, different numbers of blocks.
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
    """Return the pieces of block 0 in one tensor, in the order of the axes that split it."""
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
    # From the innermost axis on: an axis whose stride exceeds the run so far splits the block.
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
    """Refuse padding: only outer axes and one inner axis of extent 2 (K, V) may split a block."""
    inside = [axis for axis in axes if block_stride is None or axis.stride < block_stride]
    if len(inside) > 1 or (inside and inside[0].extent != 2):
        raise LayoutError(
            f"{view.name} is not contiguous inside a block: axis {inside[0].number} steps "
            f"{inside[0].stride} bytes over runs of {run} "
            f"(shape {view.shape}, strides {view.strides} bytes)"
        )


def _in_slot_order(pieces: list[_Piece], num_blocks: int) -> list[tuple[int, _Piece]]:
    """Return the pieces in the order of a slot, each with its position in tensor order.

    Tensor order does not depend on the addresses of layers. Only pieces that all interleave block
    by block in one storage are sorted by address, which makes a block one run of bytes.
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
    pieces = [piece for _, piece in ordered]
    overlap = find_overlap(*_tables(pieces), num_blocks)
    if overlap is not None:
        names = dict.fromkeys(pieces[segment].tensor for segment in overlap[0])
        raise LayoutError(f"blocks share bytes in {' and '.join(names)}: {overlap[1]}")
    merged: list[_Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        is_next = last is not None and last.base + last.size == piece.base
        if last is not None and is_next and num_blocks > 1:
            is_next = last.stride == piece.stride >= last.size + piece.size
        if last is not None and is_next:
            merged[-1] = replace(last, size=last.size + piece.size)
        else:
            merged.append(piece)
    bases, strides, sizes = _tables(merged)
    order = ";".join(f"{i}:{piece.label}:{piece.size}" for i, piece in ordered)
    ends = np.cumsum([piece.size for piece in pieces]).tolist()
    return GroupLayout(
        bases=bases,
        strides=strides,
        sizes=sizes,
        num_blocks=num_blocks,
        format=hashlib.sha256(order.encode()).hexdigest()[:16],
        spans=tuple(
            (piece.tensor, end - piece.size, end) for piece, end in zip(pieces, ends, strict=True)
        ),
    )


def _tables(pieces: list[_Piece]) -> tuple[Int64s, Int64s, Int64s]:
    """Return bases, strides and sizes of the pieces, each as an array."""
    table = np.array([(piece.base, piece.stride, piece.size) for piece in pieces], dtype=np.int64)
    bases, strides, sizes = table.T.copy()
    return bases, strides, sizes


NUM_PARTS = 4
"""Parts of a load; each is a pass over the slots, and costs 900 MB 0.3 ms (one NVIDIA H200)."""


@dataclass(frozen=True, eq=False)
class LayerPart:
    """Some layers of every block: their layout, and the byte of a slot where they ``start``."""

    layout: GroupLayout
    start: int


@dataclass(frozen=True, eq=False)
class LayerParts:
    """The parts of a group's blocks, in the order in which they arrive."""

    parts: tuple[LayerPart, ...]

    @classmethod
    def of(cls, layout: GroupLayout, num_parts: int = NUM_PARTS) -> LayerParts:
        """Cut blocks between tensors; returns a single part if ``spans`` is empty."""
        bounds = [0, *_part_bounds(layout, num_parts), layout.block_bytes]
        pairs = itertools.pairwise(bounds)
        return cls(tuple(LayerPart(_slice(layout, *pair), pair[0]) for pair in pairs))

    def __len__(self) -> int:
        return len(self.parts)

    def last_of(self, layout: GroupLayout, tensors: Sequence[str]) -> int:
        """Return the number of the last part that has bytes of these tensors of ``layout``."""
        ends = [end for name, _, end in layout.spans if name in tensors]
        starts = [part.start for part in self.parts]
        return bisect.bisect_right(starts, max(ends) - 1) - 1 if ends else len(self.parts) - 1


def _part_bounds(layout: GroupLayout, num_parts: int) -> list[int]:
    """Return the bytes of a slot at which a new part begins, without byte 0."""
    between = sorted({start for _, start, _ in layout.spans if start})
    if not between:
        return []
    whole = layout.block_bytes
    wanted = [2 * number * whole / (2 * num_parts - 1) for number in range(1, num_parts)]
    return sorted({min(between, key=lambda at: abs(at - goal)) for goal in wanted})


def _slice(layout: GroupLayout, start: int, end: int) -> GroupLayout:
    """Return the layout of bytes ``start`` to ``end`` of a slot, cutting segments at both."""
    low = np.maximum(layout.offsets, start)
    high = np.minimum(layout.offsets + layout.sizes, end)
    inside = np.flatnonzero(high > low)
    sizes = (high - low)[inside]
    return GroupLayout(
        bases=layout.bases[inside] + (low - layout.offsets)[inside],
        strides=layout.strides[inside],
        sizes=sizes,
        num_blocks=layout.num_blocks,
    )
