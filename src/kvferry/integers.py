"""Integers from whatever a caller has: taken as they are, or refused; never cut, never guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError

Integers = Sequence[int] | npt.NDArray[np.integer]
"""A vector of integers: a sequence, a numpy array, or a torch tensor."""

_MOST_INT64 = 2**63 - 1
_NO_VECTORS = (str, bytes, bytearray, memoryview, Set, Mapping)
"""Can be gone through, but as characters, as bytes, or in no order of the caller's."""


def integers(values: Integers, what: str) -> npt.NDArray[np.int64]:
    """``values`` as an int64 vector, their own memory if it is one already.

    ``what`` names them in an error. A torch tensor on a GPU is fetched, which waits for that GPU.
    """
    if isinstance(values, np.ndarray):
        array: npt.NDArray[Any] = values
    elif hasattr(values, "data_ptr"):
        array = _of_torch(values, what)
    else:
        array = _of_items(values, what)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{what} must be a vector of integers, got an array of shape {array.shape} of "
            f"{array.dtype}"
        )
    if array.dtype.kind == "u" and array.size and int(array.max()) > _MOST_INT64:
        raise InputError(f"{what} must fit 64 signed bits, got {int(array.max())}")
    return array.astype(np.int64, copy=False)


def integer(value: object, what: str) -> int:
    """One integer of any integral type; True and 1.0 are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{what} must be an integer, got {type(value).__name__} {value!r}")
    return int(value)


def _of_items(values: Any, what: str) -> npt.NDArray[np.int64]:
    if isinstance(values, _NO_VECTORS) or not isinstance(values, Iterable):
        raise InputError(f"{what} must be a sequence of integers, got {type(values).__name__}")
    items = values if isinstance(values, (list, tuple)) else list(values)
    # By type, not by value: numpy would take True as 1 and cut 1.5 to 1.
    for kind in set(map(type, items)):
        if kind is not int and (issubclass(kind, bool) or not issubclass(kind, Integral)):
            raise InputError(f"{what} must be integers, got a {kind.__name__}")
    try:
        return np.fromiter(items, dtype=np.int64, count=len(items))
    except OverflowError:
        worst = max(items, key=abs)
        raise InputError(f"{what} must fit 64 signed bits, got {written(worst)}") from None


def _of_torch(tensor: Any, what: str) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:  # meta, sparse, no numpy dtype
        raise InputError(f"{what} must be a vector of integers, got a tensor: {error}") from error
    return array


def written(value: int) -> str:
    """A number for an error; Python itself refuses to write very long ones."""
    return str(value) if abs(value) < 10**40 else f"one of {int(value).bit_length()} bits"
