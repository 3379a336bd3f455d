"""The connector in vLLM's scheduler: asks ours what to do, and says it in vLLM's words.

A request's life here::

    match ──> allocated ──────────────────> orders, every step it runs ──> finished
      │ hit     │ load: vLLM waits for it     │ store what this step         │ store the rest;
      │         │ until the ranks say so      │ computes, after it does      │ never waits
      └─ miss   └─ nothing to load            └─ preempted: match again
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.logger import init_logger

from kvferry.answers import MatchState, Settled
from kvferry.config import Config
from kvferry.scheduler import Scheduler
from kvferry.types import DEVICE, Plan, Rank, TransferId
from kvferry.vllm import translate
from kvferry.vllm.arrivals import Arrivals
from kvferry.vllm.guard import guarded
from kvferry.vllm.messages import StepOrders, StepReceipts
from kvferry.vllm.metrics import FerryStats
from kvferry.vllm.tables import table_of
from kvferry.vllm.tracked import Tracked

log = init_logger("vllm.kvferry")

MISS = (0, False)

_SETTLE_SECONDS = 0.25
"""How often deadlines are looked at where no receipts come."""


class SchedulerSide(Arrivals):
    """Owns what is known of vLLM's requests, and what vLLM was told about their loads.

    Decides nothing about blocks. Whatever goes wrong here, requests run: at worst without us.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, config: Config, support: translate.Support
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, config, support)
        self._loading: set[str] = set()
        self._ordered_loads: dict[tuple[int, int], str] = {}
        self._unsent: dict[str, tuple[int, ...]] = {}
        self._undone: dict[str, tuple[int, ...]] = {}
        self._drained: set[Rank] = set()
        self._settled = False
        self._settle_at = 0.0
        self._num_quiet = 0  # steps of one token each before there is anything to do
        self._quiet_orders = StepOrders(computes=True, is_quiet=True)

    # -- a request comes ------------------------------------------------------------------------

    @guarded(lambda: MISS)
    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after ``computed_tokens`` we can load; None to be asked again later."""
        scheduler = self.scheduler or self._open()
        if scheduler is None or getattr(request, "skip_reading_prefix_cache", False):
            return MISS
        is_new = request.request_id not in self._tracked
        if is_new and self._misses(scheduler, request, computed_tokens):
            return MISS
        tracked = self._track(scheduler, request)
        keys = tracked.chain.keys()
        tracked.computed_tokens, tracked.claimed_tokens = computed_tokens, 0
        match = scheduler.match(
            request.request_id,
            keys,
            computed_tokens=computed_tokens,
            max_tokens=self._claimable(request, computed_tokens),
            spare_tokens=self._volatile,
        )
        if match.state is MatchState.WAIT:
            return None, False
        claimed = match.to_load if match.state is MatchState.HIT else 0
        tracked.past_tokens = computed_tokens + claimed
        tracked.next_store = tracked.past_tokens + self._step + self._volatile
        if not claimed:
            return MISS
        tracked.claimed_tokens = claimed
        return claimed, True

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has given the request its blocks: order the load it was promised.

        What vLLM counts on and we cannot bring is told to it by way of the ranks, or the request
        would wait for ever.
        """
        self._num_quiet = 0
        try:
            if not num_external_tokens and self._note_blocks(request):
                return
            self._look_next()  # or one that comes back with a token to compute counts as not run
            if not self.guard.broken and self._load(request, blocks, num_external_tokens):
                return
        except Exception as error:
            self.guard.trip("allocated", error)
        if num_external_tokens:
            self._unsent.pop(request.request_id, None)
            self._undone[request.request_id] = self._external_blocks(
                request, blocks, num_external_tokens
            )

    def _load(self, request: Any, blocks: Any, num_external_tokens: int) -> bool:
        """True if nothing was to load, or its load is on its way."""
        scheduler = self.scheduler or self._open()
        if scheduler is None:
            return not num_external_tokens
        tracked = self._track(scheduler, request)
        claimed, tracked.claimed_tokens = tracked.claimed_tokens, 0
        tracked.has_run = False
        self._go_on(scheduler, tracked)
        if num_external_tokens != claimed:
            # Another connector serves the request, or vLLM wants less: change or drop the pins.
            scheduler.match(
                request.request_id,
                tracked.chain.keys(),
                computed_tokens=tracked.computed_tokens,
                max_tokens=tracked.computed_tokens + num_external_tokens,
            )
        if not num_external_tokens:
            return True
        tables = [table_of(ids) for ids in blocks.get_block_ids()]
        ordered = scheduler.load(request.request_id, tables)
        if not ordered:
            return False
        self._require_holds().take(ordered)
        self._loading.add(request.request_id)
        self._unsent[request.request_id] = self._external_blocks(
            request, blocks, num_external_tokens
        )
        for group, device_blocks in ordered:
            self._ordered_loads[group, int(device_blocks[0])] = request.request_id
        return True

    def _track(self, scheduler: Scheduler, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            self._begin(scheduler, request.request_id)
            tracked = self._tracked[request.request_id] = Tracked(request, self._namespace)
        self._tell(scheduler, request.request_id)
        self._note_preemption(tracked)
        return tracked

    def _note_preemption(self, tracked: Tracked) -> None:
        """vLLM may preempt and resume a request before it tells us: its own count tells earlier."""
        request = tracked.request
        if request.num_preemptions != tracked.preemptions and self.scheduler is not None:
            tracked.preemptions = request.num_preemptions
            tracked.next_store = 0
            self.scheduler.preempt(request.request_id)

    def _external_blocks(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> tuple[int, ...]:
        """The first group's blocks that a load is to fill: what vLLM is told if it fails."""
        tracked = self._tracked.get(request.request_id)
        first = tracked.computed_tokens if tracked is not None else 0
        ids = blocks.get_block_ids()[0]
        tokens = int(self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        return tuple(ids[first // tokens : -(-(first + num_external_tokens) // tokens)])

    # -- every step -----------------------------------------------------------------------------

    def orders(self, scheduler_output: Any) -> StepOrders:
        """This step's plan. Stores are of what this very step computes: the ranks order them so."""
        if self.holds is not None:
            self.holds.begin_step()
        if self._is_quiet(scheduler_output):
            return self._quiet_orders
        if not self._undone and self._is_calm(scheduler_output):
            self._let_run(scheduler_output)
            return self._quiet_orders
        computes = scheduler_output.total_num_scheduled_tokens > 0
        plan = self._plan(scheduler_output)
        loads = self._loads_of(plan)
        undone, self._undone = self._undone, {}
        unsent, self._unsent = self._unsent, {}
        if plan is None or loads is None:
            stuck = self.guard.broken and self.holds is not None and self.holds.num_held > 0
            return StepOrders(undone=undone | unsent, computes=computes, drain=stuck)
        epoch = self.scheduler.epoch if self.scheduler is not None else 0
        if self._quiet_orders.epoch != epoch:
            self._quiet_orders = StepOrders(computes=True, epoch=epoch, is_quiet=True)
        return StepOrders(plan, loads, undone, computes, epoch=epoch)

    def _is_quiet(self, scheduler_output: Any) -> bool:
        """Whether all this step does is to decode one more token of each running request.

        Most steps do no more, and must cost next to nothing. So only the step itself is looked at:
        whatever else would be news to us ends the quiet, or can wait for the next full look.
        """
        num_running = len(scheduler_output.num_scheduled_tokens)
        if (
            self._num_quiet <= 0
            or num_running == 0  # a step of its own kind: what waits has its moment
            or scheduler_output.total_num_scheduled_tokens != num_running
            or scheduler_output.scheduled_new_reqs
            or scheduler_output.preempted_req_ids
        ):
            return False
        self._num_quiet -= 1
        return True

    @guarded(lambda: None)
    def _loads_of(self, plan: Plan | None) -> dict[str, tuple[TransferId, ...]] | None:
        """Which requests wait for which of the plan's transfers."""
        loads: dict[str, tuple[TransferId, ...]] = {}
        if not plan or not self._ordered_loads:
            return loads
        for transfer in plan.transfers:
            if transfer.dst == DEVICE:
                waiting = self._ordered_loads.pop((transfer.group, int(transfer.dst_slots[0])))
                loads[waiting] = (*loads.get(waiting, ()), transfer.id)
        return loads

    @guarded(lambda: None)
    def _plan(self, scheduler_output: Any) -> Plan | None:
        scheduler = self.scheduler or self._open()
        if scheduler is None:
            return None
        is_due = time.monotonic() >= self._settle_at or scheduler.has_released
        if is_due and not self._settled:
            self._settle(())
        self._settled = False
        if self.sight is not None:
            self.sight.answer()
        self._tell_all(scheduler)
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._tracked:
                self._note_preemption(self._tracked[request_id])
        self._num_quiet = self._store_running(scheduler, scheduler_output.num_scheduled_tokens)
        self._store_leftovers(scheduler, is_idle=not scheduler_output.num_scheduled_tokens)
        if self._require_leftovers().holds_some:
            self._num_quiet = 0
        if self.config.store_mode == "lazy":
            self._offer(scheduler, scheduler_output)
        return scheduler.plan()

    # -- receipts -------------------------------------------------------------------------------

    def take(self, output: Any) -> None:
        """The ranks' answers of one step."""
        if output.finished_recving:
            self._loading.difference_update(output.finished_recving)
        report = output.kv_connector_worker_meta
        if report is not None and isinstance(report, StepReceipts):
            self._hear(report)
            self._drained.update(report.drained)
            if self.guard.broken and len(self._drained) == self._num_ranks:
                self._drop_holds()

    def _drop_holds(self) -> None:
        """We are out of service and no rank copies any more: give every block back."""
        try:
            if self.holds is not None:
                self.holds.drop_all()
        except Exception:
            log.exception("kvferry could not give its device blocks back")

    @guarded(lambda: None)
    def _hear(self, report: StepReceipts) -> None:
        self._num_quiet = 0
        self.meet_ranks(report.shapes)
        self._ready |= dict(report.ready)
        self._pinned |= dict(report.pinned)
        self._settle(report.receipts)
        self._settled = True
        if self.scheduler is not None and self.scheduler.epoch in report.stale:
            log.warning("The model's weights have changed: kvferry forgets what it has stored.")
            self._forget(self.scheduler)

    @guarded(lambda: None)
    def _settle(self, receipts: Sequence[Any]) -> None:
        scheduler = self.scheduler or self._open()
        if scheduler is None:
            return
        self._note_ready()
        self._settle_at = time.monotonic() + _SETTLE_SECONDS
        settled: Settled = scheduler.settle(receipts)
        self._require_holds().drop(settled.released)
        if self.sight is not None and settled.landed:
            self.sight.landed()
        for failure in settled.failed:
            log.warning(
                "request %s computes %d tokens it hoped to load: %s",
                failure.request_id,
                failure.num_tokens,
                failure.reason,
            )

    # -- a request goes -------------------------------------------------------------------------

    @guarded(lambda: None)
    def finished(self, request: Any) -> None:
        """Done or aborted. What it computed and nobody stored yet is stored; nobody waits.

        Not at once, see :mod:`kvferry.vllm.leftovers`. (A window's blocks are soon no longer its.)
        """
        self._num_quiet = 0
        scheduler = self.scheduler
        if scheduler is not None:
            self._tell(scheduler, request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or scheduler is None:
            return
        if request.request_id in self._loading or not tracked.has_run:
            # What vLLM counts as computed may be what a load was to bring, ours or another's.
            scheduler.finish(request.request_id)
        elif self._stores_late:
            self._leave(scheduler, tracked)
        else:
            self._store(scheduler, tracked, request.num_computed_tokens)
            scheduler.finish(request.request_id)

    @guarded(lambda: True)
    def reset(self) -> bool:
        """Forget everything: the cache was reset, or the weights have changed."""
        self._num_quiet = 0
        if self.scheduler is not None:
            self._forget(self.scheduler)
        return True

    @property
    def has_work(self) -> bool:
        """Whether the engine should keep stepping, so that copies under way can be told."""
        if self.scheduler is None or self.guard.broken:
            return bool(self._undone)
        return bool(self.leftovers or self.scheduler.num_queued) or self._awaits_copies

    @guarded(lambda: False)
    def frees_soon(self) -> bool:
        """Whether waiting for copies under way would give vLLM a block: cheaper than preempting."""
        holds, leftovers = self.holds, self.leftovers
        if leftovers:
            leftovers.is_wanted = True
        is_on_its_way = bool(leftovers) or self._awaits_copies
        return holds is not None and is_on_its_way and holds.keeps_free_blocks

    @property
    def _awaits_copies(self) -> bool:
        return self.scheduler is not None and self.scheduler.num_awaited > 0

    @guarded(lambda: None)
    def take_stats(self) -> FerryStats | None:
        if self._num_quiet > 0 or self.sight is None:
            return None
        will_rest = not self._tracked and not self.has_work  # then for long there is no other step
        if not (will_rest or self.sight.is_due):
            return None
        return self.sight.take_stats(num_held=self._require_holds().num_held)

    @guarded(lambda: ())
    def take_events(self) -> Iterable[Any]:
        return self.sight.take_events() if self.sight is not None else ()

    def close(self) -> None:
        """Each part though another cannot: vLLM is on its way out and shall get there."""
        for part in (self.sight, self.scheduler):
            try:
                if part is not None:
                    part.close()
            except Exception:
                log.exception("kvferry did not close its %s", type(part).__name__)
