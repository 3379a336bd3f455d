"""Which blocks of a message follow each other: runs of chains, numbered."""

from __future__ import annotations

import numpy as np

from kvferry.types import RunNumbers, SlotArray


def run_numbers(at: SlotArray, starts: SlotArray) -> RunNumbers:
    """Number the runs: a block follows the one before it if ``at`` grows by one between them.

    Unless it is at one of the positions ``starts``, where another chain begins.
    """
    is_first = np.empty(len(at), dtype=bool)
    is_first[1:] = at[1:] != at[:-1] + 1
    is_first[starts] = True
    return np.cumsum(is_first)
