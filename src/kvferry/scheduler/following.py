"""Which blocks of a message follow each other: runs of chains, numbered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.types import RunNumbers, SlotArray

Flags = npt.NDArray[np.bool_]

_APART = 1 << 40
"""No chain is as long: blocks of two groups never follow each other."""


def run_numbers(at: SlotArray, starts: SlotArray) -> RunNumbers:
    """Number the runs: a block follows the one before it if ``at`` grows by one between them.

    Unless it is at one of the positions ``starts``, where another chain begins.
    """
    is_first = np.empty(len(at), dtype=bool)
    is_first[1:] = at[1:] != at[:-1] + 1
    is_first[starts] = True
    return np.cumsum(is_first)


class Wanted(NamedTuple):
    """Blocks to ask levels for, and where each stands: next numbers, next blocks.

    ``beyond`` is 0 for those a hit hangs on. The others are known, or behind its end, but so many
    blocks behind one of those: that may lie in an object with their name.
    """

    keys: Keys
    at: SlotArray
    beyond: SlotArray

    @classmethod
    def of(cls, group: int, keys: Keys, unknown: Flags, end: int, more: int) -> Wanted:
        """Those of a group's blocks before the hit's end that are unknown, and ``more`` behind."""
        here = np.arange(min(len(unknown), end + more))
        is_needed = unknown[: len(here)] & (here < end)
        last = np.maximum.accumulate(np.where(is_needed, here, -more - 1))
        beyond = here - last
        at = np.flatnonzero(beyond <= more)
        return cls(keys.take(at), at + group * _APART, beyond[at])

    @classmethod
    def joined(cls, parts: Sequence[Wanted]) -> Wanted:
        """One after the other."""
        keys = Keys(np.concatenate([part.keys.array for part in parts]))
        return cls(
            keys,
            np.concatenate([part.at for part in parts]),
            np.concatenate([part.beyond for part in parts]),
        )

    @property
    def num_needed(self) -> int:
        """How many of them a hit hangs on."""
        return int(np.count_nonzero(self.beyond == 0))

    def take(self, which: Flags) -> Wanted:
        return Wanted(self.keys.take(which), self.at[which], self.beyond[which])

    def answered_by(self, asked: Keys, most_in_one: int) -> Flags:
        """For each, whether a question about a chain with these keys says as much as our own would.

        That is: it names this block and whatever of ours follows it, as far as an object of
        ``most_in_one`` blocks may reach. Where an object has one block, it need only name this one.
        """
        named = np.isin(self.keys.array[:, 0], asked.array[:, 0])
        if most_in_one == 1 or named.all() or not named.any():
            return named
        runs = run_numbers(self.at, np.zeros(1, dtype=np.int64))
        unnamed = np.flatnonzero(~named)
        here = np.arange(len(named))
        following = np.searchsorted(unnamed, here)
        has_some = following < len(unnamed)
        first = unnamed.take(following, mode="clip")  # the first from here on that it does not name
        is_in_reach = has_some & (first - here < most_in_one) & (runs[first] == runs)
        return named & ~is_in_reach
