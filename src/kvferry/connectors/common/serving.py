"""kvferry in service in an engine's scheduler: translates the engine's hooks, step by step.

::

    a request   match ──> allocated ──────────────────> orders, every step it runs ──> finished
                  │ hit     │ load: the engine waits      │ store what this step         │ store
                  │         │ until all ranks report      │ computes, after it does      │ the rest
                  └─ miss   └─ nothing to load            └─ preempted: match again
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvferry.cache import reach
from kvferry.cache.policies import policy_named
from kvferry.cache.pool import Pool
from kvferry.connectors.common.contract import (
    EngineAdapter,
    EngineKeys,
    EngineRequest,
    SessionSetup,
)
from kvferry.connectors.common.loads import PromisedLoad
from kvferry.connectors.common.messages import LoadOrder, RankShape, StepOrders, StepReceipts
from kvferry.connectors.common.overlap import OverlapDecider
from kvferry.connectors.common.ranks import tiers_of_ranks
from kvferry.connectors.common.reports import Reports
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.transfers import Ordered
from kvferry.types import HOST, DeviceBlocks, Health, MatchState, Plan, Rank, Receipt, TierName

log = logging.getLogger(__name__)

LONG_TOKENS = 512
"""The most tokens that requests compute in steps that are skipped."""

_MOST_QUIET = 32
"""The most decoding steps skipped in a row: a fraction of a second."""

_POLL_SECONDS = 0.25
"""Seconds between two polls of the deadlines when no receipts come."""

_LONG_SILENCE = 1.0
"""Seconds without a poll after which the engine counts as not stepping. The ranks report what they
finished meanwhile only with the next step, so until then no transfer is overdue."""

_OTHERS = (State.LOADING, State.LOADED, State.RUNNING)


class RequestState:
    """One of the engine's requests, and the scheduler's request of the same name. Owns neither.

    At the last match the engine had ``computed`` tokens, and the answer was ``claimed`` more. A
    request that ``has_blocks`` waits for no load, so it computes while others load.
    """

    def __init__(self, theirs: EngineRequest, ours: Request, keys: EngineKeys) -> None:
        self.theirs = theirs
        self.ours = ours
        self.keys = keys
        self.preemptions = theirs.num_preemptions
        self.computed = self.claimed = 0
        self.is_timed = self.has_blocks = False
        self._began: tuple[float, int] | None = None

    def lacks_blocks(self) -> bool:
        """Whether the request waits for device blocks, and not for a load or a lower tier."""
        return not self.has_blocks and self.ours.state in (State.UNKNOWN, State.MATCHED)

    def time_prefill(self) -> tuple[int, float] | None:
        """Return, once per request, its computed prompt tokens and the seconds that took.

        Call it in every step. The time runs from the request's first step to the step after its
        first token. It includes whatever else ran: that is what computing costs on this server.
        """
        theirs = self.theirs
        if self._began is None:
            self._began = (time.monotonic(), theirs.num_computed_tokens)
            self.is_timed = theirs.num_output_tokens > 0  # resumed: its prompt was timed before
            return None
        if not theirs.num_output_tokens:
            return None
        self.is_timed = True
        start, had_tokens = self._began
        return theirs.num_prompt_tokens - had_tokens, time.monotonic() - start


class LoadingBlocks:
    """Bounds the device blocks of requests that are loading, or loaded and have not run yet.

    An engine cannot preempt such a request. If their blocks leave too few to run any of them, all
    requests wait for ever. So all blocks that they need up to their last token must fit the device
    together. A request that does not fit waits, and no later hit overtakes it.
    """

    def __init__(self, groups: Sequence[reach.Group], num_blocks: int) -> None:
        self._groups = groups
        self._most = num_blocks - 1  # an engine keeps one block for itself
        self._needs: dict[str, int] = {}
        self._waiting = ""  # name of the request that does not fit

    def may_begin(self, name: str, num_tokens: int, hit_tokens: int, *, is_hit: bool) -> bool:
        """Whether a request may get its device blocks now; ``hit_tokens`` need no computing."""
        self._needs.pop(name, None)  # a repeated call: its load failed, and its blocks were freed
        if not self._needs:
            self._waiting = ""
            return True
        if self._waiting and is_hit and name != self._waiting:
            return False
        if sum(self._needs.values()) + self._need(num_tokens, hit_tokens) > self._most:
            self._waiting = self._waiting or name
            return False
        if name == self._waiting:
            self._waiting = ""
        return True

    def began(self, name: str, num_tokens: int, hit_tokens: int) -> None:
        """Note that a request has its blocks and waits for its load."""
        self._needs[name] = self._need(num_tokens, hit_tokens)

    def ended(self, name: str) -> None:
        """Note that a request runs, or has given its blocks back."""
        self._needs.pop(name, None)
        if name == self._waiting:
            self._waiting = ""

    def _need(self, num_tokens: int, hit_tokens: int) -> int:
        """Return the most blocks that a request has up to its last token, and one for drafts."""
        num_blocks = 0
        for group in self._groups:
            first = max(0, group.first_token(hit_tokens))
            num_blocks += num_tokens // group.block_tokens + 2 - first // group.block_tokens
        return num_blocks


class Serving:
    """Owns the scheduler, the engine's requests by name, and the loads that the engine waits for.

    Exists once the engine is bound and every rank has reported. Lets exceptions pass: it is
    :class:`SchedulerSession` that takes kvferry out of service.
    """

    def __init__(
        self, setup: SessionSetup, shapes: Mapping[int, RankShape], engine: EngineAdapter
    ) -> None:
        groups = setup.groups
        self.engine = engine
        self._setup = setup
        self._least_block = min(group.block_tokens for group in groups)
        # A window that serves the token after the prompt may be too short for its last token.
        self._claims_whole = setup.is_full and setup.goes_alone and not setup.lookahead_tokens
        # A draft model's KV of a hit's last block depends on the next tokens, which may differ.
        step = math.lcm(engine.hash_tokens, *(group.block_tokens for group in groups))
        spare_tokens = step if setup.lookahead_tokens else 0
        # The engine may reject this step's drafts in the next, and a state cannot be rolled back.
        has_states = any(isinstance(group, reach.RecurrentState) for group in groups)
        self._stores_a_step_late = setup.verifies_drafts and has_states
        tiers = tiers_of_ranks(shapes.values(), setup.config)
        # The rank with the fewest slots sets their number; none of them is ready yet.
        num_slots = min(shape.num_slots for shape in shapes.values())
        self.scheduler = Scheduler(
            Pool(num_slots, policy_named(setup.config.policy), num_ready=0),
            groups,
            config=setup.config,
            num_ranks=setup.num_ranks,
            hash_block_tokens=engine.hash_tokens,
            num_device_blocks=engine.num_blocks,
            block_bytes=shapes[0].block_bytes,
            spare_tokens=spare_tokens,
            tiers=tiers,
            # If blocks are lost, an engine that is not told which would compute the whole hit.
            loads_early=setup.fails_by_block,
            engine=engine,
        )
        self._lower_names = [tier.name for tier in tiers]
        self._requests: dict[str, RequestState] = {}
        self._overlap = OverlapDecider(
            setup,
            shapes[0],
            self.scheduler.hits.worth,
            self._has_others,
            hash_tokens=engine.hash_tokens,
        )
        self.events: Any = None
        if setup.make_events is not None:
            self.events = setup.make_events(self.scheduler.pool, tiers, engine.hash_tokens)
        self.scheduler.watch_requests()
        self.reports = Reports(
            setup, self.scheduler, shape=shapes[0], hash_tokens=engine.hash_tokens
        )
        rests = self.scheduler.deferred
        assert rests is not None  # the scheduler was given the engine's blocks
        self._rests = rests
        self._loading = LoadingBlocks(groups, engine.num_blocks)
        self._num_quiet = 0  # steps that only decode and may be skipped
        self._promised: dict[Request, PromisedLoad] = {}
        self._has_settled = False
        self._poll_at = time.monotonic() + _POLL_SECONDS
        self._was_put_off = False
        self._quiet_orders = StepOrders(computes=True, is_quiet=True)
        for rank, shape in shapes.items():
            self.scheduler.note_ready(Rank(rank), shape.ready_slots)

    # -- a request arrives ----------------------------------------------------------------------

    def expect(self, request: EngineRequest) -> None:
        """Note that a request has entered the engine's queue, and prefetch its blocks."""
        self._num_quiet = 0
        if self._setup.loads and self._lower_names:
            self.scheduler.prefetch(self._state_of(request).ours)

    def match(self, request: EngineRequest, computed_tokens: int) -> int | None:
        """Return how many tokens after ``computed_tokens`` can be loaded; None: ask again later."""
        state = self._state_of(request)
        state.computed, state.claimed = computed_tokens, 0
        if not self._setup.loads:
            return 0
        # One token must be computed, or there are no logits to sample from. If all tokens hit, the
        # engine recomputes only the last one, as cheaply as a decoding step; recomputing the last
        # block would be a prefill. But a load of that block alone is not worth it.
        most = request.num_tokens - 1
        if self._claims_whole and computed_tokens + self._least_block <= most:
            leaves_a_block = self._overlap.is_due(most - computed_tokens, at_least_one_before=True)
            most += not leaves_a_block
        match = state.ours.match(computed_tokens=computed_tokens, max_tokens=most)
        if match.state is MatchState.WAIT:
            # Its promotion may still have to be sent, and its receipts taken: skip no step.
            self._num_quiet = 0
            return None
        is_hit = match.state is not MatchState.MISS
        end = match.num_tokens if is_hit else computed_tokens
        if not self._loading.may_begin(request.request_id, request.num_tokens, end, is_hit=is_hit):
            self._num_quiet = 0
            return None
        if not is_hit:
            return 0
        state.claimed = end - computed_tokens
        return state.claimed if end > self._setup.replayed_tokens else 0

    def allocated(
        self,
        request: EngineRequest,
        tables: Callable[[], Sequence[Sequence[int]]],
        num_external_tokens: int,
    ) -> None:
        """Order a request's load, now that the engine has given it device blocks.

        A load that cannot be ordered is reported as lost through the ranks, or the request would
        wait for ever.
        """
        state = self._requests.get(request.request_id)
        if state is None or request.num_preemptions != state.preemptions:
            state = self._state_of(request)
        ours, claimed = state.ours, state.claimed
        # Also without a load: else a resumed request with one token would not count as running.
        self._num_quiet = 0
        state.claimed = 0
        if num_external_tokens != claimed:
            # Another connector serves the request, or the engine wants less: change the leases.
            ours.match(
                computed_tokens=state.computed, max_tokens=state.computed + num_external_tokens
            )
        if not num_external_tokens:
            state.has_blocks = True
            return
        end = state.computed + num_external_tokens
        self._loading.began(request.request_id, request.num_tokens, end)
        tables_now = tables()
        blocks = self.promised_blocks(ours.id, tables_now[0], num_external_tokens)
        is_whole = ours.state is State.MATCHED
        overlaps = is_whole and self._overlap.is_due(num_external_tokens)
        ordered = ours.load(list(map(self.engine.table, tables_now)), in_parts=overlaps)
        self.engine.hold(ordered)
        promised = PromisedLoad(ours, {} if is_whole and ordered else dict.fromkeys(blocks))
        for part in ordered:
            promised.ordered[part.transfer] = part.blocks.tolist()
        self._promised[ours] = promised

    def promised_blocks(
        self, request_id: str, ids: Sequence[int], num_external_tokens: int
    ) -> tuple[int, ...]:
        """Return the first group's blocks that a load fills: those reported if it fails."""
        state, size = self._requests.get(request_id), self._setup.groups[0].block_tokens
        first = state.computed if state is not None else 0
        return tuple(ids[first // size : -(-(first + num_external_tokens) // size)])

    def _state_of(self, request: EngineRequest) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            has_tenants = self.scheduler.has_tenants
            keys, hints, reason = self.engine.describe(request, has_tenants=has_tenants)
            ours = self.scheduler.open(request.request_id, keys, hints, unheeded=reason)
            state = self._requests[request.request_id] = RequestState(request, ours, keys)
            if not self._setup.stores:
                ours.progress.most_tokens = 0
        elif request.num_preemptions != state.preemptions:
            self._note_preemption(state)
        return state

    def _note_preemption(self, state: RequestState) -> None:
        """Handle a preemption, seen by the request's own count: that may come before the hook."""
        state.preemptions = state.theirs.num_preemptions
        state.has_blocks = False
        state.ours.preempt()
        self._loading.ended(state.ours.id)

    def _has_others(self) -> bool:
        """Whether other requests compute in these steps, or will once their load has landed."""
        for state in self._requests.values():  # a generator costs a call per request
            if state.has_blocks or state.ours.state in _OTHERS:
                return True
        return False

    def hit_sources(self, request_id: str, num_tokens: int) -> dict[TierName, int]:
        """Return how many of the ``num_tokens`` of a hit to be loaded were found on each tier."""
        explained = self.scheduler.explain(request_id) if self._lower_names else None
        counted = explained.tier_hit_tokens if explained is not None else {}
        sources, left = {}, num_tokens
        for name in self._lower_names:
            sources[name] = min(left, counted.get(name, 0))
            left -= sources[name]
        sources[HOST] = left
        return {name: count for name, count in sources.items() if count}

    # -- every step -----------------------------------------------------------------------------

    def orders(
        self,
        scheduled: Mapping[str, int],
        num_tokens: int,
        *,
        new: bool,
        preempted: Collection[str],
    ) -> StepOrders:
        """Return this step's orders. The ranks run its stores after the step's forward pass."""
        # Most steps decode one more token of each running request and must cost next to nothing, so
        # this looks only at the step itself. A step that runs no request is never skipped.
        only_decodes = 0 < len(scheduled) == num_tokens
        if self._num_quiet > 0 and only_decodes and not (new or preempted):
            self._num_quiet -= 1
            return self._quiet_orders
        plan = self._plan(scheduled, preempted)
        epoch, computes = self.scheduler.epoch, num_tokens > 0
        if self._quiet_orders.epoch != epoch:
            self._quiet_orders = StepOrders(computes=True, epoch=epoch, is_quiet=True)
        loads = {}
        for request, load in tuple(self._promised.items()):
            order = load.take()
            if order is not None:  # it goes to the ranks with this step's plan
                loads[request.id] = order
                if order.is_last:
                    del self._promised[request]
        return StepOrders(plan, loads, computes=computes, epoch=epoch)

    def _plan(self, scheduled: Mapping[str, int], preempted: Collection[str]) -> Plan:
        scheduler = self.scheduler
        if not self._has_settled and time.monotonic() >= self._poll_at:
            self._settle(())
        self._has_settled = False
        if self.reports.mailbox.has_mail:
            self.reports.mailbox.answer()
        for request_id in preempted:
            state = self._requests.get(request_id)
            if state is not None and state.theirs.num_preemptions != state.preemptions:
                self._note_preemption(state)
        num_quiet = self._store_running(scheduled)
        if not scheduled and self._rests.num_held:  # a waiting request may need the held blocks
            self._rests.is_wanted |= any(map(RequestState.lacks_blocks, self._requests.values()))
        if self._rests and (held := scheduler.store_left(is_idle=not scheduled)):
            self._hold(held)
        released = scheduler.take_released()
        if released:
            self.engine.release(released)
        self._num_quiet = 0 if self._rests.num_held else min(num_quiet, _MOST_QUIET)
        if not (scheduled or self._requests):
            scheduler.writeback.flush()
        plan = scheduler.plan()
        is_waiting = not (scheduled or plan.transfers)  # copies must not wait for the events
        if is_waiting or scheduler.many_events_wait:
            scheduler.drain_events()
        return plan

    def _store_running(self, scheduled: Mapping[str, int]) -> int:
        """Order this step's stores; return how many more tokens each request may compute unseen."""
        if not scheduled:
            return 0
        least, step_tokens, late = LONG_TOKENS, self._rests.step, self._setup.lookahead_tokens
        for request_id, num_new in scheduled.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            ours = state.ours
            if ours.state is not State.RUNNING:
                ours.run()
                self._loading.ended(request_id)
            computed_tokens = state.theirs.num_computed_tokens - late
            if not self._stores_a_step_late:
                computed_tokens += num_new
            if computed_tokens >= ours.progress.next_from + step_tokens:
                self._store(ours, computed_tokens)
            if not state.is_timed and (prefill := state.time_prefill()) is not None:
                self.scheduler.note_prefill(*prefill)
            if state.is_timed:
                least = min(least, ours.progress.next_from + step_tokens - computed_tokens - 1)
            else:
                least = 0  # skip no step until the prompt is timed
        return least

    def _store(self, ours: Request, computed_tokens: int) -> None:
        """Order the store of a running request's blocks that are not stored yet."""
        from_token = ours.unstored_from(ours.storable(computed_tokens))
        if from_token is not None:
            tables = self.engine.tables(ours, computed_tokens, from_token)
            self._hold(ours.store(tables, computed_tokens))

    def _hold(self, held: Sequence[DeviceBlocks | Ordered]) -> None:
        self.engine.hold(held)
        if self.events is not None:
            for part in held:
                if isinstance(part, Ordered):
                    self.events.ordered(part)

    # -- receipts -------------------------------------------------------------------------------

    def take(self, report: StepReceipts) -> None:
        """Process the ranks' receipts of one step."""
        for rank, num_slots, _ in report.ready:  # host memory grows while requests run
            self.scheduler.note_ready(rank, num_slots)
        if report.ready or report.disks:
            self.reports.note(report)
        for health in report.health:
            self._note_health(health)
        self._num_quiet = 0
        self._settle(report.receipts)
        self._has_settled = True
        if self.scheduler.epoch in report.stale:
            log.warning("The model's weights have changed: kvferry forgets what it has stored.")
            self.reset()

    def _note_health(self, change: Health) -> None:
        if change.reason:
            log.warning(
                "tier %s is unavailable on rank %d: %s", change.tier, change.rank, change.reason
            )
        else:
            log.warning("tier %s is available again on rank %d", change.tier, change.rank)
        self.scheduler.note_health(change)

    def _polls_deadlines(self) -> bool:
        """Whether to poll the deadlines now, after the receipts that have come.

        After a pause the first receipts may lack transfers that ended meanwhile, so polling is put
        off. But only once: an engine whose steps are all far apart must notice a hung rank.
        """
        now = time.monotonic()
        if now >= self._poll_at + _LONG_SILENCE and not self._was_put_off:
            self._poll_at, self._was_put_off = now + _POLL_SECONDS, True
        if now < self._poll_at and self._was_put_off:
            return False
        self._poll_at, self._was_put_off = now + _POLL_SECONDS, False
        return True

    def _settle(self, receipts: Sequence[Receipt]) -> None:
        settled = self.scheduler.settle(receipts, looks=self._polls_deadlines())
        self.engine.release(settled.released)
        if settled.ordered:
            self.engine.hold(settled.ordered)
            for piece in settled.ordered:
                self._promised[piece.request].ordered[piece.transfer] = piece.blocks.tolist()
        if settled.landed and self.events is not None:
            self.events.settled()
        for failure in settled.failed:
            log.warning(
                "request %s computes %d tokens it hoped to load, once no rank can write its "
                "blocks any more: %s",
                failure.request.id,
                failure.num_tokens,
                failure.reason,
            )

    # -- a request ends -------------------------------------------------------------------------

    def finished(self, request: EngineRequest, block_ids: Sequence[Sequence[int]] = ()) -> None:
        """End a finished or aborted request; what it computed and has not stored is stored later.

        ``block_ids`` are its device blocks, by group. Blocks of a window are stored at once, before
        the engine gives them to other requests.
        """
        self._num_quiet, late = 0, self._setup.lookahead_tokens
        state = self._requests.pop(request.request_id, None)
        self._loading.ended(request.request_id)
        if state is not None:
            if self.reports.takes_orders:
                names = {state.ours.id, self.engine.conversation(request)} - {""}
                for name in names:
                    self.scheduler.control.remember(name, state.keys.keys())
            state.keys.had_blocks = block_ids
            if self.events is None:
                state.keys.request = None  # which is large: not until our records of it are read
            if held := state.ours.leave(request.num_computed_tokens - late):
                self._hold(held)

    def give_back(self) -> None:
        """Release the device blocks of every store, because the engine empties its cache by force.

        They may be overwritten before they are copied, so no block of these stores can be found.
        """
        self.engine.release(self.scheduler.take_back())
        self._num_quiet = 0

    def reset(self) -> None:
        """Forget every block: the cache was reset, or the weights have changed."""
        self.scheduler.reset()
        self.engine.release(self.scheduler.take_released())  # the next step may be far away
        self._num_quiet = 0  # the ranks must get the new epoch

    @property
    def unkept(self) -> dict[str, LoadOrder]:
        """The last orders of loads that the engine waits for, where no rank has them yet."""
        return {request.id: load.give_up() for request, load in self._promised.items()}

    @property
    def has_work(self) -> bool:
        """Whether the engine should keep stepping, so that copies under way can be reported."""
        scheduler = self.scheduler
        is_moving = self._rests or scheduler.num_queued or scheduler.transfers.num_awaited
        is_left = not self._requests and scheduler.writeback.flush_is_due
        return bool(is_moving or is_left or self._promised or self.reports.has_orders)

    def frees_soon(self) -> bool:
        """Whether waiting for copies under way would free a device block.

        Waiting is cheaper than preempting a request.
        """
        self._rests.is_wanted = bool(self._rests)
        is_under_way = self._rests or self.scheduler.transfers.num_awaited
        return bool(is_under_way) and self.engine.keeps_free_blocks

    def take_stats(self) -> dict[str, float] | None:
        """Return the figures since the last call, once a second; None if nothing has changed."""
        if self._num_quiet > 0:
            return None
        # With nothing left to do, report at once: the next step may be far away.
        is_due = time.monotonic() >= self.reports.due_at
        if not (is_due or (not self._requests and not self.has_work)):
            return None
        return self.reports.take_stats()

    def close(self) -> None:
        """Close each part, even if closing another fails: the engine must be able to shut down."""
        for part in (self.reports, self.scheduler):
            try:
                part.close()
            except Exception:
                log.exception("kvferry did not close its %s", type(part).__name__)
