"""Pinned hits: which still hold, which may be loaded now, and what loading one would copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvferry import reach
from kvferry.answers import Match, MatchState
from kvferry.config import Config
from kvferry.errors import InputError
from kvferry.lease import Lease
from kvferry.policy import Decision, LoadOrCompute
from kvferry.pool import Pool
from kvferry.scheduler.matching import Look, Matcher
from kvferry.scheduler.outbox import LoadOrder, Outbox
from kvferry.scheduler.request import Hit
from kvferry.scheduler.storing import BlockTable
from kvferry.types import RequestId, SlotArray, as_slots


class Hits:
    """Turns looks into pinned hits. Owns what is being loaded and the bounds on it."""

    def __init__(
        self,
        matcher: Matcher,
        pool: Pool,
        outbox: Outbox,
        config: Config,
        *,
        max_blocks: int | None,
        block_bytes: Sequence[int],
        joins_loads: bool,
        clock: Callable[[], float],
    ) -> None:
        self.worth = LoadOrCompute(config.load_policy, prefill_rate=config.prefill_rate)
        self._matcher = matcher
        self._pool = pool
        self._outbox = outbox
        self._config = config
        self._max_blocks = max_blocks
        self._block_bytes = tuple(block_bytes)
        self._joins_loads = joins_loads
        self._clock = clock
        self._being_loaded = np.zeros(pool.num_slots, dtype=np.int32)
        self._num_loads = 0

    def pin(self, look: Look) -> tuple[Hit, Decision | None]:
        """Claim what the host holds of a look, unless another loads it or computing is faster."""
        leases = self._matcher.pin(look)
        watch = self._matcher.watch(look)
        can_grow = self._matcher.can_grow(look)
        hit = Hit(
            match=Match(MatchState.HIT, look.host_tokens, look.computed_tokens),
            max_tokens=look.max_tokens,
            leases=leases,
            joined=self._joined(leases),
            watch=watch,
            lacking=self._matcher.lacking(look) if can_grow and not len(watch) else None,
            generation=self._pool.generation,
            deadline=self._clock() + self._config.match_deadline,
            num_blocks=self._matcher.num_device_blocks(look.host_tokens, look.computed_tokens),
            can_grow=can_grow,
            num_loads=self._num_loads,
        )
        if len(hit.joined):
            hit.decline(MatchState.WAIT)
            return hit, None
        if hit.match.to_load <= 0:
            hit.decline(MatchState.MISS)
            return hit, None
        decision = self._decide(look)
        if not decision.load:
            hit.decline(MatchState.MISS)
        return hit, decision

    def still_holds(self, hit: Hit, computed_tokens: int, max_tokens: int) -> bool:
        """Whether a hit still answers this question, without looking at all keys again."""
        if hit.match.computed_tokens != computed_tokens or hit.max_tokens != max_tokens:
            return False
        if hit.match.state is MatchState.WAIT:
            return bool(self._being_loaded.take(hit.joined).any())
        if hit.num_loads != self._num_loads:  # who else was promised these blocks may have begun
            if len(self._joined(hit.leases)):
                return False
            hit.num_loads = self._num_loads
        if hit.generation != self._pool.generation and hit.can_grow:
            if self._may_be_longer(hit):
                return False
            hit.generation = self._pool.generation
        hit.deadline = self._clock() + self._config.match_deadline
        return True

    def _may_be_longer(self, hit: Hit) -> bool:
        """Whether anything a longer hit needs has come since we looked."""
        if hit.lacking is None:
            return bool(self._pool.cached(hit.watch).all())
        news = self._pool.news_since(hit.generation)
        if news is None or not len(hit.lacking):
            return news is None
        places = np.searchsorted(hit.lacking, news)
        return bool((hit.lacking.take(places, mode="clip") == news).any())

    def may_load(self, hit: Hit) -> bool:
        """Whether a load fits the bounds. One load alone always does, or it would wait for ever."""
        loading = self._outbox.num_blocks_to_device()
        if loading == 0:
            return True
        if self._max_blocks is not None and loading + hit.num_blocks > self._max_blocks:
            return False
        return self._outbox.bytes_to_device(self._block_bytes) <= self._config.max_bytes_in_flight

    def load(
        self, request_id: RequestId, hit: Hit, tables: Sequence[BlockTable]
    ) -> list[LoadOrder]:
        """Order a hit into these device blocks, group by group; others that want it join the load.

        A table that is too short leaves nothing ordered.
        """
        parts = [
            (g, lease, *self._part(request_id, g, hit.match, lease, tables[g]))
            for g, lease in enumerate(hit.leases)
            if lease is not None
        ]
        if parts:
            self._num_loads += 1
        for _, lease, _, _ in parts:
            self._being_loaded[lease.slots] += 1
        return [self._outbox.load(request_id, *part) for part in parts]

    def _part(
        self, request_id: RequestId, g: int, match: Match, lease: Lease, table: BlockTable
    ) -> tuple[SlotArray, SlotArray]:
        group = self._matcher.groups[g]
        blocks = reach.needed_device_blocks(
            group, match.num_tokens, computed_tokens=match.computed_tokens
        )
        if len(table) < blocks.stop:
            raise InputError(
                f"request {request_id!r}: group {g}'s block table has {len(table)} blocks, the hit "
                f"of {match.num_tokens} tokens needs {blocks.stop}"
            )
        places = np.arange(blocks.start, blocks.stop)
        slots = lease.slots[places // group.blocks_per_slot - blocks.start // group.blocks_per_slot]
        host_slots = self._outbox.rows(slots, places % group.blocks_per_slot)
        return host_slots, as_slots(table[blocks.start : blocks.stop])

    def ended(self, lease: Lease) -> None:
        """A load of these slots landed, or was taken back."""
        self._being_loaded[lease.slots] -= 1

    @property
    def num_slots_being_loaded(self) -> int:
        """Slots that a load in flight, or one that waits for its plan, reads."""
        return int(np.count_nonzero(self._being_loaded))

    def _joined(self, leases: Sequence[Lease | None]) -> SlotArray:
        """The slots of a hit that another request is loading right now."""
        pinned = [lease.slots for lease in leases if lease is not None]
        if not pinned or not self._joins_loads:
            return as_slots(())
        slots = np.concatenate(pinned)
        return slots[self._being_loaded.take(slots) > 0]

    def _decide(self, look: Look) -> Decision:
        num_bytes = 0
        for group, size in zip(self._matcher.groups, self._block_bytes, strict=True):
            blocks = reach.needed_device_blocks(
                group, look.host_tokens, computed_tokens=look.computed_tokens
            )
            num_bytes += len(blocks) * size
        queued = self._outbox.bytes_to_device(self._block_bytes)
        return self.worth.decide(look.host_tokens - look.computed_tokens, num_bytes, queued)
