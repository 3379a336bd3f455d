"""Lookup: finds a request's blocks, in host memory first, and pins the hit all groups can serve.

::

    one key     host has no block at the hit's start: a miss (``next_missing``)
    one run     only full attention, no lower tiers: follow each chain to its end (``_follow``)
    masks       windows, states, lower tiers: look up every block of every group (``_survey``)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache import reach
from kvferry.cache.policies.load_or_compute import Decision, LoadOrCompute
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease, SlotState
from kvferry.config import Config
from kvferry.core.identity import scope
from kvferry.core.keys import BlockNames, Key, KeyChain, Keys, masked_key
from kvferry.errors import InputError
from kvferry.scheduler.tiering import GroupLookup, LowerTiers, RunBelow
from kvferry.scheduler.transfers import (
    BlockTable,
    EngineShape,
    Transfers,
    checked_blocks,
)
from kvferry.types import NO_SLOT, NO_SLOTS, RequestId, SlotArray

_NO_KEYS = Keys.empty()

Present = list[npt.NDArray[np.bool_]]
"""By group: for each block of a request, whether it can be read."""


class Missing(NamedTuple):
    """A missing block that ended a hit: its group, first token and key.

    ``is_coming``: its bytes were being stored or promoted at the time of the lookup.
    """

    group: int
    token: int
    key: Key
    is_coming: bool = False


@dataclass(eq=False, slots=True)
class Lookup:
    """The lookup result: the hit's length in host memory alone, and with lower tiers.

    By group, ``slots`` are the host slots that the host's hit reads, ``blocks`` their positions in
    the request, and ``asked`` their keys in the pool. ``missing`` is the block that ended the hit;
    None if ``max_tokens`` did. ``host`` and ``everywhere`` flag the blocks in the host and on any
    tier; None if only full attention was looked up, without lower tiers.
    """

    keys: Keys
    computed_tokens: int
    max_tokens: int
    host_tokens: int
    all_tokens: int
    slots: tuple[SlotArray | None, ...]
    blocks: tuple[range, ...]
    asked: tuple[Keys, ...]
    missing: Missing | None
    host: Present | None = None
    everywhere: Present | None = None
    groups: tuple[GroupLookup, ...] = ()


class Matcher:
    """Finds the longest hit that all groups can serve. Owns the epoch; changes no tier or pool."""

    def __init__(
        self, groups: Sequence[reach.Group], host: Pool, lower: LowerTiers, hash_tokens: int
    ) -> None:
        for group in groups:
            if group.block_tokens % hash_tokens:
                raise InputError(
                    f"{group} has blocks of {group.block_tokens} tokens, which is not a multiple "
                    f"of the hash block of {hash_tokens}: no key ends where a block does"
                )
        self.groups = tuple(groups)
        self.epoch = 0
        self.epoch_before: int | None = None
        self.hash_tokens = hash_tokens
        self._chained = [isinstance(group, reach.FullAttention) for group in self.groups]
        self.is_full = all(self._chained)
        self._has_states = any(isinstance(group, reach.RecurrentState) for group in self.groups)
        self._host = host
        self._lower = lower
        self.alignment = math.lcm(hash_tokens, *(group.block_tokens for group in self.groups))
        self._step = math.lcm(self.alignment, *(group.stop_tokens for group in self.groups))
        self._can_serve: Present = [np.empty(0, dtype=bool) for _ in self.groups]
        self.names: list[BlockNames] = []
        """By group, the mapping from chain keys to pool keys in the present epoch."""
        self.begin_epoch(0)
        self.lookup = self._follow if self.is_full and not lower.tiers else self._survey
        """Look up a request without claiming slots; its hit ends ``spare_tokens`` early."""

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch: the same blocks have different pool keys from now on."""
        if epoch != self.epoch:
            self.epoch_before, self.epoch = self.epoch, epoch
        self.names = [
            BlockNames(group.block_tokens // self.hash_tokens, scope(epoch, g))
            for g, group in enumerate(self.groups)
        ]

    def has(self, key: Key) -> bool:
        """Return whether this block is in the host, being copied there, or on a lower tier."""
        if self._host.state_of(key) is not SlotState.FREE:
            return True
        return bool(self._lower.tiers) and bool(
            self._lower.lookup(Keys.from_bytes((key,))).readable[0]
        )

    # -- lookup ---------------------------------------------------------------------------------

    def next_missing(
        self, chain: KeyChain, num_keys: int, computed_tokens: int, max_tokens: int
    ) -> Missing | None:
        """Return a block that every hit needs and the host lacks.

        The fast path to a miss, which is all that a request finds whose history never left the
        device. None if there is no such block, or if only a full lookup can tell.
        """
        longer = computed_tokens + self._step
        if not self.is_full or self._lower.tiers or longer - longer % self._step > max_tokens:
            return None
        for g, group in enumerate(self.groups):
            block = computed_tokens // group.block_tokens
            at = (block + 1) * self.names[g].ratio - 1
            if at < num_keys:
                key = chain[at]
                if g or self.epoch:  # otherwise the mask is all zeros
                    key = masked_key(key, self.names[g].mask)
                state = self._host.state_of(key)
                if state is not SlotState.CACHED:
                    is_coming = state is not SlotState.FREE
                    return Missing(g, block * group.block_tokens, key, is_coming)
        return None

    def _follow(
        self, keys: Keys, computed_tokens: int, max_tokens: int, spare_tokens: int = 0
    ) -> Lookup:
        """Look up full attention groups alone: follow the chain of each to its first miss."""
        most = max_tokens - max_tokens % self._step
        longest = most
        found: list[SlotArray] = []
        asked: list[Keys] = []
        for g, group in enumerate(self.groups):
            size = group.block_tokens
            blocks = range(computed_tokens // size, -(-most // size))
            asked.append(self.names[g].of(keys, blocks))
            slots = self._host.lookup(asked[g]) if blocks else NO_SLOTS
            found.append(slots)
            longest = min(longest, (blocks.start + len(slots)) * size)
        longest = max(longest - longest % self._step, computed_tokens)
        host_tokens = longest
        if spare_tokens and longest > computed_tokens:
            shorter = longest - spare_tokens
            host_tokens = max(shorter - shorter % self._step, computed_tokens)
        missing, longer = None, longest + self._step
        for g, group in enumerate(self.groups if longest < most else ()):
            block = computed_tokens // group.block_tokens + len(found[g])
            if block * group.block_tokens < longer - longer % self._step:
                missing = self.missing_at(g, keys, block)
                break
        pinned: list[SlotArray | None] = []
        places: list[range] = []
        for g, group in enumerate(self.groups):
            first = computed_tokens // group.block_tokens
            count = -(-host_tokens // group.block_tokens) - first
            is_read = host_tokens > computed_tokens and count > 0
            places.append(range(first, first + count) if is_read else range(0))
            pinned.append(found[g][:count] if is_read else None)
            if count < len(asked[g].array):
                asked[g] = asked[g][: max(0, count)]
        return Lookup(
            keys,
            computed_tokens,
            max_tokens,
            host_tokens,
            host_tokens,
            tuple(pinned),
            tuple(places),
            tuple(asked),
            missing,
        )

    def _survey(
        self, keys: Keys, computed_tokens: int, max_tokens: int, spare_tokens: int = 0
    ) -> Lookup:
        """Look up every block of every group, in the host and on lower tiers."""
        groups: list[GroupLookup] = []
        host: Present = []
        for g, group in enumerate(self.groups):
            count = len(keys.array) // self.names[g].ratio
            first = min(computed_tokens // group.block_tokens, count)
            asked = self.names[g].of(keys, range(first, count))
            here, cached = self._host.locate(asked)
            each = GroupLookup(first, asked, here, cached)
            groups.append(each)
            host.append(each.whole(cached, before=True) if first else cached)
        host_tokens = self._longest(host, computed_tokens, max_tokens, spare_tokens)
        everywhere, all_tokens = host, host_tokens
        if self._lower.tiers and host_tokens + self.alignment <= max_tokens:
            everywhere = []
            for each in groups:
                below = each.below = self._lower.lookup(each.keys)
                some = each.cached | below.readable
                everywhere.append(each.whole(some, before=True) if each.first else some)
            all_tokens = self._longest(everywhere, computed_tokens, max_tokens, spare_tokens)
        slots: list[SlotArray | None] = []
        places: list[range] = []
        asked_keys: list[Keys] = []
        for g, each in enumerate(groups):
            blocks = range(0)
            if host_tokens > computed_tokens:
                blocks = self.needed(g, host_tokens, computed_tokens)
            part = each.part(blocks) if blocks else slice(0)
            slots.append(each.slots[part] if blocks else None)
            places.append(blocks)
            asked_keys.append(each.keys[part] if blocks else _NO_KEYS)
        return Lookup(
            keys,
            computed_tokens,
            max_tokens,
            host_tokens,
            all_tokens,
            tuple(slots),
            tuple(places),
            tuple(asked_keys),
            None,
            host,
            everywhere,
            tuple(groups),
        )

    def _longest(
        self, present: Present, computed_tokens: int, max_tokens: int, spare_tokens: int = 0
    ) -> int:
        if self.is_full:  # every hit reads every block
            longest = max_tokens
            for group, here in zip(self.groups, present, strict=True):
                first = here.tobytes().find(0)  # the first absent block
                num_blocks = first if first >= 0 else len(here)
                longest = min(longest, num_blocks * group.block_tokens)
            longest = max(longest - longest % self._step, computed_tokens)
        else:
            if spare_tokens and self._has_states:
                proven = self._proven(present, computed_tokens) - spare_tokens
                max_tokens, spare_tokens = min(max_tokens, max(proven, computed_tokens)), 0
            longest = reach.longest_hit(
                self.groups,
                present,
                max_tokens,
                alignment=self.alignment,
                computed_tokens=computed_tokens,
            )
        if not spare_tokens or longest <= computed_tokens:
            return longest
        return self._longest(present, computed_tokens, max(computed_tokens, longest - spare_tokens))

    def _proven(self, present: Present, computed_tokens: int) -> int:
        """Return how far the groups without recurrent states reach. A draft model has no states,
        and needs one block more of the other groups only.
        """
        both = zip(self.groups, present, strict=True)
        others = [each for each in both if not isinstance(each[0], reach.RecurrentState)]
        if not others:
            return computed_tokens + len(present[0]) * self.groups[0].block_tokens
        groups, here = zip(*others, strict=True)
        end = max(len(each) * group.block_tokens for group, each in others)
        return reach.longest_hit(
            groups, here, end, alignment=self.alignment, computed_tokens=computed_tokens
        )

    def first_missing(self, found: Lookup) -> Missing | None:
        """Return the block that ended the host's hit; None if no block did."""
        longer = self._next_length(found)
        if longer > found.max_tokens or found.host is None:
            return None
        for g in range(len(self.groups)):
            blocks = self.needed(g, longer, found.computed_tokens)
            present = found.host[g][blocks.start : blocks.stop]
            if not present.all():
                return self.missing_at(g, found.keys, blocks.start + int(present.argmin()))
        return None

    def missing_at(self, g: int, keys: Keys, block: int) -> Missing:
        """Return the missing block number ``block`` of a group."""
        key = self.names[g].of(keys, range(block, block + 1))[0]
        is_coming = self._host.state_of(key) is not SlotState.FREE
        return Missing(g, block * self.groups[g].block_tokens, key, is_coming)

    # -- whether another lookup may find more ---------------------------------------------------

    def may_be_longer(self, found: Lookup) -> bool:
        """Return whether a new lookup may find a longer hit in the host than ``found``.

        Every longer hit needs a missing block of full attention; a window may not need its own.
        """
        if self._next_length(found) > found.max_tokens:
            return False
        missing = found.missing
        if missing is None or not self._chained[missing.group]:
            return not self.is_full
        return self._host.state_of(missing.key) is SlotState.CACHED

    def _next_length(self, found: Lookup) -> int:
        longer = found.host_tokens + self._step
        return longer - longer % self._step

    # -- promotion ------------------------------------------------------------------------------

    def within(self, found: Lookup, num_slots: int) -> Lookup:
        """Shorten the hit on all tiers until promoting it takes at most ``num_slots`` host slots.

        The hit gets shorter in all groups at once: a part of each group would serve no request.
        """
        if found.everywhere is None:
            return found
        num_blocks = 0
        for group in self.groups:
            num_blocks += -(-found.all_tokens // group.block_tokens)
        if num_blocks <= num_slots or self._num_to_bring(found, found.all_tokens) <= num_slots:
            return found
        best = found.host_tokens
        low, high = found.host_tokens // self._step, -(-found.all_tokens // self._step)
        while high - low > 1:
            middle = (low + high) // 2
            length = self._longest(found.everywhere, found.computed_tokens, middle * self._step)
            if self._num_to_bring(found, length) <= num_slots:
                best, low = max(best, length), middle
            else:
                high = middle
        return replace(found, all_tokens=best)

    def _num_to_bring(self, found: Lookup, num_tokens: int) -> int:
        """Count the blocks of a hit that are neither in the host nor being copied there."""
        count = 0
        for g, group in enumerate(found.groups):
            blocks = self.needed(g, num_tokens, found.computed_tokens)
            count += int(np.count_nonzero(group.slots[group.part(blocks)] == NO_SLOT))
        return count

    def to_ask(self, found: Lookup) -> Keys | None:
        """Return the keys to ask keyed tiers for, because a longer hit may depend on them.

        None if no longer hit is possible. At most as many as promotions have room for.
        """
        assert found.host is not None
        assert found.everywhere is not None
        unknown = []
        for each in found.groups:
            if each.below is None:
                return None
            unknown.append(each.whole(each.below.unknown, before=False))
        maybe = [e | u for e, u in zip(found.everywhere, unknown, strict=True)]
        longest = self._longest(maybe, found.computed_tokens, found.max_tokens)
        if longest <= found.all_tokens:
            return None
        hoped = self.within(replace(found, everywhere=maybe, all_tokens=longest), self._lower.room)
        wanted = []
        for g, group in enumerate(self.groups):
            end = -(-hoped.all_tokens // group.block_tokens)
            lacking = np.flatnonzero((unknown[g] & ~found.everywhere[g])[:end])
            wanted.append(self.names[g].all(found.keys).take(lacking).array)
        return Keys(np.concatenate(wanted))

    def to_promote(self, found: Lookup) -> list[RunBelow]:
        """Return the runs of blocks to promote for the hit on all tiers, at most one per group."""
        assert found.host is not None
        runs = []
        for g, group in enumerate(found.groups):
            blocks = self.needed(g, found.all_tokens, found.computed_tokens)
            lacking = np.flatnonzero(~found.host[g][blocks.start : blocks.stop])
            if len(lacking):
                run = blocks[int(lacking[0]) :]
                before = self.names[g].before(found.keys, run.start) if run.start else None
                runs.append(RunBelow(group, group.part(run), before, self._chained[g]))
        return runs

    # -- lengths --------------------------------------------------------------------------------

    def worth_storing(self, group: int, blocks: range) -> npt.NDArray[np.bool_]:
        """Return, for each of these blocks, whether any hit can ever read it."""
        if blocks.stop > len(self._can_serve[group]):
            tokens = 2 * blocks.stop * max(g.block_tokens for g in self.groups)
            self._can_serve = reach.can_serve(self.groups, tokens, alignment=self.alignment)
        return self._can_serve[group][blocks.start : blocks.stop]

    def needed(self, g: int, num_tokens: int, computed_tokens: int) -> range:
        """Return the blocks of a group that a hit reads and the engine does not have."""
        if num_tokens <= computed_tokens:  # computed tokens may end where no state is stored
            return range(0)
        if self._chained[g]:
            size = self.groups[g].block_tokens
            return range(computed_tokens // size, -(-num_tokens // size))
        return reach.needed(self.groups[g], num_tokens, computed_tokens=computed_tokens)


# -- pinned hits ----------------------------------------------------------------------------------

_SHARE = 7 / 8
"""Share of the device's blocks that loads may occupy at once, unless a setting bounds them. With
1/2 on a small device, the link would be idle between two long loads."""


@dataclass(eq=False, slots=True)
class PinnedHit:
    """A lookup result and the leases, by group, of the host slots that its load would read.

    ``joined`` are slots that another request was loading at lookup: this hit waits for that load.
    ``is_declined``: it has no leases, because computing is faster or there is nothing to load.
    ``must_wait``: not loaded now, because another request loads the same or the bounds are reached.
    """

    found: Lookup
    generation: int
    num_loads: int = 0
    deadline: float = 0.0
    num_blocks: int = 0
    leases: tuple[Lease | None, ...] = ()
    joined: SlotArray | None = None
    decision: Decision | None = None
    is_declined: bool = False
    must_wait: bool = False

    def release(self) -> None:
        leases, self.leases = self.leases, ()
        for lease in leases:
            if lease is not None:
                lease.release()

    def places(self, request_id: RequestId, g: int, table: BlockTable) -> SlotArray:
        """Return the device blocks of a group that a load fills; InputError if too few."""
        blocks = self.found.blocks[g]
        if len(table) < blocks.stop:
            raise InputError(
                f"request {request_id!r}: group {g}'s block table has {len(table)} blocks, the hit "
                f"of {self.found.host_tokens} tokens needs {blocks.stop}"
            )
        return checked_blocks(g, table, blocks, least=0)

    def answers(self, keys: Keys, computed_tokens: int, max_tokens: int) -> bool:
        """Return whether this hit was found for the same keys, computed tokens and cap."""
        found = self.found
        if found.computed_tokens != computed_tokens or found.max_tokens != max_tokens:
            return False
        return keys is found.keys or keys == found.keys

    def is_of(self, chain: KeyChain, hash_tokens: int) -> bool:
        """Return whether the hit is of this chain: its last key covers all keys before it."""
        keys = self.found.keys
        last = self.found.host_tokens // hash_tokens - 1
        return last < len(chain) and chain[last] == keys[last]


class Hits:
    """Turns lookups into pinned hits. Owns the slots being loaded and the bounds on loads."""

    def __init__(
        self,
        matcher: Matcher,
        pool: Pool,
        transfers: Transfers,
        config: Config,
        shape: EngineShape,
        clock: Callable[[], float],
        worth: LoadOrCompute,
    ) -> None:
        self.worth = worth
        self._matcher = matcher
        self._pool = pool
        self._transfers = transfers
        self._max_bytes = config.max_bytes_in_flight
        self._patience = config.match_deadline
        self._max_blocks = shape.bound(config.max_loading_blocks, _SHARE)
        self._block_bytes = shape.block_bytes
        self.joins_loads = shape.joins_loads
        self._clock = clock
        self._being_loaded = np.zeros(pool.num_slots, dtype=np.int32)
        self._num_loads = 0

    def pin(self, found: Lookup) -> PinnedHit:
        """Lease the host's hit, unless another request loads it or computing is faster."""
        hit = PinnedHit(
            found, self._pool.generation, self._num_loads, self._clock() + self._patience
        )
        if found.host is not None:
            found.missing = self._matcher.first_missing(found)
        if found.host_tokens <= found.computed_tokens:
            hit.is_declined = True
            return hit
        num_bytes = 0
        try:
            for slots, size in zip(found.slots, self._block_bytes, strict=True):
                hit.leases += (self._pool.claim(slots) if slots is not None else None,)
                if slots is not None:
                    hit.num_blocks += len(slots)
                    num_bytes += len(slots) * size
        except BaseException:  # such as InputError for a chain that repeats a key
            hit.release()
            raise
        if self.joins_loads and self._transfers.blocks_to_device:
            hit.joined = self._joined(found)
            if hit.joined is not None:
                hit.must_wait = True
                hit.release()
                return hit
        hit.decision = self.worth.decide(
            found.host_tokens - found.computed_tokens, num_bytes, self._transfers.bytes_to_device
        )
        if not hit.decision.load:
            hit.is_declined = True
            hit.release()
        elif self._transfers.blocks_to_device:
            hit.must_wait = not self._fits(hit.num_blocks)
        return hit

    def still_holds(self, hit: PinnedHit) -> bool:
        """Return whether a hit is still valid, without a new lookup; renew its deadline then."""
        if hit.joined is not None:
            return bool(self._being_loaded.take(hit.joined).any())
        if hit.num_loads != self._num_loads:  # another load of these blocks may have begun
            if self.joins_loads and self._joined(hit.found) is not None:
                return False
            hit.num_loads = self._num_loads
        if hit.generation != self._pool.generation:
            if self._matcher.may_be_longer(hit.found):
                return False
            hit.generation = self._pool.generation
        hit.deadline = self._clock() + self._patience
        hit.must_wait = bool(self._transfers.blocks_to_device) and not self._fits(hit.num_blocks)
        return True

    def _fits(self, num_blocks: int) -> bool:
        """Return whether a load of ``num_blocks`` fits the bounds; a load alone always does."""
        loading = self._transfers.blocks_to_device
        if not loading:
            return True
        if self._max_blocks is not None and loading + num_blocks > self._max_blocks:
            return False
        return self._transfers.bytes_to_device <= self._max_bytes

    def may_begin(self, slots: SlotArray, num_blocks: int) -> bool:
        """Return whether a load of ``num_blocks`` may begin; ``slots`` were promoted so far."""
        if self.joins_loads and self._being_loaded.take(slots).any():
            return False
        return self._fits(num_blocks)

    def began(self, slots: SlotArray) -> None:
        """Note that a load of these slots was ordered: other requests for them wait for it."""
        self._num_loads += 1
        if self.joins_loads:
            self._being_loaded[slots] += 1

    def ended(self, slots: SlotArray) -> None:
        """Note that a load of these slots completed, was cancelled, or is overdue."""
        if self.joins_loads:
            self._being_loaded[slots] -= 1

    def _joined(self, found: Lookup) -> SlotArray | None:
        """Return the slots of a hit that another request is loading now; None if there are none."""
        pinned = [slots for slots in found.slots if slots is not None]
        if not pinned:  # no hit, or a hit that ends at a chunk's start and reads no block
            return None
        slots = pinned[0] if len(pinned) == 1 else np.concatenate(pinned)
        joined = slots[self._being_loaded.take(slots) > 0]
        return joined if len(joined) else None
