"""Where a request's blocks are on all tiers, and how pins and hints are applied to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry.cache import reach
from kvferry.cache.pins import FOREVER
from kvferry.cache.policies.contract import Evidence
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.hints import DEFAULT_PRIORITY, Hints, TokenPriority
from kvferry.scheduler.lookup import Matcher
from kvferry.scheduler.tiering import LowerTiers
from kvferry.types import HOST, NO_SLOT, NO_SLOTS, SlotArray, TierName


@dataclass(frozen=True, eq=False)
class TierBlocks:
    """Blocks of a chain on one tier: their numbers in the chain, rising, and their slots.

    A tier has any of them, mostly the end: ends are spilled first. Those that are not ``cached``
    are on their way in.
    """

    name: TierName
    pool: Pool
    blocks: SlotArray
    slots: SlotArray
    cached: npt.NDArray[np.bool_]

    @classmethod
    def find(cls, name: TierName, pool: Pool, keys: Keys) -> TierBlocks:
        found, cached = pool.locate(keys)
        blocks = (found != NO_SLOT).nonzero()[0]
        slots = found if len(blocks) == len(found) else found[blocks]
        cached = cached[blocks]
        if not pool.table.chains.all_distinct(slots):
            # Whatever an engine calls a chain: to be held twice would be to be let go twice.
            blocks = slots = NO_SLOTS
            cached = cached[:0]
        return cls(name, pool, blocks, slots, cached)

    def readable(self, stop: int) -> TierBlocks:
        """Those that can be read, of the chain's first ``stop`` blocks."""
        taken = self.cached & (self.blocks < stop)
        if taken.all():
            return self
        return TierBlocks(self.name, self.pool, self.blocks[taken], self.slots[taken], taken[taken])

    def at(self, block: int) -> int:
        """How many of them come before this block of the chain."""
        return int(np.searchsorted(self.blocks, block))

    @property
    def num_shared(self) -> int:
        """Up to which block of the chain this pool knows others to go on from it."""
        shared = len(self.slots) - len(self.pool.table.chains.own_end(self.slots))
        return int(self.blocks[shared - 1]) + 1 if shared else 0


@dataclass(frozen=True, eq=False)
class ChainPlacement:
    """The blocks of one group of a request, tier by tier from the host down."""

    group: reach.Group
    keys: Keys
    places: tuple[TierBlocks, ...]
    reached: int
    """So many of its blocks, from the first on, some tier has or may have. To hold what comes
    after a block that is nowhere would take room from blocks that can be loaded."""

    @property
    def is_chained(self) -> bool:
        return isinstance(self.group, reach.FullAttention)

    @cached_property
    def num_shared(self) -> int:
        """So many blocks, from the first on, others go on from, as far as any tier knows.

        Where blocks are spilled to a tier, that does not know what follows what there.
        """
        return max(place.num_shared for place in self.places)

    def hold(self, seconds: float) -> tuple[int, list[str]]:
        """Let its blocks stay so long, each on the highest tier that may hold it.

        Returns how many do on some tier, and which were refused where, in words.
        """
        held = np.zeros(len(self.keys), dtype=bool)
        refused = []
        for place in self.places:
            here = place.readable(self.reached)
            if held[here.blocks].all():
                continue  # a tier below need not keep it, too
            count = here.pool.eviction.pin(here.slots, seconds)
            held[here.blocks[here.pool.eviction.pins.pinned(here.slots)]] = True
            if count < len(here.slots):
                refused.append(bound_words(here.name, here.pool, len(here.slots) - count))
        return int(np.count_nonzero(held)), refused

    def on_their_way(self) -> list[str]:
        """Say that hints do not apply to blocks which are still being copied, if there are any."""
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


def placements(
    keys: Keys, pool: Pool, lower: LowerTiers, matcher: Matcher
) -> Iterator[ChainPlacement]:
    """Where the blocks of a request are, group by group."""
    pools = ((HOST, pool), *lower.pools.items())
    for g, group in enumerate(matcher.groups):
        chain = matcher.names[g].all(keys)
        places = tuple(TierBlocks.find(name, pool, chain) for name, pool in pools)
        is_chained = isinstance(group, reach.FullAttention)
        reached = _reached(chain, places, lower) if is_chained else len(chain)
        yield ChainPlacement(group, chain, places, reached)


def _reached(chain: Keys, places: tuple[TierBlocks, ...], lower: LowerTiers) -> int:
    """The first block of a chain that is nowhere, as far as is known."""
    there = np.zeros(len(chain) + 1, dtype=bool)  # one more, which is nowhere
    for place in places:
        there[place.blocks] = True
    if lower.can_be_asked:
        below = lower.lookup(chain)
        there[:-1] |= below.readable | below.unknown
    return int(there.argmin())


def bound_words(tier: str, pool: Pool, num_blocks: int) -> str:
    """Why so many blocks are not pinned."""
    pins = pool.eviction.pins
    words = (
        f"{num_blocks} blocks are not pinned on {tier}: pins and TTLs hold {pins.count} of "
        f"at most {pins.most} blocks there (pin_share)"
    )
    if pool.eviction.quotas is None:
        return words
    return f"{words}, each tenant's at most its part of those"


def evidence_of(hints: Hints | None) -> Evidence | None:
    """The part of a request's hints that policies learn from, if there is any."""
    if hints is None or not (hints.ended or hints.continues):
        return None
    return Evidence(hints.ended, hints.continues, hints.within, hints.tenant or hints.session)


def tell_pools(
    hints: Hints, keys: Keys, pool: Pool, lower: LowerTiers, matcher: Matcher
) -> list[str]:
    """Pass on what was said of a request's blocks, tier by tier; what was refused, in words."""
    refused: list[str] = []
    for where in placements(keys, pool, lower, matcher):
        softly = [words for place in where.places for words in _tell_place(hints, where, place)]
        if hints.pin_seconds is None:
            refused += softly
        else:  # which asks for more than they do
            refused += where.hold(hints.pin_seconds)[1]
        refused += where.on_their_way()
    return refused


def _tell_place(hints: Hints, where: ChainPlacement, place: TierBlocks) -> list[str]:
    """Pass on all but a keep to one tier; which blocks are not held for that, in words."""
    here = place.readable(len(where.keys) if hints.ended else where.reached)
    lacking = 0
    evidence = evidence_of(hints)
    if len(here.slots) and evidence is not None:
        if where.is_chained:
            first = here.at(where.num_shared) if hints.ended else 0
            lacking = here.pool.eviction.hint(here.slots, evidence, first=first)
        else:
            lacking = here.pool.hint(where.keys, evidence)
    if hints.priorities and where.is_chained:
        lacking = max(lacking, _rank(hints.priorities, where, place))
    return [bound_words(place.name, place.pool, lacking)] if lacking else []


def _rank(priorities: Sequence[TokenPriority], where: ChainPlacement, place: TierBlocks) -> int:
    """Blocks matter so much, range by range; how many are not held that matter more than most.

    Of what was said of a block twice, the last counts.
    """
    pool, block_tokens = place.pool, where.group.block_tokens
    is_high = np.zeros(len(where.keys), dtype=bool)
    for told in priorities:
        start, stop = told.token_start // block_tokens, len(where.keys)
        if told.token_end is not None:
            stop = min(stop, -(-told.token_end // block_tokens))
        if told.priority < DEFAULT_PRIORITY:
            here = place.readable(stop)
            first = here.at(max(start, where.num_shared))
            pool.eviction.evict_first(here.slots, told.priority, first=first)
            is_high[start:stop] = False
        elif told.priority > DEFAULT_PRIORITY:
            # With what comes before it, or it could not be reached.
            here = place.readable(min(stop, where.reached))
            seconds = FOREVER if told.duration_ms is None else told.duration_ms / 1000
            if here.at(start) < len(here.slots):
                pool.eviction.pin(here.slots, seconds, told.priority)
                is_high[here.blocks] = True
    high = place.slots[is_high[place.blocks]]
    return int(np.count_nonzero(~pool.eviction.pins.pinned(high)))
