"""Where a tensor's bytes are: address, shape and strides, whatever library made it.

Geometry comes from storage and strides, never from shape alone: a server may permute its KV
tensors (heads before tokens, layers inside blocks) and keep the shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import LayoutError

_STRIDED = "torch.strided"

_PLAIN_KINDS = "biufcmMV"
"""Kinds of numpy dtypes whose bytes are the value. Extensions such as bfloat16 are V."""


@dataclass(frozen=True)
class TensorView:
    """One tensor as plain numbers; ``strides`` are in bytes."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def extent(self) -> tuple[int, int]:
        """The address of the first byte, and the one after the last; strides may be negative."""
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        low = self.address + sum(step for step in steps if step < 0)
        high = self.address + sum(step for step in steps if step > 0) + self.itemsize
        return low, high


def named_tensors(tensors: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    """A group's tensors by name, in layer order; without names, by their number.

    A bare array is refused: it could be gone through, and its blocks be taken for layers.
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
    """The view of a numpy array or a torch tensor (known by its methods; torch is not imported).

    LayoutError, with the tensor's name, for what has no bytes at an address, or bytes that must not
    be written: a load would change them all the same.
    """
    if isinstance(tensor, TensorView):
        return tensor
    if isinstance(tensor, np.ndarray):
        return _of_numpy(tensor, name)
    if hasattr(tensor, "data_ptr"):
        return _of_torch(tensor, name)
    # Other objects may lend bytes that are made for the moment (an image, a number): those are gone
    # when we come to copy them.
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
    return TensorView(
        name=name,
        address=int(array.__array_interface__["data"][0]),
        shape=tuple(int(extent) for extent in array.shape),
        strides=tuple(int(stride) for stride in array.strides),
        itemsize=int(array.itemsize),
    )


def _of_torch(tensor: Any, name: str) -> TensorView:
    layout = str(getattr(tensor, "layout", _STRIDED))
    if layout != _STRIDED or getattr(tensor, "is_nested", False):
        kind = layout.removeprefix("torch.") if layout != _STRIDED else "nested"
        raise LayoutError(f"{name} is a {kind} tensor; KV must be dense, with a stride per axis")
    where = getattr(tensor, "device", "an unknown device")
    try:
        itemsize = int(tensor.element_size())
        view = TensorView(
            name=name,
            address=int(tensor.data_ptr()),
            shape=tuple(int(extent) for extent in tensor.shape),
            strides=tuple(int(stride) * itemsize for stride in tensor.stride()),
            itemsize=itemsize,
        )
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise LayoutError(
            f"{name} (a {type(tensor).__name__} on {where}) does not say where its bytes are: "
            f"{error}"
        ) from error
    if not view.address and 0 not in view.shape:
        raise LayoutError(
            f"{name} (a {type(tensor).__name__} on {where}) has no memory: nothing to copy from"
        )
    return view
