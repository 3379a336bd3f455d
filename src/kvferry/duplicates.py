"""Whether a key is twice in a batch: exactly, and mostly without sorting."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys

_FEW = 512  # words that are sorted before anything else could be done
_CELLS = 1 << 16
_LOW_BITS = np.uint64(_CELLS - 1)

_Words = npt.NDArray[np.uint64]


class Duplicates:
    """Finds batches in which a key is twice. Owns a scratch: one cell for each value of 16 bits.

    ::

        every key writes its number into the cell of its low bits, then reads that cell
        who reads a number that is not its own has met somebody:
            is it the key it met, or twice among those who met somebody?

    That finds all: of the keys that share a cell only one reads its own number, so of a key that is
    there twice at least one has met somebody, and if it did not meet the other, both have.
    """

    def __init__(self) -> None:
        self._cells = np.zeros(_CELLS, dtype=np.uint16)

    def any_in(self, keys: Keys) -> bool:
        # First words alone nearly always tell; keys that share one are compared whole.
        words = keys.array[:, 0].copy()
        if _FEW <= len(words) <= _CELLS:  # a cell cannot hold the numbers of more
            twice = self._any_twice(words)
        else:
            twice = _any_twice_sorted(words)
        return twice and len(set(keys)) != len(keys)

    def _any_twice(self, words: _Words) -> bool:
        cells = (words & _LOW_BITS).view(np.int64)
        numbers = np.arange(len(words), dtype=np.uint16)
        self._cells[cells] = numbers
        there = self._cells.take(cells)
        met = (there != numbers).nonzero()[0]
        mine, other = words.take(met), words.take(there.take(met))
        return bool((mine == other).any()) or _any_twice_sorted(mine)


def _any_twice_sorted(words: _Words) -> bool:
    """Sorts them in place."""
    words.sort()
    return bool(np.count_nonzero(words[1:] == words[:-1]))
