"""Placement: finds a request's blocks on all tiers and applies pins and hints to them."""

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
    """Blocks of a chain on one tier: their ascending positions in the chain, and their slots.

    A tier may have any of the blocks; mostly the last ones, because those are spilled first. Blocks
    that are not ``cached`` are being copied to the tier.
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
            # Two keys of the engine's chain share a slot: it would be pinned and unpinned twice.
            blocks = slots = NO_SLOTS
            cached = cached[:0]
        return cls(name, pool, blocks, slots, cached)

    def readable(self, stop: int) -> TierBlocks:
        """Return the blocks that can be read, among the chain's first ``stop`` blocks."""
        taken = self.cached & (self.blocks < stop)
        if taken.all():
            return self
        return TierBlocks(self.name, self.pool, self.blocks[taken], self.slots[taken], taken[taken])

    def at(self, block: int) -> int:
        """Return how many of these blocks come before position ``block`` of the chain."""
        return int(np.searchsorted(self.blocks, block))

    @property
    def num_shared(self) -> int:
        """Leading blocks of the chain that other chains share, as far as this pool knows."""
        shared = len(self.slots) - len(self.pool.table.chains.own_end(self.slots))
        return int(self.blocks[shared - 1]) + 1 if shared else 0


@dataclass(frozen=True, eq=False)
class ChainPlacement:
    """The blocks of one group of a request, tier by tier from the host down."""

    group: reach.Group
    keys: Keys
    places: tuple[TierBlocks, ...]
    reached: int
    """Leading blocks that some tier has or may have. Blocks behind a missing one cannot be loaded,
    so pinning them would only take room from blocks that can."""

    @property
    def is_chained(self) -> bool:
        return isinstance(self.group, reach.FullAttention)

    @cached_property
    def num_shared(self) -> int:
        """Leading blocks of the chain that other chains share, as far as any tier knows.

        A tier does not know which block follows which among blocks that were spilled to it.
        """
        return max(place.num_shared for place in self.places)

    def hold(self, seconds: float) -> tuple[int, list[str]]:
        """Pin the blocks for ``seconds``, on the highest tier that has them and room to pin.

        Returns how many are pinned on some tier, and the refusals by tier, in words.
        """
        held = np.zeros(len(self.keys), dtype=bool)
        refused = []
        for place in self.places:
            here = place.readable(self.reached)
            if held[here.blocks].all():
                continue  # a higher tier keeps all of these blocks already
            count = here.pool.eviction.pin(here.slots, seconds)
            held[here.blocks[here.pool.eviction.pins.pinned(here.slots)]] = True
            if count < len(here.slots):
                refused.append(bound_words(here.name, here.pool, len(here.slots) - count))
        return int(np.count_nonzero(held)), refused

    def on_their_way(self) -> list[str]:
        """Return a message if hints do not apply to some blocks because they are being copied."""
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
    """Yield the placement of a request's blocks, one per group."""
    pools = ((HOST, pool), *lower.pools.items())
    for g, group in enumerate(matcher.groups):
        chain = matcher.names[g].all(keys)
        places = tuple(TierBlocks.find(name, pool, chain) for name, pool in pools)
        is_chained = isinstance(group, reach.FullAttention)
        reached = _reached(chain, places, lower) if is_chained else len(chain)
        yield ChainPlacement(group, chain, places, reached)


def _reached(chain: Keys, places: tuple[TierBlocks, ...], lower: LowerTiers) -> int:
    """Return the position of the first block of a chain that no tier is known to have."""
    there = np.zeros(len(chain) + 1, dtype=bool)  # one more element, which stays false
    for place in places:
        there[place.blocks] = True
    if lower.can_be_asked:
        below = lower.lookup(chain)
        there[:-1] |= below.readable | below.unknown
    return int(there.argmin())


def bound_words(tier: str, pool: Pool, num_blocks: int) -> str:
    """Return the message that ``num_blocks`` exceed the bound on pins of a tier."""
    pins = pool.eviction.pins
    words = (
        f"{num_blocks} blocks are not pinned on {tier}: pins and TTLs hold {pins.count} of "
        f"at most {pins.most} blocks there (pin_share)"
    )
    if pool.eviction.quotas is None:
        return words
    return f"{words}, each tenant's at most its part of those"


def evidence_of(hints: Hints | None) -> Evidence | None:
    """Return the part of a request's hints that eviction policies learn from, or None."""
    if hints is None or not (hints.ended or hints.continues):
        return None
    return Evidence(hints.ended, hints.continues, hints.within, hints.tenant or hints.session)


def tell_pools(
    hints: Hints, keys: Keys, pool: Pool, lower: LowerTiers, matcher: Matcher
) -> list[str]:
    """Apply hints to a request's blocks on every tier; return the refusals, in words."""
    refused: list[str] = []
    for where in placements(keys, pool, lower, matcher):
        softly = [words for place in where.places for words in _tell_place(hints, where, place)]
        if hints.pin_seconds is None:
            refused += softly
        else:  # the pin asks for more than the other hints: report only its refusals
            refused += where.hold(hints.pin_seconds)[1]
        refused += where.on_their_way()
    return refused


def _tell_place(hints: Hints, where: ChainPlacement, place: TierBlocks) -> list[str]:
    """Apply all hints but ``pin_seconds`` on one tier; return the refusals, in words."""
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
    """Apply priorities range by range; return how many high-priority blocks are not pinned.

    Where ranges overlap, the last one counts.
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
            # Pin the blocks before the range, too: without them it could not be reached.
            here = place.readable(min(stop, where.reached))
            seconds = FOREVER if told.duration_ms is None else told.duration_ms / 1000
            if here.at(start) < len(here.slots):
                pool.eviction.pin(here.slots, seconds, told.priority)
                is_high[here.blocks] = True
    high = place.slots[is_high[place.blocks]]
    return int(np.count_nonzero(~pool.eviction.pins.pinned(high)))
