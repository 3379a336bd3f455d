"""Where a tensor's bytes are: address, shape and strides, whatever library made it.

Geometry comes from storage and strides, never from shape alone: a server may permute its KV
tensors (heads before tokens, layers inside blocks) and keep the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.errors import LayoutError


@dataclass(frozen=True)
class TensorView:
    """One tensor as plain numbers; ``strides`` are in bytes."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def view_of(tensor: Any, name: str) -> TensorView:
    """The view of a numpy array or a torch tensor (known by its methods; torch is not imported)."""
    if isinstance(tensor, TensorView):
        return tensor
    if hasattr(tensor, "data_ptr"):
        itemsize = int(tensor.element_size())
        return TensorView(
            name=name,
            address=int(tensor.data_ptr()),
            shape=tuple(int(extent) for extent in tensor.shape),
            strides=tuple(int(stride) * itemsize for stride in tensor.stride()),
            itemsize=itemsize,
        )
    if hasattr(tensor, "__array_interface__"):
        return TensorView(
            name=name,
            address=int(tensor.__array_interface__["data"][0]),
            shape=tuple(int(extent) for extent in tensor.shape),
            strides=tuple(int(stride) for stride in tensor.strides),
            itemsize=int(tensor.itemsize),
        )
    raise LayoutError(
        f"{name} is a {type(tensor).__name__}; a KV tensor must be a numpy array or a torch tensor"
    )
