"""Remembers, roughly, which keys were here once: to tell "evicted" from "never stored"."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.types import Key


class Ghosts:
    """A table with one place per bucket that holds part of the last key put there.

    Owns nothing that matters: a newer ghost may replace an older one, and the answer serves people
    who ask why, never a decision.
    """

    def __init__(self, num_keys: int) -> None:
        size = 1 << max(10, (4 * num_keys - 1).bit_length())
        self._mask = np.uint64(size - 1)
        self._seen = np.zeros(size, dtype=np.uint64)

    def add(self, keys: Keys) -> None:
        self._seen[self._places(keys)] = keys.array[:, 1]

    def has(self, key: Key) -> bool:
        """Whether this one key is remembered."""
        place = int.from_bytes(key[:8], "little") & int(self._mask)
        return bool(self._seen.item(place) == int.from_bytes(key[8:16], "little"))

    def _places(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys.array[:, 0] & self._mask).astype(np.int64)
