"""The connector in an engine's scheduler: waits for all ranks, serves, or says why it does not.

::

    made ──> engine bound, ranks met ──> serving ──an exception of ours──> broken: drains,
      └──> refused: idle                                                   holds nothing

    a request   match ──> allocated ──────────────────> orders, every step it runs ──> finished
                  │ hit     │ load: the engine waits      │ store what this step         │ store
                  │         │ until the ranks say so      │ computes, after it does      │ the rest
                  └─ miss   └─ nothing to load            └─ preempted: match again
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvferry.cache import reach
from kvferry.cache.policies.contract import policy_named
from kvferry.cache.pool import Pool
from kvferry.connectors.common.contract import (
    EngineAdapter,
    EngineKeys,
    EngineRequest,
    SessionSetup,
    Step,
)
from kvferry.connectors.common.guard import Guard
from kvferry.connectors.common.loads import PromisedLoads
from kvferry.connectors.common.messages import EndedLoad, RankShape, StepOrders, StepReceipts
from kvferry.connectors.common.overlap import OverlapDecider
from kvferry.connectors.common.ranks import DiskMarks, disagreement, tiers_of_ranks
from kvferry.connectors.common.reports import Reports, idle_figures
from kvferry.core.quantities import rounded_size
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import LowerTier
from kvferry.scheduler.transfers import Ordered
from kvferry.settings.tiers import show_tiers
from kvferry.types import DeviceBlocks, Health, MatchState, Plan, Rank, Receipt

log = logging.getLogger(__name__)

LONG_TOKENS = 512
"""A request that computes so many tokens in its first step is looked at in that step: where the
engine evicts, a request stores that many at a time."""

_MOST_QUIET = 32
"""Decoding steps in a row that are skipped: a fraction of a second."""

_MOST_CALM = 4
"""Steps in a row that bring requests and are skipped: with a request in every step, there is no
better one."""

_POLL_SECONDS = 0.25
"""How often deadlines are polled without receipts."""

_LONG_SILENCE = 1.0
"""After so long without a poll the engine was not stepping. The ranks report what they finished
meanwhile with the next step only, so no deadline has passed before that."""

_STATS_SECONDS = 1.0

_OTHERS = (State.ANSWERED, State.LOADING, State.LOADED, State.RUNNING)


class StepSkipper:
    """Counts the steps that may still be skipped; set ``num_quiet`` to 0 when something happens.

    *Quiet* steps only decode one more token of each request. *Calm* steps also bring requests that
    were answered at once and can be counted later: they come where others end, and then the GPU
    waits for the engine's scheduler; a step later, while it decodes, the scheduler waits.
    """

    __slots__ = ("num_calm", "num_quiet")

    def __init__(self) -> None:
        self.num_quiet = self.num_calm = 0

    def look_next(self) -> None:
        """The next step is looked at, whatever requests it brings."""
        self.num_quiet = self.num_calm = 0

    def looked(self, num_tokens: int) -> None:
        """A step was looked at; each request may compute so many tokens before the next look."""
        self.num_quiet = min(num_tokens, _MOST_QUIET)
        self.num_calm = _MOST_CALM

    def skips_quiet(self, step: Step) -> bool:
        """Whether this step only decodes one more token of each running request.

        Most steps do, and must cost next to nothing: only the step itself is looked at.
        """
        num_running = len(step.scheduled)
        # A step that runs nothing is a chance for what waits, so it is always looked at.
        if self.num_quiet <= 0 or not num_running or step.num_tokens != num_running:
            return False
        if step.new or step.preempted:
            return False
        self.num_quiet -= 1
        return True


class DeadlinePoll:
    """Owns when deadlines are polled next, and whether the ranks had time to answer since."""

    __slots__ = ("_due", "_has_waited")

    def __init__(self, now: float) -> None:
        self._due = now + _POLL_SECONDS
        self._has_waited = False

    def is_due(self, now: float) -> bool:
        return now >= self._due

    def polls(self, now: float) -> bool:
        """Whether to poll the deadlines now, after the receipts that have come.

        Not at once after a pause: those receipts may say nothing of other transfers. But the extra
        time is given once: where all steps are far apart, a hung rank must be noticed in one.
        """
        if now >= self._due + _LONG_SILENCE and not self._has_waited:
            self._due, self._has_waited = now + _POLL_SECONDS, True
        if now < self._due and self._has_waited:
            return False
        self._due, self._has_waited = now + _POLL_SECONDS, False
        return True


class RequestState:
    """One of the engine's requests, and the scheduler's request of the same name. Owns neither."""

    def __init__(self, theirs: EngineRequest, ours: Request) -> None:
        self.theirs = theirs
        self.ours = ours
        self.keys: EngineKeys = ours.chain  # type: ignore[assignment]  # the adapter opened it
        self.preemptions = theirs.num_preemptions
        self.computed = 0
        """Tokens that the engine had when it last asked for a match."""
        self.claimed = 0
        """Tokens beyond these that it was promised."""
        self.is_timed = False
        self._began: tuple[float, int] | None = None

    def note_preemption(self) -> None:
        """An engine may preempt and resume a request before it says so; its count says it first."""
        self.preemptions = self.theirs.num_preemptions
        self.ours.preempt()

    def time_prefill(self) -> tuple[int, float] | None:
        """Call it in every step: once, the prompt tokens it computed and how long that took.

        Measured from its first step to the step after its first token, with whatever else ran
        meanwhile: that is what computing costs on this server.
        """
        theirs = self.theirs
        if self.is_timed:
            return None
        if self._began is None:
            self._began = (time.monotonic(), theirs.num_computed_tokens)
            self.is_timed = theirs.num_output_tokens > 0  # resumed: its prompt was timed before
            return None
        if not theirs.num_output_tokens:
            return None
        self.is_timed = True
        start, had_tokens = self._began
        return theirs.num_prompt_tokens - had_tokens, time.monotonic() - start


class Serving:
    """Owns the scheduler, the engine's requests by name, and the loads that were promised.

    Made once the engine is bound and every rank was met. An exception in here takes kvferry out of
    service, which is :class:`SchedulerSession`'s task.
    """

    def __init__(
        self, setup: SessionSetup, shapes: Mapping[int, RankShape], engine: EngineAdapter
    ) -> None:
        groups = setup.groups
        self.engine = engine
        self._setup = setup
        self._hash_tokens = engine.hash_tokens
        self._least_block = min(group.block_tokens for group in groups)
        # A window that serves the token after the prompt may not reach back for its last one.
        self._claims_whole = setup.is_full and not setup.uses_drafts
        self._is_lazy = setup.config.store_mode == "lazy"
        # The last block that a draft model wrote may be of tokens that were refused later.
        step = reach.hit_alignment(groups, hash_block_tokens=engine.hash_tokens)
        self._spare_tokens = step if setup.uses_drafts else 0
        tiers = tiers_of_ranks(shapes.values(), setup.config)
        self.scheduler = self._make_scheduler(shapes, tiers)
        self._requests: dict[str, RequestState] = {}
        self._overlap = OverlapDecider(
            setup, shapes[0], self.scheduler, self._has_others, hash_tokens=engine.hash_tokens
        )
        self.reports = Reports(
            self.scheduler, setup, shape=shapes[0], tiers=tiers, hash_tokens=engine.hash_tokens
        )
        rests = self.scheduler.deferred
        assert rests is not None  # the scheduler was given the engine's blocks
        self._rests = rests
        self._skipper = StepSkipper()
        self._promises = PromisedLoads()
        self._times_prefills = False  # then the next step must be looked at
        self._unlooked: list[RequestState] = []  # they run since a calm step
        self._has_settled = False
        self._deadlines = DeadlinePoll(time.monotonic())
        self._quiet_orders = StepOrders(computes=True, is_quiet=True)
        for rank, shape in shapes.items():
            self.scheduler.note_ready(Rank(rank), shape.ready_slots)

    def _make_scheduler(
        self, shapes: Mapping[int, RankShape], tiers: Sequence[LowerTier]
    ) -> Scheduler:
        """With as many slots as the rank with the fewest; none of them is ready yet."""
        setup, engine = self._setup, self.engine
        num_slots = min(shape.num_slots for shape in shapes.values())
        return Scheduler(
            Pool(num_slots, policy_named(setup.config.policy), num_ready=0),
            setup.groups,
            config=setup.config,
            num_ranks=setup.num_ranks,
            hash_block_tokens=engine.hash_tokens,
            num_device_blocks=engine.num_blocks,
            block_bytes=shapes[0].block_bytes,
            spare_tokens=self._spare_tokens,
            tiers=tiers,
            # The engine must be told which blocks are missing, or it would compute all of them.
            loads_early=setup.fails_by_block
            and setup.reported_tokens == setup.groups[0].block_tokens,
            engine=engine,
        )

    # -- a request comes ------------------------------------------------------------------------

    def expect(self, request: EngineRequest) -> None:
        """It has come to the engine's queue: lower tiers may promote its blocks meanwhile."""
        self.scheduler.prefetch(self._state_of(request).ours)
        self._skipper.look_next()

    def match(self, request: EngineRequest, computed_tokens: int) -> int | None:
        """How many tokens after ``computed_tokens`` can be loaded; None to be asked again later."""
        # A request may want the blocks of a load that ends: the device has them soon.
        if self._promises.pieces and self._promises.are_ending:
            self._skipper.look_next()
            return None
        state = self._state_of(request)
        state.computed, state.claimed = computed_tokens, 0
        state.keys.num_past = computed_tokens // self._hash_tokens
        # One token must be computed, or there is none to sample from. The engine computes the last
        # token again where a load brings all of them: a step of one token, as in decoding, where
        # the end of a block would be a prefill. But where only the last block is missing on the
        # device, waiting for a load is not worth it.
        most = request.num_tokens - 1
        if self._claims_whole and computed_tokens + self._least_block <= most:
            most += not self._overlap.leaves_a_block(most - computed_tokens)
        match = state.ours.match(computed_tokens=computed_tokens, max_tokens=most)
        if match.state is MatchState.WAIT:
            # What it waits for may have to be sent, and is heard of in a step that is looked at.
            self._skipper.look_next()
            return None
        if match.state is MatchState.MISS:
            return 0
        state.claimed = match.num_tokens - computed_tokens
        return state.claimed

    def allocated(
        self,
        request: EngineRequest,
        tables: Callable[[], Sequence[Sequence[int]]],
        num_external_tokens: int,
    ) -> None:
        """The engine has given the request its blocks: order the load it was promised.

        A load that cannot be ordered is reported by way of the ranks, or the request would wait
        for ever.
        """
        state = self._state_of(request)
        ours, claimed = state.ours, state.claimed
        if not num_external_tokens and ours.state is State.ANSWERED:
            self._skipper.num_quiet = 0
            return
        # Also without a load: a request that comes back with one token would count as not run.
        self._skipper.look_next()
        state.claimed = 0
        if num_external_tokens != claimed:
            # Another connector serves the request, or the engine wants less: change the pins.
            ours.match(
                computed_tokens=state.computed, max_tokens=state.computed + num_external_tokens
            )
        if not num_external_tokens:
            return
        tables_now = tables()
        blocks = self.promised_blocks(ours.id, tables_now[0], num_external_tokens)
        overlap = None  # the engine is not told early of a load in pieces
        if ours.state is State.MATCHED:
            overlap = self._overlap.decide(num_external_tokens)
        ordered = ours.load([self.engine.table(ids) for ids in tables_now], overlap)
        self.engine.hold(ordered)
        is_early = overlap is not None and overlap.is_early
        epoch = self.scheduler.epoch
        self._promises.promise(ours, blocks, ordered, epoch=epoch, is_early=is_early)

    def promised_blocks(
        self, request_id: str, ids: Sequence[int], num_external_tokens: int
    ) -> tuple[int, ...]:
        """The first group's blocks that a load is to fill: what is reported if it fails."""
        state, size = self._requests.get(request_id), self._setup.reported_tokens
        first = state.computed if state is not None else 0
        return tuple(ids[first // size : -(-(first + num_external_tokens) // size)])

    def _state_of(self, request: EngineRequest) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            ours = self.engine.open(self.scheduler, request)
            state = self._requests[request.request_id] = RequestState(request, ours)
        elif request.num_preemptions != state.preemptions:
            state.note_preemption()
        return state

    def _has_others(self) -> bool:
        """Whether requests compute in these steps, or will: from the start, or once loaded."""
        for state in self._requests.values():  # noqa: SIM110  # a generator is a call per request
            if state.ours.state in _OTHERS:
                return True
        return False

    # -- every step -----------------------------------------------------------------------------

    def orders(self, step: Step) -> StepOrders:
        """This step's plan. It stores what this very step computes: the ranks order them so."""
        self.engine.begin_step()
        skipper = self._skipper
        if skipper.skips_quiet(step):
            return self._quiet_orders
        if skipper.num_calm and step.new and not step.preempted and self._is_calm(step):
            self._let_run(step)
            return self._quiet_orders
        plan = self._plan(step)
        epoch, computes = self.scheduler.epoch, step.num_tokens > 0
        if self._quiet_orders.epoch != epoch:
            self._quiet_orders = StepOrders(computes=True, epoch=epoch, is_quiet=True)
        promises = self._promises
        if not (promises.whole or promises.pieces or promises.ended):
            return StepOrders(plan, computes=computes, epoch=epoch)
        return StepOrders(
            plan,
            promises.take_loads(),
            promises.take_ended(),
            computes=computes,
            epoch=epoch,
            early=promises.take_early(),
        )

    def _is_calm(self, step: Step) -> bool:
        """Whether the new requests of this step can be counted later, and all others decode.

        Not where something is urgent: loads to send, blocks that are held or may soon be gone,
        requests being timed. A request with a long prompt stores it as it computes.
        """
        rests = self._rests
        promises = self._promises
        if promises.whole or promises.pieces or promises.ended:
            return False
        if self._times_prefills or self._is_lazy or self.scheduler.num_queued:
            return False
        if rests.held or (rests and not rests.can_wait):
            return False
        num_others = step.num_tokens
        for request_id in step.new:
            num_tokens = step.scheduled.get(request_id, 0)
            state = self._requests.get(request_id)
            if state is None or num_tokens >= LONG_TOKENS:
                return False
            if state.ours.state is not State.ANSWERED:
                return False
            num_others -= num_tokens
        return num_others == len(step.scheduled) - len(step.new)

    def _let_run(self, step: Step) -> None:
        """A calm step: note of its new requests what cannot be noted later."""
        self._skipper.num_calm -= 1
        for request_id in step.new:
            state = self._requests[request_id]
            state.ours.run()
            self._unlooked.append(state)
        for state in self._unlooked:
            self._time(state)

    def _plan(self, step: Step) -> Plan:
        scheduler = self.scheduler
        if not self._has_settled and self._deadlines.is_due(time.monotonic()):
            self._settle(())
        self._has_settled = False
        self.reports.mailbox.answer()
        self._unlooked.clear()
        for request_id in step.preempted:
            state = self._requests.get(request_id)
            if state is not None and state.theirs.num_preemptions != state.preemptions:
                state.note_preemption()
        num_quiet = self._store_running(step.scheduled)
        if self._rests:
            self._hold(scheduler.store_left(is_idle=not step.scheduled))
        released = scheduler.take_released()
        if released:
            self.engine.release(released)
        self._skipper.looked(0 if self._rests.held else num_quiet)
        if self._is_lazy:
            self._offer(step)
        if not (step.scheduled or self._requests):
            scheduler.writeback.flush()
        return scheduler.plan()

    def _store_running(self, scheduled: Mapping[str, int]) -> int:
        """Order what this step computes; returns how many tokens each may compute unobserved."""
        least = LONG_TOKENS if scheduled and not self._is_lazy else 0
        step_tokens = self._rests.step + self._spare_tokens
        self._times_prefills = False
        for request_id, num_new in scheduled.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            ours = state.ours
            if ours.state is not State.RUNNING:
                ours.run()
            computed_tokens = state.theirs.num_computed_tokens + num_new
            if computed_tokens >= ours.progress.since + step_tokens:
                self._store(ours, computed_tokens)
            if not state.is_timed:
                self._time(state)
            if state.is_timed:
                least = min(least, ours.progress.since + step_tokens - computed_tokens - 1)
            else:
                self._times_prefills, least = True, 0
        return least

    def _store(self, ours: Request, computed_tokens: int) -> None:
        """Order what a running request has not stored yet."""
        progress, chain = ours.progress, ours.chain
        from_token = progress.unstored_from(chain, progress.storable(chain, computed_tokens))
        if from_token is not None:
            tables = self.engine.tables(ours, computed_tokens, from_token)
            self._hold(ours.store(tables, computed_tokens))

    def _hold(self, held: Sequence[DeviceBlocks | Ordered]) -> None:
        if held:
            self.engine.hold(held)
            if self.reports.events is not None:
                for part in held:
                    if isinstance(part, Ordered):
                        self.reports.events.ordered(part)

    def _time(self, state: RequestState) -> None:
        prefill = state.time_prefill()
        if prefill is not None:
            self.scheduler.note_prefill(*prefill)

    def _offer(self, step: Step) -> None:
        """With lazy stores: show what the engine will give away next."""
        scheduler = self.scheduler
        scheduler.note_allocated(step.num_allocated())
        for offer in self.engine.next_evicted(scheduler.offer_depth):
            self.engine.hold(scheduler.offer(*offer))

    # -- receipts -------------------------------------------------------------------------------

    def take(self, report: StepReceipts) -> None:
        """The ranks' answers of one step."""
        for rank, num_slots in report.ready:  # host memory grows while requests run
            self.scheduler.note_ready(rank, num_slots)
        if report.pinned or report.disks:
            self.reports.note(report)
        for health in report.health:
            self._note_health(health)
        self._skipper.num_quiet = 0
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

    def _settle(self, receipts: Sequence[Receipt]) -> None:
        polls = self._deadlines.polls(time.monotonic())
        settled = self.scheduler.settle(receipts, looks=polls)
        self.engine.release(settled.released)
        if settled.ordered:
            self.engine.hold(settled.ordered)
            self._promises.order(settled.ordered)
        if settled.landed:
            if self._promises.pieces:
                self._promises.land(settled.landed)
            if self.reports.events is not None:
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

    def finished(self, request: EngineRequest, block_ids: Sequence[Sequence[int]]) -> None:
        """It is done or aborted: what it computed and has not stored is stored later.

        ``block_ids`` are the blocks it had, by group. (Those of a window are stored at once: soon
        they belong to other requests.)
        """
        self._skipper.num_quiet = 0
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            if self.reports.takes_orders:
                self.scheduler.control.remember(state.ours.id, state.keys.keys())
            state.keys.end(block_ids)
            self._hold(state.ours.leave(request.num_computed_tokens))

    def reset(self) -> None:
        """Forget everything: the cache was reset, or the weights have changed."""
        self.scheduler.reset()
        self._skipper.look_next()  # the ranks must hear of the epoch

    @property
    def unkept(self) -> dict[str, EndedLoad]:
        """Loads that the engine waits for and that no rank was told of."""
        return self._promises.unkept

    @property
    def has_work(self) -> bool:
        """Whether the engine should keep stepping, so that copies under way can be reported."""
        scheduler = self.scheduler
        is_moving = self._rests or scheduler.num_queued or scheduler.num_awaited
        is_left = not self._requests and scheduler.writeback.flush_is_due
        promises = self._promises
        is_promised = promises.whole or promises.pieces or promises.ended
        return bool(is_moving or is_left or is_promised or self.reports.has_orders)

    @property
    def frees_soon(self) -> bool:
        """Whether waiting for copies under way would give the engine a block.

        That is cheaper than to preempt a request.
        """
        self._rests.is_wanted = bool(self._rests)
        is_under_way = bool(self._rests) or self.scheduler.num_awaited > 0
        return is_under_way and self.engine.keeps_free_blocks

    def take_stats(self) -> dict[str, float] | None:
        """What was counted since the last call, once a second; None if that is nothing."""
        if self._skipper.num_quiet > 0:
            return None
        # With nothing left to do there is no other step for long.
        if not (self.reports.is_due or (not self._requests and not self.has_work)):
            return None
        return self.reports.take_stats(num_held=self.engine.num_held)

    def close(self) -> None:
        """Close each part although another cannot be: the engine must get to its end."""
        for part in (self.reports, self.scheduler):
            try:
                part.close()
            except Exception:
                log.exception("kvferry did not close its %s", type(part).__name__)


class SchedulerSession:
    """Owns what serves, and lets no exception of kvferry stop the engine.

    ``serving`` is None until all ranks were met, and again once something raised: requests run
    without kvferry then. ``former`` is what served until the exception; it holds its device blocks
    until no rank copies.
    """

    def __init__(self, setup: SessionSetup) -> None:
        self.setup = setup
        self.guard = Guard("scheduler")
        self.refusal = setup.refusal
        self.serving: Serving | None = None
        self.former: Serving | None = None
        self._make_engine: Callable[[], EngineAdapter] | None = None
        self._shapes: dict[int, RankShape] = {}
        self._unkept: dict[str, EndedLoad] = {}
        self._marks: DiskMarks | None = None
        self._is_reset_due = False
        self._drained: set[Rank] = set()
        self._reported_at = 0.0

    # -- until it can serve -----------------------------------------------------------------------

    def bind(self, make_engine: Callable[[], EngineAdapter]) -> None:
        """The engine has its device blocks; the last call before serving begins counts."""
        self._make_engine = make_engine
        self._begin()

    def meet_ranks(self, shapes: Sequence[RankShape]) -> None:
        """What the ranks found when they saw their KV tensors; each rank counts once."""
        new = [shape for shape in shapes if shape.rank not in self._shapes]
        self._shapes |= {shape.rank: shape for shape in new}
        refusals = [f"rank {shape.rank}: {shape.refusal}" for shape in new if shape.refusal]
        self.refusal = self.refusal or "; ".join(refusals)
        if new and len(self._shapes) == self.setup.num_ranks:
            self._marks = DiskMarks(self._shapes.values(), self.setup.config.disk_deadline)
            self.refusal = self.refusal or disagreement(self._shapes.values())
            self._begin()
            logging.getLogger(self.setup.log_name).info(self.banner())

    def _begin(self) -> None:
        """Serve, once the engine is bound and every rank was met."""
        met_all = len(self._shapes) == self.setup.num_ranks
        if self._make_engine is None or not met_all or self.guard.broken:
            return
        if self.serving is not None or self.refusal:
            return
        try:
            self.serving = Serving(self.setup, self._shapes, self._make_engine())
            if self._is_reset_due:
                self.serving.reset()
        except Exception as error:
            self._trip("start", error)
        # What the tiers still have may be hundreds of megabytes, and is known by now.
        self._shapes = {rank: shape.without_blocks() for rank, shape in self._shapes.items()}

    def banner(self) -> str:
        """One line for the log: what is in service, or why nothing is."""
        serving, config = self.serving, self.setup.config
        if serving is None:
            return f"kvferry is idle: {self.idle_reason}"
        scheduler, shape = serving.scheduler, self._shapes[0]
        kinds = ", ".join(dict.fromkeys(type(group).__name__ for group in scheduler.groups))
        shared = "shared by" if shape.is_shared else "on each of"
        host = rounded_size(scheduler.pool.num_slots * shape.slot_bytes)
        parts = [
            f"kvferry is in service: {scheduler.pool.num_slots} blocks ({host}) of host memory "
            f"{shared} {self.setup.num_ranks} rank(s), {len(scheduler.groups)} group(s) [{kinds}], "
            f"a block is {shape.layout}, stores {config.store_mode}, "
            f"copy path {config.copy_path}, loads {config.load_policy}, policy {config.policy}"
        ]
        if config.all_tiers:
            parts[0] += f"; below it, {config.tier_write}: {show_tiers(config.all_tiers)}"
            restored = scheduler.stats().restored
            parts += [
                f"{count:,} blocks found on {name}" for name, count in restored.items() if count
            ]
        return ", ".join(parts)

    @property
    def idle_reason(self) -> str:
        """Why nothing is served; empty where something is."""
        if self.serving is not None:
            return ""
        if self.refusal or self.guard.broken:
            return self.refusal or self.guard.reason
        if len(self._shapes) < self.setup.num_ranks:
            return f"{len(self._shapes)} of {self.setup.num_ranks} ranks were heard"
        return "the engine has not bound its block pool"

    def _trip(self, where: str, error: Exception) -> None:
        """An exception of ours: end every load that the engine was promised, and stop serving."""
        self.guard.trip(where, error)
        if self.serving is not None:
            self._unkept |= self.serving.unkept
            self.former, self.serving = self.serving, None

    def _guarded(self, where: str, call: Callable[[Serving], Any], default: Any = None) -> Any:
        """``call(serving)``, or ``default`` where nothing serves or the call raises."""
        if self.serving is None:
            return default
        try:
            return call(self.serving)
        except Exception as error:
            self._trip(where, error)
            return default

    # -- the engine's hooks -----------------------------------------------------------------------

    def expect(self, request: EngineRequest) -> None:
        """A request has come to the engine's queue."""
        if self.setup.config.all_tiers:
            self._guarded("expect", lambda serving: serving.expect(request))

    def match(self, request: EngineRequest, computed_tokens: int) -> int | None:
        """How many tokens after ``computed_tokens`` can be loaded; None to be asked again later."""
        serving = self.serving
        if serving is None:
            return 0
        try:
            return serving.match(request, computed_tokens)
        except Exception as error:
            self._trip("match", error)
            return 0

    def allocated(
        self,
        request: EngineRequest,
        tables: Callable[[], Sequence[Sequence[int]]],
        num_external_tokens: int,
    ) -> None:
        """The request has its blocks, ``tables()`` by group, and waits for so many tokens."""
        serving = self.serving
        if serving is not None:
            try:
                serving.allocated(request, tables, num_external_tokens)
                return
            except Exception as error:
                self._trip("allocated", error)
        if num_external_tokens:  # the engine would wait for ever
            blocks = tuple(tables()[0])
            if self.former is not None:
                name = request.request_id
                blocks = self.former.promised_blocks(name, blocks, num_external_tokens)
            self._unkept[request.request_id] = EndedLoad(blocks, blocks)

    def orders(self, step: Step) -> StepOrders:
        """What every rank is to do in this step."""
        serving = self.serving
        if serving is not None and not self._unkept:
            try:
                return serving.orders(step)
            except Exception as error:
                self._trip("orders", error)
        ended, self._unkept = self._unkept, {}
        is_stuck = self.former is not None and self.former.engine.num_held > 0
        return StepOrders(ended=ended, computes=step.num_tokens > 0, drain=is_stuck)

    def take(self, report: StepReceipts) -> None:
        """The ranks' answers of one step."""
        if report.shapes:
            self.meet_ranks(report.shapes)
        serving = self.serving
        if serving is not None:
            try:
                serving.take(report)
            except Exception as error:
                self._trip("take", error)
        self._drained.update(report.drained)
        if self.former is not None and len(self._drained) == self.setup.num_ranks:
            try:  # no rank copies any more
                self.former.engine.release_all()
            except Exception:
                log.exception("kvferry could not give its device blocks back")

    def finished(self, request: EngineRequest, block_ids: Sequence[Sequence[int]] = ()) -> None:
        """A request ends that has these blocks, by group."""
        serving = self.serving
        if serving is not None:
            try:
                serving.finished(request, block_ids)
            except Exception as error:
                self._trip("finished", error)

    def reset(self) -> bool:
        """Forget everything; returns whether blocks on disk stay forgotten whatever happens next.

        The ranks hear of it with the next step in any case. Out of service too there may be blocks
        on disk that the next life would find.
        """
        self._guarded("reset", lambda serving: serving.reset())
        if self._marks is None:  # before the first step, in engines without a handshake
            self._is_reset_due = True
            return bool(self.refusal) or not self.setup.config.disk
        try:
            reason = self._marks.write()
        except Exception as error:
            self._trip("reset", error)
            reason = self.guard.reason
        if reason:
            log.error("what is on disk may be found again if the server dies now: %s", reason)
        return not reason

    @property
    def has_work(self) -> bool:
        """Whether the engine should keep stepping although no request runs."""
        return self.serving.has_work if self.serving is not None else bool(self._unkept)

    def frees_soon(self) -> bool:
        """Whether copies under way will give the engine a block."""
        return bool(self._guarded("frees_soon", lambda serving: serving.frees_soon, False))

    def take_stats(self) -> dict[str, float] | None:
        """Figures since the last call, or once a second that kvferry is idle for good."""
        if self.serving is not None:
            figures: dict[str, float] | None = self._guarded(
                "take_stats", lambda serving: serving.take_stats()
            )
            return figures
        is_for_good = self.guard.broken or self.refusal
        if not is_for_good or time.monotonic() < self._reported_at + _STATS_SECONDS:
            return None
        self._reported_at = time.monotonic()
        return idle_figures("failed" if self.guard.broken else "refused")

    def take_events(self) -> Iterable[Any]:
        """Events for routers since the last call."""
        events = self.serving.reports.events if self.serving is not None else None
        return events.take() if events is not None else ()

    def close(self) -> None:
        for serving in (self.serving, self.former):
            if serving is not None:
                serving.close()
