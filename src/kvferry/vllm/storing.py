"""What of vLLM's requests is stored, and when: while they run, and what they leave at their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.config import Config
from kvferry.scheduler import Scheduler
from kvferry.vllm import translate
from kvferry.vllm.leftovers import Leftovers, Rest
from kvferry.vllm.offers import next_to_go, num_allocated
from kvferry.vllm.service import Service
from kvferry.vllm.tracked import Tracked, Unstored

_MOST_QUIET = 32
"""Decoding steps that may go by without a look at anything: a fraction of a second."""


class Storing(Service):
    """Owns what is known of vLLM's requests; orders their stores, and holds the blocks meanwhile.

    Which of their blocks are worth storing our own scheduler decides.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, config: Config, support: translate.Support
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, config, support)
        self._tracked: dict[str, Tracked] = {}
        self._times_prefills = False  # and so must look at the next step

    # -- while requests run ---------------------------------------------------------------------

    def _store_running(self, scheduler: Scheduler, num_scheduled: Mapping[str, int]) -> int:
        """Order what this step computes; returns how many tokens each may have before the next."""
        least = _MOST_QUIET if num_scheduled and self.config.store_mode != "lazy" else 0
        self._times_prefills = False
        for request_id, num_new in num_scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.has_run = True
            computed_tokens = tracked.request.num_computed_tokens + num_new
            if computed_tokens >= tracked.next_store:
                self._store(scheduler, tracked, computed_tokens)
            self._time(tracked)
            self._times_prefills |= not tracked.is_timed
            left = tracked.next_store - computed_tokens - 1 if tracked.is_timed else 0
            least = min(least, left)
        return least

    def _time(self, tracked: Tracked) -> None:
        """Once for each request that runs, how long its prefill took."""
        if tracked.has_run and not tracked.is_timed and self.scheduler is not None:
            prefill = tracked.time_prefill()
            if prefill is not None:
                self.scheduler.note_prefill(*prefill)

    def _store(self, scheduler: Scheduler, tracked: Tracked, computed_tokens: int) -> None:
        """Order what a running request has not stored yet."""
        num_tokens = self._known_tokens(tracked.request, computed_tokens)
        unstored = self._unstored(scheduler, tracked, num_tokens)
        if unstored is not None:
            self._order(scheduler, unstored)
        stored_tokens = scheduler.stored_tokens(tracked.request.request_id)
        tracked.next_store = stored_tokens + self._step + self._volatile

    @property
    def _step(self) -> int:
        """How many tokens a request stores at once."""
        return self._store_step if self._require_leftovers().can_wait else self._hasty_step

    def _known_tokens(self, request: Any, computed_tokens: int) -> int:
        """How many of its computed tokens could be stored.

        A token that is not known yet has no hash: drafts that may be refused are never stored.
        """
        known_tokens = len(request.block_hashes) * self._hash_tokens
        return int(min(computed_tokens, known_tokens) - self._volatile)

    def _unstored(
        self, scheduler: Scheduler, tracked: Tracked, num_tokens: int, *, has_ended: bool = False
    ) -> Unstored | None:
        """The whole blocks below ``num_tokens`` that are to be stored."""
        if self.config.store_mode == "lazy":
            return None
        request = tracked.request
        stored_tokens = scheduler.stored_tokens(request.request_id)
        if tracked.past_tokens and not stored_tokens:
            # What was loaded, or never left, needs no look at its blocks.
            past_tokens = min(tracked.past_tokens, num_tokens)
            keys = tracked.chain.keys()
            stored_tokens = scheduler.skip_stored(request.request_id, keys, past_tokens)
        if num_tokens < stored_tokens + self._least_block:
            return None
        tables = self._tables.cached if has_ended else self._tables.of
        return Unstored(
            tracked, tables(request, num_tokens, stored_tokens), num_tokens, stored_tokens
        )

    def _order(self, scheduler: Scheduler, unstored: Unstored) -> None:
        tracked, tables = unstored.tracked, unstored.tables
        request_id, keys = tracked.request.request_id, tracked.chain.keys()
        ordered = scheduler.store(request_id, keys, tables, unstored.num_tokens)
        self._require_holds().take(ordered)
        if self.sight is not None:
            self.sight.ordered(tracked, tables, ordered, self._hash_tokens)

    def _offer(self, scheduler: Scheduler, scheduler_output: Any) -> None:
        """With lazy stores: show what vLLM will give away next."""
        scheduler.note_allocated(num_allocated(scheduler_output))
        for offer in next_to_go(self._block_pool, scheduler.offer_depth, self._namespace):
            self._require_holds().take(scheduler.offer(*offer))

    # -- when they end --------------------------------------------------------------------------

    def _leave(self, scheduler: Scheduler, tracked: Tracked) -> None:
        """See to what a request that has ended did not store, by :mod:`kvferry.vllm.leftovers`."""
        request, leftovers = tracked.request, self._require_leftovers()
        num_tokens = self._known_tokens(request, request.num_computed_tokens)
        stored_tokens = scheduler.stored_tokens(request.request_id)
        if num_tokens < stored_tokens + self._least_block or self.config.store_mode == "lazy":
            scheduler.finish(request.request_id)
            return
        name = bytes(request.block_hashes[num_tokens // self._hash_tokens - 1])
        num_new = num_tokens - max(stored_tokens, tracked.past_tokens)
        if leftovers.can_wait and self._least_block <= num_new < self._store_step:
            twin = leftovers.wait(tracked, num_tokens, name)
            if twin is not None:
                scheduler.finish(twin.request_id)
        else:
            unstored = self._unstored(scheduler, tracked, num_tokens)
            if unstored is None:
                scheduler.finish(request.request_id)
            else:
                self._require_holds().take(unstored.blocks(scheduler.groups))
                leftovers.hold(unstored, name)

    def _store_leftovers(self, scheduler: Scheduler, *, is_idle: bool) -> None:
        leftovers = self._require_leftovers()
        if leftovers.is_due or (is_idle and leftovers):
            due = leftovers.take_due(is_idle=is_idle)
            for number, rest in enumerate(due):
                self._store_rest(scheduler, rest)
                stored_tokens = scheduler.stored_tokens(rest.request_id)
                if scheduler.stores_wait and stored_tokens + self._least_block <= rest.num_tokens:
                    leftovers.put_back(due[number:])
                    break
                self._end_rest(scheduler, rest)

    def _store_rest(self, scheduler: Scheduler, rest: Rest) -> None:
        unstored = rest.held
        if unstored is None:
            unstored = self._unstored(scheduler, rest.tracked, rest.num_tokens, has_ended=True)
        if unstored is not None:
            self._order(scheduler, unstored)

    def _end_rest(self, scheduler: Scheduler, rest: Rest) -> None:
        scheduler.finish(rest.request_id)
        if rest.held is not None:
            self._require_holds().drop(rest.held.blocks(scheduler.groups))

    def _forget(self, scheduler: Scheduler) -> None:
        """Everything, and what is left of before is not stored either."""
        for rest in self._require_leftovers().take_due(is_idle=True):
            self._end_rest(scheduler, rest)
        scheduler.reset()

    def _end_namesake(self, scheduler: Scheduler, request_id: str) -> None:
        """A name may be used again at once: what an ended request left is not the new one's."""
        for rest in self._require_leftovers().take_of(request_id):
            self._store_rest(scheduler, rest)
            self._end_rest(scheduler, rest)

    def _go_on(self, scheduler: Scheduler, tracked: Tracked) -> None:
        """Where this request goes on with what another left, it stores both, when it stores."""
        num_hashes = tracked.computed_tokens // self._hash_tokens
        if not num_hashes or scheduler.stored_tokens(tracked.request.request_id):
            return
        name = bytes(tracked.request.block_hashes[num_hashes - 1])
        rest = self._require_leftovers().take_continued(name)
        if rest is not None:
            scheduler.go_on(tracked.request.request_id, rest.request_id)
            stored_tokens = scheduler.stored_tokens(tracked.request.request_id)
            tracked.past_tokens = rest.tracked.past_tokens
            had_tokens = stored_tokens or tracked.past_tokens
            tracked.next_store = had_tokens + self._step + self._volatile

    def _require_leftovers(self) -> Leftovers:
        assert self.leftovers is not None  # made together with our scheduler
        return self.leftovers
