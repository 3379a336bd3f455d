"""Worlds as they were at a moment: kept by an exploration, brought back once for each branch.

A snapshot is a pickle, so that branches do not touch each other. What no branch can change is not
in it: settings and keys, which are frozen, and a scratch that means nothing between two calls.
Those are the same objects in all branches.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.config import Config
from kvferry.core.keys import Keys

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

_shared: dict[int, object] = {}
"""By identity; what is here lives on, so no other object gets its number."""


def keep(world: object) -> bytes:
    out = io.BytesIO()
    pickler = pickle.Pickler(out, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(world)
    return out.getvalue()


def again(snapshot: bytes) -> Any:
    return pickle.loads(snapshot)


def _share(thing: object) -> Reduced:
    _shared[id(thing)] = thing
    return _by_number, (id(thing),)


def _by_number(number: int) -> object:
    return _shared[number]


def _array(array: npt.NDArray[Any]) -> Any:
    """Its bytes as they are: half of a world's time was numpy's own way to say them."""
    if array.dtype.hasobject or not array.flags.c_contiguous:
        return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    kind = bytearray if array.flags.writeable else bytes
    return np.ndarray, (array.shape, array.dtype, kind(array))


_TABLE: dict[type, Callable[[Any], Any]] = {
    **copyreg.dispatch_table,
    **dict.fromkeys((Config, Keys), _share),
    np.ndarray: _array,
}
