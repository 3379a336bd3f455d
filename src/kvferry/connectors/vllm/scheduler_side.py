"""The connector in vLLM's scheduler: waits until it can serve, serves, or says why it does not.

::

    made ──> vLLM binds its pool, ranks are heard ──> serving ──an exception of ours──> broken:
      └──> refused: idle                                           drains, holds nothing
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.config import Config
from kvferry.connectors.vllm.blocks import VllmBlocks
from kvferry.connectors.vllm.control import DiskMarks
from kvferry.connectors.vllm.logs import Guard
from kvferry.connectors.vllm.messages import RankShape, StepOrders, StepReceipts
from kvferry.connectors.vllm.ranks import disagreement
from kvferry.connectors.vllm.reports import idle_figures
from kvferry.connectors.vllm.serving import MISS, Serving
from kvferry.connectors.vllm.translate import Setup
from kvferry.core.quantities import rounded_size
from kvferry.settings.tiers import show_tiers
from kvferry.types import Rank

log = logging.getLogger("vllm.kvferry")

_STATS_SECONDS = 1.0


class SchedulerSide:
    """Owns what is there to serve with, and lets nothing of ours stop vLLM.

    ``serving`` is None until all is known, and again once something raised: requests run without
    us then.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.guard = Guard("scheduler")
        self.refusal = setup.support.refusal
        self.serving: Serving | None = None
        self.former: Serving | None = None
        """What served until a mistake of ours; its blocks are held until no rank copies."""
        self._block_pool: Any = None
        self._manager: Any = None
        self._shapes: dict[int, RankShape] = {}
        self._undone: dict[str, tuple[int, ...]] = {}
        self._marks: DiskMarks | None = None
        self._is_reset_due = False
        self._drained: set[Rank] = set()
        self._told_at = 0.0

    # -- until it can serve -----------------------------------------------------------------------

    def bind_block_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool
        self._begin()

    def bind_manager(self, manager: Any) -> None:
        self._manager = manager
        self.bind_block_pool(manager.block_pool)

    def meet_ranks(self, shapes: Sequence[RankShape]) -> None:
        """What the ranks found when they saw their KV tensors."""
        new = [shape for shape in shapes if shape.rank not in self._shapes]
        self._shapes |= {shape.rank: shape for shape in new}
        refusals = [f"rank {shape.rank}: {shape.refusal}" for shape in new if shape.refusal]
        self.refusal = self.refusal or "; ".join(refusals)
        if new and len(self._shapes) == self.setup.num_ranks:
            self._marks = DiskMarks(self._shapes.values(), self.setup.config.disk_deadline)
            self.refusal = self.refusal or disagreement(self._shapes.values())
            self._begin()
            log.info(self.banner())

    def _begin(self) -> None:
        """Serve, once vLLM has bound its pool and every rank has been heard."""
        met_all = len(self._shapes) == self.setup.num_ranks
        is_ready = met_all and self._block_pool is not None and not self.guard.broken
        if self.serving is not None or self.refusal or not is_ready:
            return
        try:
            blocks = VllmBlocks(self.setup.groups, self._block_pool, self._manager)
            self.serving = Serving(self.setup, self._shapes, blocks)
            if self._is_reset_due:
                self.serving.reset()
        except Exception as error:
            self._trip("start", error)
        # What the tiers still have may be hundreds of megabytes: it is known by now.
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
        return (
            f"kvferry is in service: {scheduler.pool.num_slots} blocks ({host}) of host memory "
            f"{shared} {self.setup.num_ranks} rank(s), {len(scheduler.groups)} group(s) [{kinds}], "
            f"a block is {shape.layout}, stores {config.store_mode}, "
            f"copy path {config.copy_path}, loads {config.load_policy}, policy {config.policy}"
            f"{_below(config, scheduler.stats().restored)}"
        )

    @property
    def idle_reason(self) -> str:
        """Why nothing is served; empty where something is."""
        if self.serving is not None:
            return ""
        if self.refusal or self.guard.broken:
            return self.refusal or self.guard.reason
        if len(self._shapes) < self.setup.num_ranks:
            return f"{len(self._shapes)} of {self.setup.num_ranks} ranks were heard"
        return "vLLM has not bound its block pool"

    def _trip(self, where: str, error: Exception) -> None:
        """An exception of ours: vLLM goes on without us, and what it was promised it is told of."""
        self.guard.trip(where, error)
        if self.serving is not None:
            self._undone |= self.serving.unkept
            self.former, self.serving = self.serving, None

    # -- vLLM's hooks -----------------------------------------------------------------------------

    def expect(self, request: Any) -> None:
        if self.serving is not None and self.setup.config.all_tiers:
            try:
                self.serving.expect(request)
            except Exception as error:
                self._trip("expect", error)

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        serving = self.serving
        if serving is None:
            return MISS
        try:
            return serving.match(request, computed_tokens)
        except Exception as error:
            self._trip("match", error)
            return MISS

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        serving = self.serving
        if serving is not None:
            try:
                serving.allocated(request, blocks, num_external_tokens)
                return
            except Exception as error:
                self._trip("allocated", error)
        if num_external_tokens:  # vLLM would wait for ever
            ids, name = blocks.get_block_ids()[0], request.request_id
            told = tuple(ids)
            if self.former is not None:
                told = self.former.told_blocks(name, ids, num_external_tokens)
            self._undone[name] = told

    def orders(self, step: Any) -> StepOrders:
        serving = self.serving
        if serving is not None and not self._undone:
            try:
                return serving.orders(step)
            except Exception as error:
                self._trip("orders", error)
        undone, self._undone = self._undone, {}
        is_stuck = self.former is not None and self.former.blocks.num_held > 0
        computes = step.total_num_scheduled_tokens > 0
        return StepOrders(undone=undone, computes=computes, drain=is_stuck)

    def take(self, output: Any) -> None:
        """The ranks' answers of one step."""
        report = output.kv_connector_worker_meta
        if report is None or not isinstance(report, StepReceipts):
            return
        if report.shapes:
            self.meet_ranks(report.shapes)
        serving = self.serving
        if serving is not None:
            try:
                if report.ready:
                    serving.note_ready(report.ready)
                    serving.pinned |= dict(report.pinned)
                for rank, tier, figures in report.disks:
                    serving.disks[rank, tier] = figures
                if report.health:
                    serving.note_health(report.health)
                serving.hear(report.receipts, report.stale)
            except Exception as error:
                self._trip("take", error)
        self._drained.update(report.drained)
        if self.former is not None and len(self._drained) == self.setup.num_ranks:
            self._drop_holds(self.former.blocks)

    def _drop_holds(self, blocks: VllmBlocks) -> None:
        """We are out of service and no rank copies any more: give every block back."""
        try:
            blocks.drop_all()
        except Exception:
            log.exception("kvferry could not give its device blocks back")

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]] = ()) -> None:
        if self.serving is not None:
            try:
                self.serving.finished(request, block_ids)
            except Exception as error:
                self._trip("finished", error)

    def reset(self) -> bool:
        """Forget everything; whether what is on disk stays forgotten, whatever happens next.

        The ranks hear of it with the next step in any case. Out of service too, there may be blocks
        on disk that the next life would find.
        """
        if self.serving is not None:
            try:
                self.serving.reset()
            except Exception as error:
                self._trip("reset", error)
        if self._marks is None:  # before the first step, where vLLM lets ranks tell us no sooner
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
        if self.serving is None:
            return bool(self._undone)
        return self.serving.has_work

    def frees_soon(self) -> bool:
        if self.serving is None:
            return False
        try:
            return self.serving.frees_soon
        except Exception as error:
            self._trip("frees_soon", error)
            return False

    def take_stats(self) -> dict[str, float] | None:
        if self.serving is None:
            return self._idle_figures()
        try:
            return self.serving.take_stats()
        except Exception as error:
            self._trip("take_stats", error)
            return None

    def _idle_figures(self) -> dict[str, float] | None:
        """That nothing is served, for good: told once a second."""
        is_for_good = self.guard.broken or self.refusal
        if not is_for_good or time.monotonic() < self._told_at + _STATS_SECONDS:
            return None
        self._told_at = time.monotonic()
        return idle_figures("failed" if self.guard.broken else "refused")

    def take_events(self) -> Iterable[Any]:
        return self.serving.reports.take_events() if self.serving is not None else ()

    def close(self) -> None:
        for serving in (self.serving, self.former):
            if serving is not None:
                serving.close()


def _below(config: Config, restored: Mapping[str, int]) -> str:
    """The tiers, for the log, and what they had from an earlier life."""
    if not config.all_tiers:
        return ""
    found = [f"{count:,} blocks found on {name}" for name, count in restored.items() if count]
    words = f"; below it, {config.tier_write}: {show_tiers(config.all_tiers)}"
    return ", ".join((words, *found))
