"""Admission: which blocks are requested often enough to be stored."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import Keys

_ROWS = 4
_MOST = 255


class SeenOften:
    """Admits keys that were requested at least ``threshold`` times, in little memory.

    Owns a count-min sketch: each key has a counter in each of four rows, and its smallest counter
    is at least the number of requests. Sharing counters can only admit a block too early. All
    counters are halved from time to time, so that old popularity fades.
    """

    def __init__(self, threshold: int, *, num_keys: int) -> None:
        """``num_keys`` is about how many different keys to tell apart, such as the pool's size."""
        self.threshold = min(threshold, _MOST)
        self.counts = threshold > 1
        """Whether requests are counted; False admits every key."""
        width = 1 << max(10, (4 * num_keys - 1).bit_length()) if threshold > 1 else 1
        self._counters = np.zeros((_ROWS, width), dtype=np.uint8)
        self._mask = np.uint64(width - 1)
        self._seen = 0
        self._halve_after = 8 * width

    def see(self, keys: Keys) -> None:
        """Count one request for each of these blocks."""
        if not self.counts:
            return
        self._seen += len(keys)
        if self._seen > self._halve_after:
            self._counters >>= 1
            self._seen //= 2
        for row, places in zip(self._counters, self._places(keys), strict=True):
            row[places] = np.minimum(row[places], _MOST - 1) + 1

    def admits(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return, for each key, whether it was requested often enough."""
        if not self.counts:
            return np.ones(len(keys), dtype=bool)
        pairs = zip(self._counters, self._places(keys), strict=True)
        least = np.minimum.reduce([row[places] for row, places in pairs])
        return np.asarray(least >= self.threshold)

    def _places(self, keys: Keys) -> list[npt.NDArray[np.int64]]:
        # The words of a key are independent hashes already, one for each row.
        return [(keys.array[:, row] & self._mask).astype(np.int64) for row in range(_ROWS)]


# ------------------------------------------------------------------------------------------------
# How many slots to keep evictable ahead of need: a watermark that follows demand.

_STEPS_AHEAD = 4  # steps of demand to cover: a copy started now lands within a few steps
_KEEP = 0.9  # share of the peak kept each step: a burst counts for about twenty steps


class Watermark:
    """Number of slots to keep ready for stores: a few times the recent peak of demand.

    Owns that peak.
    """

    def __init__(self, *, least: int = 0, most: int) -> None:
        """Keep :attr:`depth` between ``least`` and ``most`` slots."""
        self._least = least
        self._most = most
        self._peak = 0.0

    def demand(self, count: int) -> None:
        """Note that the last step took this many slots."""
        self._peak = max(float(count), self._peak * _KEEP)
        if self._peak < 0.5:
            self._peak = 0.0

    @property
    def depth(self) -> int:
        return min(self._most, max(self._least, math.ceil(self._peak * _STEPS_AHEAD)))
