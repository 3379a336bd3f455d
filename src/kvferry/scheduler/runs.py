"""Blocks of a message: where a copy ends, which follow each other, and which to ask tiers for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.slots import Lease
from kvferry.core.keys import Keys
from kvferry.types import RunNumbers, SlotArray, TierName

Flags = npt.NDArray[np.bool_]

_APART = 1 << 40
"""No chain is as long: blocks of two groups never follow each other."""


@dataclass(frozen=True, eq=False)
class End:
    """One end of a copy below the device: the tier, its slots (if it has any), and their claim."""

    tier: TierName
    slots: SlotArray
    leases: tuple[Lease, ...] = ()


def run_numbers(at: SlotArray, starts: SlotArray) -> RunNumbers:
    """Number the runs: a block follows the one before it if ``at`` grows by one between them.

    Unless it is at one of the positions ``starts``, where another chain begins.
    """
    is_first = np.empty(len(at), dtype=bool)
    is_first[1:] = at[1:] != at[:-1] + 1
    is_first[starts] = True
    return np.cumsum(is_first)


def with_furthest(keys: Keys, runs: RunNumbers | None, most: int) -> Keys:
    """Each block, and the last that follows it within ``most`` of its run, as one key.

    A key stands for the whole chain before it. So these are the same for two who ask only if both
    name the same blocks from the one to the other. Without ``runs`` no block follows another.
    """
    if runs is None:
        runs = np.arange(len(keys))
    ends = np.append(np.flatnonzero(runs[1:] != runs[:-1]), len(keys) - 1)
    here = np.arange(len(keys))
    furthest = np.minimum(here + most - 1, ends[np.searchsorted(ends, here)])
    # Turned, or a block and itself would make nothing.
    return Keys(keys.array ^ np.roll(keys.array[furthest], -1, axis=1))


class Wanted(NamedTuple):
    """Blocks to ask tiers for, and where each stands: next numbers, next blocks.

    ``beyond`` is 0 for those a hit hangs on. The others are known, or behind its end, but so many
    blocks behind one of those: that may lie in an object with their name.
    """

    keys: Keys
    at: SlotArray
    beyond: SlotArray

    @classmethod
    def of(cls, group: int, keys: Keys, unknown: Flags, end: int, more: int | None) -> Wanted:
        """Those of a group's blocks before the hit's end that are unknown, and ``more`` behind.

        None: they are no chain, and none of them follows another.
        """
        here = np.arange(min(len(unknown), end + (more or 0)))
        at = (here if more is not None else 2 * here) + group * _APART
        whole = cls(keys[: len(here)], at, np.zeros_like(here))
        return whole.lacking(~unknown[: len(here)] | (here >= end), (more or 0) + 1)

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
    def runs(self) -> RunNumbers:
        """Which of them follow each other."""
        return run_numbers(self.at, np.zeros(min(1, len(self.at)), dtype=np.int64))

    @property
    def num_needed(self) -> int:
        """How many of them a hit hangs on."""
        return int(np.count_nonzero(self.beyond == 0))

    def lacking(self, known: Flags, most_in_one: int) -> Wanted:
        """Those a hit hangs on that are not known, and whatever may name an object with one."""
        is_needed = (self.beyond == 0) & ~known
        last = np.maximum.accumulate(np.where(is_needed, self.at, -most_in_one))
        beyond = self.at - last
        which = beyond < most_in_one
        return Wanted(self.keys.take(which), self.at[which], beyond[which])

    def answered_by(self, asked: Keys, most_in_one: int) -> Flags:
        """For each, whether a question about a chain with these keys says as much as our own would.

        That is: it names this block and whatever of ours follows it, as far as an object of
        ``most_in_one`` blocks may reach. Where an object has one block, it need only name this one.
        """
        named = np.isin(self.keys.array[:, 0], asked.array[:, 0])
        if most_in_one == 1 or named.all() or not named.any():
            return named
        runs = self.runs
        unnamed = np.flatnonzero(~named)
        here = np.arange(len(named))
        following = np.searchsorted(unnamed, here)
        has_some = following < len(unnamed)
        first = unnamed.take(following, mode="clip")  # the first from here on that it does not name
        is_in_reach = has_some & (first - here < most_in_one) & (runs[first] == runs)
        return named & ~is_in_reach
