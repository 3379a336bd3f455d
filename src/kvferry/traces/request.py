"""One request of a trace: which blocks it asked for, when, and what was said with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.hints import Hints
from kvferry.keys import KEY_WORDS, Keys

Numbers = npt.NDArray[np.uint64]

# Of the finalizer of splitmix64: every bit of a number moves every bit of each word.
_STEPS = np.arange(1, KEY_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def keys_of_numbers(numbers: Numbers) -> Keys:
    """A key for each number that a trace gives a block: equal numbers, equal keys."""
    words = numbers[:, None] + _STEPS
    words ^= words >> _SHIFTS[0]
    words *= _FIRST
    words ^= words >> _SHIFTS[1]
    words *= _SECOND
    words ^= words >> _SHIFTS[2]
    return Keys(words)


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """Owns plain facts: seconds from the trace's start, a number for each block, lengths in tokens.

    Equal numbers are equal blocks behind equal beginnings. ``numbers`` may end with a block that
    the prompt only begins: ``num_full`` of them are whole. ``hit_tokens`` is what the server that
    was recorded found, None where nobody recorded it.
    """

    at: float
    numbers: Numbers
    num_full: int
    input_tokens: int
    output_tokens: int = 0
    hit_tokens: int | None = None
    hints: Hints | None = None

    def keys(self) -> Keys:
        return keys_of_numbers(self.numbers)
