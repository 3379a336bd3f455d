"""kvferry in service in vLLM's scheduler: asks ours what to do, and says it in vLLM's words.

A request's life here::

    match ──> allocated ──────────────────> orders, every step it runs ──> finished
      │ hit     │ load: vLLM waits for it     │ store what this step         │ store the rest;
      │         │ until the ranks say so      │ computes, after it does      │ never waits
      └─ miss   └─ nothing to load            └─ preempted: match again
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvferry.cache import reach
from kvferry.cache.policies.contract import policy_named
from kvferry.cache.pool import Pool
from kvferry.connectors.vllm.blocks import VllmBlocks, next_to_go, num_allocated, table_of
from kvferry.connectors.vllm.control import VllmTokens
from kvferry.connectors.vllm.messages import RankShape, StepOrders
from kvferry.connectors.vllm.overlap import VllmOverlap, shares_of
from kvferry.connectors.vllm.ranks import tiers_of_ranks
from kvferry.connectors.vllm.reports import Reports
from kvferry.connectors.vllm.requests import Naming, Promises, Tracked
from kvferry.connectors.vllm.translate import Setup, opened
from kvferry.scheduler.promotion import State
from kvferry.scheduler.request import Request
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import LowerTier
from kvferry.scheduler.transfers import Ordered
from kvferry.tiers.disk.figures import DiskFigures
from kvferry.types import DeviceBlocks, Health, MatchState, Plan, Rank, Receipt


def scheduler_for(
    setup: Setup,
    shapes: Mapping[int, RankShape],
    blocks: VllmBlocks,
    tiers: Sequence[LowerTier],
    *,
    spare_tokens: int,
) -> Scheduler:
    """As many slots as the rank with the fewest has; none of them counts as ready yet."""
    num_slots = min(shape.num_slots for shape in shapes.values())
    return Scheduler(
        Pool(num_slots, policy_named(setup.config.policy), num_ready=0),
        setup.groups,
        config=setup.config,
        num_ranks=setup.num_ranks,
        hash_block_tokens=blocks.hash_tokens,
        num_device_blocks=blocks.num_blocks,
        block_bytes=shapes[0].block_bytes,
        spare_tokens=spare_tokens,
        tiers=tiers,
        # By their blocks vLLM is told what of a load did not come, or it would compute all of it.
        loads_early=setup.support.fails_by_block
        and setup.told_tokens == setup.groups[0].block_tokens,
        engine=blocks,
    )


# ------------------------------------------------------------------------------------------------
# When a step of vLLM's may go by without a look at anything.

LONG_TOKENS = 512
"""Who computes so many in its first step is looked at in that step: where vLLM evicts, a request
stores that many at a time."""

_MOST_QUIET = 32
"""Decoding steps that may go by without a look at anything: a fraction of a second."""

_MOST_CALM = 4
"""Steps in a row that bring requests and are not looked at further: where some come with every
step, there is no better one."""


class Pace:
    """Counts the steps that may still be skipped. Owns two numbers.

    *Quiet* steps only decode one more token of each request. *Calm* ones also bring requests that
    were answered at once and can be counted later: requests come where others end, and then the GPU
    waits for vLLM's scheduler; a step later, while it decodes, vLLM waits for the GPU.
    """

    __slots__ = ("_num_calm", "_num_quiet")

    def __init__(self) -> None:
        self._num_quiet = 0
        self._num_calm = 0

    @property
    def is_quiet(self) -> bool:
        """Whether the next step may be one that is not looked at."""
        return self._num_quiet > 0

    def disturb(self) -> None:
        """Something happened: the next step is no quiet one."""
        self._num_quiet = 0

    def look_next(self) -> None:
        """The next step is looked at, whoever comes in it."""
        self._num_quiet = self._num_calm = 0

    def looked(self, num_tokens: int) -> None:
        """A step was looked at; so many tokens each request may compute before the next look."""
        self._num_quiet = min(num_tokens, _MOST_QUIET)
        self._num_calm = _MOST_CALM

    def skips_quiet(self, step: Any) -> bool:
        """Whether all this step does is to decode one more token of each running request.

        Most steps do no more, and must cost next to nothing. So only the step itself is looked at:
        whatever else would be news to us ends the quiet, or can wait for the next full look.
        """
        num_running = len(step.num_scheduled_tokens)
        if (
            self._num_quiet <= 0
            or num_running == 0  # a step of its own kind: what waits has its moment
            or step.total_num_scheduled_tokens != num_running
            or step.scheduled_new_reqs
            or step.preempted_req_ids
        ):
            return False
        self._num_quiet -= 1
        return True

    def may_be_calm(self, step: Any) -> bool:
        """Whether this step brings requests, and nobody is taken off the device in it."""
        return bool(self._num_calm and step.scheduled_new_reqs and not step.preempted_req_ids)

    def skip_calm(self) -> None:
        """A calm step went by."""
        self._num_calm -= 1


# ------------------------------------------------------------------------------------------------
# When it is time to see who is late: now and then, and not before ranks could answer.

_LOOK_SECONDS = 0.25
"""How often deadlines are looked at where no receipts come."""

_LONG_SILENCE = 1.0
"""After so long without a look vLLM was not stepping (it slept, or nobody drove it). What the ranks
finished meanwhile they can say only in the step that comes: until then nobody is late."""


class Lateness:
    """Owns when the next look is due, and whether ranks were given time since the last one."""

    __slots__ = ("_due", "_has_waited")

    def __init__(self, now: float) -> None:
        self._due = now + _LOOK_SECONDS
        self._has_waited = False

    def is_due(self, now: float) -> bool:
        """Whether to see who is late though no receipts have come."""
        return now >= self._due

    def looks(self, now: float) -> bool:
        """Whether to see who is late now, behind whatever receipts have come.

        Not at once after a pause: a receipt may be of before it, and say nothing of the others. But
        time is given once: where all steps are far apart, who hangs must be late in one of them.
        """
        if now >= self._due + _LONG_SILENCE and not self._has_waited:
            self._due, self._has_waited = now + _LOOK_SECONDS, True
        if now < self._due and self._has_waited:
            return False
        self._due, self._has_waited = now + _LOOK_SECONDS, False
        return True


# ------------------------------------------------------------------------------------------------
# kvferry in service in vLLM's scheduler: asks ours what to do, and says it in vLLM's words.
#
# A request's life here::
#
#     match ──> allocated ──────────────────> orders, every step it runs ──> finished
#       │ hit     │ load: vLLM waits for it     │ store what this step         │ store the rest;
#       │         │ until the ranks say so      │ computes, after it does      │ never waits
#       └─ miss   └─ nothing to load            └─ preempted: match again

log = logging.getLogger("vllm.kvferry")

MISS = (0, False)


class Serving:
    """Owns our scheduler, who is called what in vLLM's, and what vLLM was promised.

    Decides nothing about blocks. Made once vLLM has bound its pool and every rank has been heard;
    what raises here takes kvferry out of service, which is the side's business.
    """

    def __init__(self, setup: Setup, shapes: Mapping[int, RankShape], blocks: VllmBlocks) -> None:
        groups = setup.groups
        self.blocks = blocks
        self.pinned: dict[Rank, int] = {}
        self.disks: dict[tuple[Rank, str], DiskFigures] = {}
        self._setup = setup
        self._naming = Naming(replace(setup.namespace, block_tokens=blocks.hash_tokens))
        self._least_block = min(group.block_tokens for group in groups)
        # A window that serves the token after the prompt may not reach back for its last one.
        self._claims_whole = setup.is_full and not setup.uses_drafts
        self._is_lazy = setup.config.store_mode == "lazy"
        # The last block a draft model wrote may be of tokens that were then refused.
        step = reach.hit_alignment(groups, hash_block_tokens=blocks.hash_tokens)
        self._spare_tokens = step if setup.uses_drafts else 0
        tiers = tiers_of_ranks(shapes.values(), setup.config)
        self.scheduler = scheduler_for(
            setup, shapes, blocks, tiers, spare_tokens=self._spare_tokens
        )
        self._tracked: dict[str, Tracked] = {}
        self._overlap = VllmOverlap(setup, shapes[0], self._tracked, blocks, self.scheduler.stats)
        self.reports = Reports(
            self.scheduler,
            setup.config,
            shape=shapes[0],
            num_ranks=setup.num_ranks,
            pinned=self.pinned,
            disks=self.disks,
            engine_here=setup.engine_here,
            has_listeners=setup.has_listeners,
            tiers=tiers,
            hash_tokens=blocks.hash_tokens,
            tokens=VllmTokens(self._naming.namespace, setup.hash_algorithm, blocks.hash_tokens),
        )
        rests = self.scheduler.rests
        assert rests is not None  # the scheduler was given vLLM's blocks
        self._rests = rests
        self._pace = Pace()
        self._promises = Promises()
        self._times_prefills = False  # and so must look at the next step
        self._unlooked: list[Tracked] = []  # they run since a calm step
        self._has_settled = False
        self._lateness = Lateness(time.monotonic())
        self._quiet_orders = StepOrders(computes=True, is_quiet=True)
        for rank, shape in shapes.items():
            self.scheduler.note_ready(Rank(rank), shape.ready_slots)

    # -- a request comes ------------------------------------------------------------------------

    def expect(self, request: Any) -> None:
        """It has come to vLLM's queue: what tiers have of it may come up meanwhile."""
        if not getattr(request, "skip_reading_prefix_cache", False):
            self.scheduler.prefetch(self._track(request).ferried)
            self._pace.look_next()

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after ``computed_tokens`` we can load; None to be asked again later."""
        if getattr(request, "skip_reading_prefix_cache", False):
            return MISS
        tracked = self._track(request)
        tracked.asks(computed_tokens, self.blocks.hash_tokens)
        # One token must be computed, or there is none to sample from. vLLM computes the last token
        # again where a load brings all of them. That is a step of one token, as in decoding, where
        # the end of a block would be a prefill; but for what is on the device but for its last
        # block, waiting for a load is not worth it.
        most = request.num_tokens - 1
        if self._claims_whole and computed_tokens + self._least_block <= most:
            most += not self._overlap.leaves_a_block(most - computed_tokens)
        match = tracked.ferried.match(computed_tokens=computed_tokens, max_tokens=most)
        if match.state is MatchState.WAIT:
            # What it waits for may have to be sent, and is heard of in a step that is looked at.
            self._pace.look_next()
            return None, False
        if match.state is MatchState.MISS:
            return MISS
        claimed = tracked.claimed_tokens = match.num_tokens - computed_tokens
        return claimed, True

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has given the request its blocks: order the load it was promised.

        What vLLM counts on and we cannot bring is told to it by way of the ranks, or the request
        would wait for ever.
        """
        tracked = self._track(request)
        ferried, claimed = tracked.ferried, tracked.claimed_tokens
        if ferried.state is State.ANSWERED and not num_external_tokens:
            self._pace.disturb()
            return
        self._pace.look_next()  # or one that comes back with a token to compute counts as not run
        tracked.claimed_tokens = 0
        if num_external_tokens != claimed:
            # Another connector serves the request, or vLLM wants less: change or drop the pins.
            ferried.match(
                computed_tokens=tracked.computed_tokens,
                max_tokens=tracked.computed_tokens + num_external_tokens,
            )
        if num_external_tokens:
            tables = blocks.get_block_ids()
            told = self.told_blocks(ferried.id, tables[0], num_external_tokens)
            overlap = None  # of what still comes up vLLM is not told early
            if ferried.state is State.MATCHED:
                overlap = self._overlap.decide(num_external_tokens)
            ordered = ferried.load([table_of(ids) for ids in tables], overlap)
            self.blocks.hold(ordered)
            self._promises.make(ferried, told, ordered, shares_of(overlap))

    def told_blocks(
        self, request_id: str, ids: Sequence[int], num_external_tokens: int
    ) -> tuple[int, ...]:
        """The first group's blocks that a load is to fill: what vLLM is told if it fails."""
        tracked, size = self._tracked.get(request_id), self._setup.told_tokens
        first = tracked.computed_tokens if tracked is not None else 0
        return tuple(ids[first // size : -(-(first + num_external_tokens) // size)])

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            ferried = opened(self.scheduler, request, self._naming)
            tracked = self._tracked[request.request_id] = Tracked(request, ferried)
        elif request.num_preemptions != tracked.preemptions:
            tracked.note_preemption()
        return tracked

    # -- every step -----------------------------------------------------------------------------

    def orders(self, step: Any) -> StepOrders:
        """This step's plan. Stores are of what this very step computes: the ranks order them so."""
        self.blocks.begin_step()
        if self._pace.skips_quiet(step):
            return self._quiet_orders
        if self._pace.may_be_calm(step) and self._is_calm(step):
            self._let_run(step)
            return self._quiet_orders
        plan = self._plan(step)
        promised = self._promises.take()
        epoch = self.scheduler.epoch
        if self._quiet_orders.epoch != epoch:
            self._quiet_orders = StepOrders(computes=True, epoch=epoch, is_quiet=True)
        computes = step.total_num_scheduled_tokens > 0
        return StepOrders(plan, computes=computes, epoch=epoch, **promised._asdict())

    def _is_calm(self, step: Any) -> bool:
        """Whether all that is new in this step are requests that can be counted later.

        Others may decode; who prefills a long prompt stores it as it goes. Nothing else may be
        urgent: what is to be sent, whose blocks are held or may soon be gone, who is being timed.
        """
        rests, scheduler = self._rests, self.scheduler
        if self._promises or self._times_prefills or self._is_lazy or scheduler.num_queued:
            return False
        if rests.held or (rests and not rests.can_wait):
            return False
        num_scheduled, num_others = step.num_scheduled_tokens, step.total_num_scheduled_tokens
        for data in step.scheduled_new_reqs:
            num_tokens = num_scheduled.get(data.req_id, 0)
            tracked = self._tracked.get(data.req_id)
            if tracked is None or num_tokens >= LONG_TOKENS:
                return False
            if tracked.ferried.state is not State.ANSWERED:
                return False
            num_others -= num_tokens
        return bool(num_others == len(num_scheduled) - len(step.scheduled_new_reqs))

    def _let_run(self, step: Any) -> None:
        """A calm step: note of its new requests what cannot be noted later."""
        self._pace.skip_calm()
        for data in step.scheduled_new_reqs:
            tracked = self._tracked[data.req_id]
            tracked.ferried.run()
            self._unlooked.append(tracked)
        for tracked in self._unlooked:
            self._time(tracked)

    def _plan(self, step: Any) -> Plan:
        scheduler = self.scheduler
        if not self._has_settled and self._lateness.is_due(time.monotonic()):
            self.settle(())
        self._has_settled = False
        scheduler.count_answered()
        self.reports.inbox.answer()
        self._unlooked.clear()
        for request_id in step.preempted_req_ids or ():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.request.num_preemptions != tracked.preemptions:
                tracked.note_preemption()
        num_quiet = self._store_running(step.num_scheduled_tokens)
        if self._rests:
            self._hold(scheduler.store_left(is_idle=not step.num_scheduled_tokens))
        released = scheduler.take_released()
        if released:
            self.blocks.drop(released)
        self._pace.looked(0 if self._rests.held else num_quiet)
        if self._is_lazy:
            self._offer(step)
        if not (step.num_scheduled_tokens or self._tracked):
            scheduler.writeback.flush()
        return scheduler.plan()

    def _store_running(self, num_scheduled: Mapping[str, int]) -> int:
        """Order what this step computes; returns how many tokens each may have before the next."""
        least = LONG_TOKENS if num_scheduled and not self._is_lazy else 0
        step = self._rests.step + self._spare_tokens
        self._times_prefills = False
        for request_id, num_new in num_scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            ferried = tracked.ferried
            if ferried.state is not State.RUNNING:
                ferried.run()
            computed_tokens = tracked.request.num_computed_tokens + num_new
            if computed_tokens >= ferried.progress.since + step:
                self._store(ferried, computed_tokens)
            if not tracked.is_timed:
                self._time(tracked)
            if tracked.is_timed:
                least = min(least, ferried.progress.since + step - computed_tokens - 1)
            else:
                self._times_prefills, least = True, 0
        return least

    def _store(self, ferried: Request, computed_tokens: int) -> None:
        """Order what a running request has not stored yet."""
        progress, chain = ferried.progress, ferried.chain
        from_token = progress.unstored_from(chain, progress.storable(chain, computed_tokens))
        if from_token is not None:
            tables = self.blocks.tables(ferried, computed_tokens, from_token)
            self._hold(ferried.store(tables, computed_tokens))

    def _hold(self, held: Sequence[DeviceBlocks | Ordered]) -> None:
        if held:
            self.blocks.hold(held)
            if self.reports.events is not None:
                self.reports.ordered([part for part in held if isinstance(part, Ordered)])

    def _time(self, tracked: Tracked) -> None:
        """Once for each request that runs, how long its prefill took."""
        prefill = tracked.time_prefill()
        if prefill is not None:
            self.scheduler.note_prefill(*prefill)

    def _offer(self, step: Any) -> None:
        """With lazy stores: show what vLLM will give away next."""
        scheduler = self.scheduler
        scheduler.note_allocated(num_allocated(step))
        head = self.blocks.queue_head
        for offer in next_to_go(head, scheduler.offer_depth, self._naming.namespace):
            self.blocks.hold(scheduler.offer(*offer))

    # -- receipts -------------------------------------------------------------------------------

    def hear(self, receipts: Sequence[Receipt], stale: Sequence[int]) -> None:
        """The ranks' answers of one step; ``stale`` epochs do not fit the model's weights."""
        self._pace.disturb()
        self.settle(receipts)
        self._has_settled = True
        if self.scheduler.epoch in stale:
            log.warning("The model's weights have changed: kvferry forgets what it has stored.")
            self.reset()

    def note_ready(self, ready: Iterable[tuple[Rank, int]]) -> None:
        """Host memory grows while requests already run."""
        for rank, num_slots in ready:
            self.scheduler.note_ready(rank, num_slots)

    def note_health(self, changes: Iterable[Health]) -> None:
        """Tiers went away on a rank, or came back; who waits for one that is away goes on."""
        for change in changes:
            state = f"is away on rank {change.rank}: {change.reason}" if change.reason else ""
            log.warning("tier %s %s", change.tier, state or f"is back on rank {change.rank}")
            self.scheduler.note_health(change)

    def settle(self, receipts: Sequence[Receipt]) -> None:
        looks = self._lateness.looks(time.monotonic())
        settled = self.scheduler.settle(receipts, looks=looks)
        self.blocks.drop(settled.released)
        if settled.ordered:
            self.blocks.hold(settled.ordered)
            self._promises.go_on(settled.ordered)
        if settled.landed and self.reports.events is not None:
            self.reports.events.settled()
        for failure in settled.failed:
            log.warning(
                "request %s computes %d tokens it hoped to load, once no rank can write its "
                "blocks any more: %s",
                failure.request.id,
                failure.num_tokens,
                failure.reason,
            )

    # -- a request goes -------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Done or aborted. What it computed and nobody stored yet is stored late; nobody waits.

        ``block_ids`` are the blocks it had, by group. (A window's are soon no longer its: those are
        stored at once.)
        """
        self._pace.disturb()
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            ferried = tracked.ferried
            self.reports.finished(ferried)
            self.blocks.remember(ferried, block_ids)
            self._hold(ferried.leave(request.num_computed_tokens))

    def reset(self) -> None:
        """Forget everything: the cache was reset, or the weights have changed."""
        self.scheduler.reset()
        self._pace.look_next()  # the ranks must hear of the epoch

    @property
    def unkept(self) -> dict[str, tuple[int, ...]]:
        """Loads vLLM waits for and no rank was told of, with the blocks they were meant for."""
        return self._promises.unkept

    @property
    def has_work(self) -> bool:
        """Whether the engine should keep stepping, so that copies under way can be told."""
        ours = self.scheduler
        is_moving = self._rests or ours.num_queued or ours.num_awaited
        is_left = not self._tracked and ours.writeback.flush_is_due
        return bool(is_moving or is_left or self._promises or self.reports.is_ordered)

    @property
    def frees_soon(self) -> bool:
        """Whether waiting for copies under way would give vLLM a block: cheaper than preempting."""
        self._rests.is_wanted = bool(self._rests)
        is_on_its_way = bool(self._rests) or self.scheduler.num_awaited > 0
        return is_on_its_way and self.blocks.keeps_free_blocks

    def take_stats(self) -> dict[str, float] | None:
        """What was counted since the last call, if it is time to tell and there is something."""
        if self._pace.is_quiet:
            return None
        # With nothing left to do there is no other step for long.
        if not (self.reports.is_due or (not self._tracked and not self.has_work)):
            return None
        return self.reports.take_stats(num_held=self.blocks.num_held)

    def close(self) -> None:
        """Each part though another cannot: vLLM shall get to its end."""
        for part in (self.reports, self.scheduler):
            try:
                part.close()
            except Exception:
                log.exception("kvferry did not close its %s", type(part).__name__)
