"""A pinned hit, and the bounds on how much may be loaded at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.cache.leases import Lease
from kvferry.cache.policies.load_or_compute import Decision, LoadOrCompute
from kvferry.cache.pool import Pool
from kvferry.config import Config
from kvferry.core.keys import KeyChain, Keys
from kvferry.errors import InputError
from kvferry.scheduler.lookup import Look, Matcher
from kvferry.scheduler.transfers import BlockTable, EngineShape, Transit, checked_blocks
from kvferry.types import RequestId, SlotArray

_SHARE = 7 / 8
"""Of the device's blocks: so many may be in the hands of loads, where no setting says how many.
With half of a small device cache one long load at a time fits, and the link rests while its request
is told and runs; what runs needs a new block only now and then.
"""


class PinnedHit:
    """What one look found, claimed: the leases, by group, of the slots a load would read.

    ``joined`` are slots that another request was loading when we looked: its answer is to wait.
    A hit that ``is_declined`` claims nothing; computing is faster, or there is nothing to load. One
    that ``must_wait`` is not to be loaded now: another loads the same, or the bounds are reached.
    """

    __slots__ = (
        "deadline",
        "decision",
        "generation",
        "is_declined",
        "joined",
        "leases",
        "look",
        "must_wait",
        "num_loads",
    )

    def __init__(self, look: Look, generation: int, num_loads: int, deadline: float) -> None:
        self.look = look
        self.generation = generation
        self.num_loads = num_loads
        self.deadline = deadline
        self.leases: tuple[Lease | None, ...] = ()
        self.joined: SlotArray | None = None
        self.decision: Decision | None = None
        self.is_declined = False
        self.must_wait = False

    def release(self) -> None:
        leases, self.leases = self.leases, ()
        for lease in leases:
            if lease is not None:
                lease.release()

    def pieces(
        self, request_id: RequestId, tables: Sequence[BlockTable]
    ) -> list[tuple[int, Lease, SlotArray]]:
        """By group, what a load reads and the device blocks it fills; refuses tables too short."""
        look, pieces = self.look, []
        for g, lease in enumerate(self.leases):
            if lease is not None:
                blocks = look.blocks[g]
                if len(tables[g]) < blocks.stop:
                    raise InputError(
                        f"request {request_id!r}: group {g}'s block table has {len(tables[g])} "
                        f"blocks, the hit of {look.host_tokens} tokens needs {blocks.stop}"
                    )
                pieces.append((g, lease, checked_blocks(g, tables[g], blocks, least=0)))
        return pieces

    def answers(self, keys: Keys, computed_tokens: int, max_tokens: int) -> bool:
        """Whether it was found for this very question: the same blocks, not only the same name."""
        look = self.look
        if look.computed_tokens != computed_tokens or look.max_tokens != max_tokens:
            return False
        return keys is look.keys or keys == look.keys

    def is_of(self, chain: KeyChain, hash_tokens: int) -> bool:
        """Whether its blocks are this chain's: the last key of them covers all before it."""
        keys = self.look.keys
        if chain is keys:
            return True
        last = self.look.host_tokens // hash_tokens - 1
        return last < len(chain) and chain[last] == keys[last]


class Hits:
    """Turns looks into pinned hits. Owns what is being loaded and the bounds on it."""

    def __init__(
        self,
        matcher: Matcher,
        pool: Pool,
        transit: Transit,
        config: Config,
        shape: EngineShape,
        clock: Callable[[], float],
    ) -> None:
        self.worth = LoadOrCompute(config.load_policy, prefill_rate=config.prefill_rate)
        self._matcher = matcher
        self._pool = pool
        self._transit = transit
        self._max_bytes = config.max_bytes_in_flight
        self._patience = config.match_deadline
        self._max_blocks = shape.bound(config.max_loading_blocks, _SHARE)
        self._block_bytes = shape.block_bytes
        self.joins_loads = shape.joins_loads
        self._clock = clock
        self._being_loaded = np.zeros(pool.num_slots, dtype=np.int32)
        self._num_loads = 0

    def pin(self, look: Look) -> PinnedHit:
        """Claim what the host holds of a look, unless another loads it or computing is faster."""
        hit = PinnedHit(
            look, self._pool.generation, self._num_loads, self._clock() + self._patience
        )
        if look.host_tokens <= look.computed_tokens:
            hit.is_declined = True
            return hit
        leases: list[Lease | None] = []
        num_bytes = 0
        for slots, size in zip(look.slots, self._block_bytes, strict=True):
            leases.append(self._pool.claim(slots) if slots is not None else None)
            num_bytes += len(slots) * size if slots is not None else 0
        hit.leases = tuple(leases)
        if self.joins_loads and self._transit.blocks_to_device:
            hit.joined = self._joined(look)
            if hit.joined is not None:
                hit.must_wait = True
                hit.release()
                return hit
        hit.decision = self.worth.decide(
            look.host_tokens - look.computed_tokens, num_bytes, self._transit.bytes_to_device
        )
        if not hit.decision.load:
            hit.is_declined = True
            hit.release()
        elif self._transit.blocks_to_device:
            hit.must_wait = not self._may_load(hit)
        return hit

    def still_holds(self, hit: PinnedHit) -> bool:
        """Whether a hit is still the answer to its question, without looking at all keys again."""
        if hit.joined is not None:
            return bool(self._being_loaded.take(hit.joined).any())
        if hit.num_loads != self._num_loads:  # who else was promised these blocks may have begun
            if self.joins_loads and self._joined(hit.look) is not None:
                return False
            hit.num_loads = self._num_loads
        if hit.generation != self._pool.generation and self._matcher.can_grow(hit.look):
            if self._matcher.may_be_longer(hit.look, hit.generation):
                return False
            hit.generation = self._pool.generation
        hit.deadline = self._clock() + self._patience
        hit.must_wait = bool(self._transit.blocks_to_device) and not self._may_load(hit)
        return True

    def _may_load(self, hit: PinnedHit) -> bool:
        """Whether a load beside others fits the bounds.

        One load alone always does, or it would wait for ever.
        """
        return self._fits(sum(len(lease) for lease in hit.leases if lease is not None))

    def _fits(self, num_blocks: int) -> bool:
        loading = self._transit.blocks_to_device + num_blocks
        if self._max_blocks is not None and loading > self._max_blocks:
            return False
        return self._transit.bytes_to_device <= self._max_bytes

    def may_begin(self, slots: SlotArray, num_blocks: int) -> bool:
        """Whether a load of so many blocks may begin, of which these slots are here by now."""
        if self.joins_loads and self._being_loaded.take(slots).any():
            return False
        return not self._transit.blocks_to_device or self._fits(num_blocks)

    def worth_loading(self, num_tokens: int, group: int, num_blocks: int) -> Decision:
        """Whether so many blocks of a group are loaded sooner than computed."""
        num_bytes = num_blocks * self._block_bytes[group]
        return self.worth.decide(num_tokens, num_bytes, self._transit.bytes_to_device)

    def began(self, lease: Lease) -> None:
        """A load of these slots was ordered: others that want them join it."""
        self._num_loads += 1
        if self.joins_loads:
            self._being_loaded[lease.slots] += 1

    def ended(self, lease: Lease) -> None:
        """A load of these slots landed, was taken back, or is so late that nobody should wait."""
        if self.joins_loads:
            self._being_loaded[lease.slots] -= 1

    def _joined(self, look: Look) -> SlotArray | None:
        """The slots of a hit that another request is loading right now, if any are."""
        pinned = [slots for slots in look.slots if slots is not None]
        if not pinned:  # nothing was found, or at a chunk's start nothing is read
            return None
        slots = pinned[0] if len(pinned) == 1 else np.concatenate(pinned)
        joined = slots[self._being_loaded.take(slots) > 0]
        return joined if len(joined) else None
