"""Where a request's blocks are: what the host and each level whose places are ours has of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry import reach
from kvferry.keys import Keys
from kvferry.pool import Pool
from kvferry.scheduler.parts import Parts
from kvferry.types import HOST, NO_SLOT, NO_SLOTS, SlotArray, TierName


@dataclass(frozen=True, eq=False)
class OnLevel:
    """What one pool has of a chain: the numbers of those blocks, rising, and their slots.

    A level has any of them, mostly the end: ends are spilled first. Those that are not ``cached``
    are on their way in.
    """

    name: TierName
    pool: Pool
    blocks: SlotArray
    slots: SlotArray
    cached: npt.NDArray[np.bool_]

    @classmethod
    def find(cls, name: TierName, pool: Pool, keys: Keys) -> OnLevel:
        found = pool.find(keys)
        blocks = (found != NO_SLOT).nonzero()[0]
        slots = found if len(blocks) == len(found) else found[blocks]
        if not pool.all_distinct(slots):
            # Whatever an engine calls a chain: to be held twice would be to be let go twice.
            blocks = slots = NO_SLOTS
        return cls(name, pool, blocks, slots, pool.are_cached(slots))

    def readable(self, stop: int) -> OnLevel:
        """Those that can be read, of the chain's first ``stop`` blocks."""
        taken = self.cached & (self.blocks < stop)
        if taken.all():
            return self
        return OnLevel(self.name, self.pool, self.blocks[taken], self.slots[taken], taken[taken])

    def at(self, block: int) -> int:
        """How many of them come before this block of the chain."""
        return int(np.searchsorted(self.blocks, block))

    @property
    def num_shared(self) -> int:
        """Up to which block of the chain this pool knows others to go on from it."""
        shared = self.pool.num_shared(self.slots)
        return int(self.blocks[shared - 1]) + 1 if shared else 0


@dataclass(frozen=True, eq=False)
class ChainPlaces:
    """The blocks of one group of a request, level by level from the host down."""

    group: reach.Group
    keys: Keys
    places: tuple[OnLevel, ...]
    reached: int
    """So many of its blocks, from the first on, some level has or may have. To hold what comes
    after a block that is nowhere would take room from what somebody can load."""

    @property
    def is_chained(self) -> bool:
        return isinstance(self.group, reach.FullAttention)

    @cached_property
    def num_shared(self) -> int:
        """So many blocks, from the first on, others go on from, as far as any level knows.

        Where blocks are spilled to a level, that does not know what follows what there.
        """
        return max(place.num_shared for place in self.places)

    def hold(self, seconds: float) -> tuple[int, list[str]]:
        """Let its blocks stay so long, each on the highest level that may hold it.

        Returns how many do on some level, and which were refused where, in words.
        """
        held = np.zeros(len(self.keys), dtype=bool)
        refused = []
        for place in self.places:
            here = place.readable(self.reached)
            if held[here.blocks].all():
                continue  # a level below need not keep it, too
            count = here.pool.hold(here.slots, seconds)
            held[here.blocks[here.pool.holds.held(here.slots)]] = True
            if count < len(here.slots):
                refused.append(bound_words(here.name, here.pool, len(here.slots) - count))
        return int(np.count_nonzero(held)), refused

    def on_their_way(self) -> list[str]:
        """That blocks which are still copied heard nothing of what was said, if there are any."""
        if all(place.cached.all() for place in self.places):
            return []
        here, coming = np.zeros((2, len(self.keys)), dtype=bool)
        for place in self.places:
            here[place.blocks[place.cached]] = True
            coming[place.blocks[~place.cached]] = True
        count = int(np.count_nonzero(coming & ~here))
        words = (
            f"{count} blocks are still being copied, and this does not hold for them; say it again "
            "once they have come"
        )
        return [words] if count else []


def places_of(keys: Keys, parts: Parts) -> Iterator[ChainPlaces]:
    """Where the blocks of a request are, group by group."""
    pools = [(HOST, parts.pool)]
    pools += [(lv.name, lv.pool) for lv in parts.lower.levels if lv.pool is not None]
    for g, group in enumerate(parts.matcher.groups):
        chain = parts.matcher.all_keys(g, keys)
        places = tuple(OnLevel.find(name, pool, chain) for name, pool in pools)
        is_chained = isinstance(group, reach.FullAttention)
        reached = _reached(chain, places, parts) if is_chained else len(chain)
        yield ChainPlaces(group, chain, places, reached)


def _reached(chain: Keys, places: tuple[OnLevel, ...], parts: Parts) -> int:
    """The first block of a chain that is nowhere, as far as is known."""
    there = np.zeros(len(chain) + 1, dtype=bool)  # one more, which nobody has
    for place in places:
        there[place.blocks] = True
    if parts.lower.can_be_asked:
        there[:-1] |= parts.lower.cached(chain) | parts.lower.unknown(chain, chained=True)
    return int(there.argmin())


def bound_words(level: str, pool: Pool, num_blocks: int) -> str:
    """Why so many blocks are not held."""
    words = (
        f"{num_blocks} blocks are not kept on {level}: pins and keeps hold {pool.holds.count} of "
        f"at most {pool.holds.most} blocks there (keep_share)"
    )
    return f"{words}, each tenant's at most its part of those" if pool.is_divided else words
