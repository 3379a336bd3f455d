"""The scheduler side: waits for all ranks, then serves or says why it is idle.

::

    made ──> engine bound, ranks met ──> serving ──an exception of ours──> broken: drains,
      └──> refused: idle                                                   holds nothing
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kvferry.connectors.common.contract import EngineAdapter, EngineRequest, SessionSetup
from kvferry.connectors.common.messages import (
    Guard,
    LoadOrder,
    RankShape,
    StepOrders,
    StepReceipts,
)
from kvferry.connectors.common.ranks import DiskResets, disagreement
from kvferry.connectors.common.reports import idle_figures
from kvferry.connectors.common.serving import Serving
from kvferry.core.identity import new_epoch
from kvferry.core.quantities import rounded_size
from kvferry.settings.tiers import show_tiers
from kvferry.types import Rank

log = logging.getLogger(__name__)

_STATS_SECONDS = 1.0


def _hook(name: str, default: Any) -> Any:
    """Return a session method that calls :class:`Serving`'s; ``default`` if idle or it raises."""

    def call(self: SchedulerSession, *arguments: Any) -> Any:
        serving = self.serving
        if serving is None:
            return default
        try:
            return getattr(serving, name)(*arguments)
        except Exception as error:
            self._trip(name, error)
            return default

    return call


class SchedulerSession:
    """Owns the :class:`Serving` object, and lets no exception of kvferry stop the engine.

    ``serving`` is None until all ranks have reported, and again after an exception: requests run
    without kvferry then. ``former`` served until the exception; it holds its device blocks until no
    rank copies.
    """

    def __init__(self, setup: SessionSetup) -> None:
        self.setup = setup
        self.guard = Guard("scheduler")
        self.refusal = setup.refusal
        self.serving: Serving | None = None
        self.former: Serving | None = None
        self._make_engine: Callable[[], EngineAdapter] | None = None
        self._shapes: dict[int, RankShape] = {}
        self._unkept: dict[str, LoadOrder] = {}
        self._resets: DiskResets | None = None
        self._is_reset_due = False
        self._drained: set[Rank] = set()
        self._reported_at = 0.0

    def bind(self, make_engine: Callable[[], EngineAdapter]) -> None:
        """Note that the engine has its device blocks; the last call before serving counts."""
        self._make_engine = make_engine
        self._begin()

    def meet_ranks(self, shapes: Sequence[RankShape]) -> None:
        """Take the ranks' shapes, known once they have KV tensors; ignores repeated ranks."""
        new = [shape for shape in shapes if shape.rank not in self._shapes]
        self._shapes |= {shape.rank: shape for shape in new}
        refusals = [f"rank {shape.rank}: {shape.refusal}" for shape in new if shape.refusal]
        self.refusal = self.refusal or "; ".join(refusals)
        if new and self._has_met_all:
            self._resets = DiskResets(self._shapes.values(), self.setup.config.disk_deadline)
            self.refusal = self.refusal or disagreement(self._shapes.values())
            self._begin()
            level = logging.INFO if self.serving is not None else logging.WARNING
            logging.getLogger(self.setup.log_name).log(level, self.banner())

    @property
    def _has_met_all(self) -> bool:
        return len(self._shapes) == self.setup.num_ranks

    def _begin(self) -> None:
        """Start serving once the engine is bound and every rank has reported."""
        if self._make_engine is None or not self._has_met_all or self.serving is not None:
            return
        if self.guard.reason or self.refusal:
            return
        try:
            self.serving = Serving(self.setup, self._shapes, self._make_engine())
            if self._is_reset_due:
                self.serving.reset()
        except Exception as error:
            self._trip("start", error)
        # Lists of the tiers' blocks may take hundreds of megabytes, and serving has used them.
        self._shapes = {rank: shape.without_blocks() for rank, shape in self._shapes.items()}

    def banner(self) -> str:
        """Return one line for the log: what is in service, or why kvferry is idle."""
        serving, config = self.serving, self.setup.config
        if serving is None:
            return f"kvferry is idle: {self.idle_reason}"
        scheduler, shape = serving.scheduler, self._shapes[0]
        kinds = ", ".join(dict.fromkeys(type(group).__name__ for group in scheduler.groups))
        shared = "shared by" if shape.is_shared else "on each of"
        host = rounded_size(scheduler.pool.num_slots * shape.slot_bytes)
        words = (
            f"kvferry is in service: {scheduler.pool.num_slots} blocks ({host}) of host memory "
            f"{shared} {self.setup.num_ranks} rank(s), {len(scheduler.groups)} group(s) [{kinds}], "
            f"a block is {shape.layout}, "
            f"loads {config.load_policy}, policy {config.policy}"
        )
        if config.all_tiers:
            words += f"; below it, {config.tier_write}: {show_tiers(config.all_tiers)}"
            found = [(name, count) for name, count in scheduler.stats().restored.items() if count]
            words += "".join(f", {count:,} blocks found on {name}" for name, count in found)
        return words

    @property
    def idle_reason(self) -> str:
        """Why kvferry is idle; empty while it serves."""
        if self.serving is not None:
            return ""
        if self.refusal or self.guard.reason:
            return self.refusal or self.guard.reason
        if not self._has_met_all:
            return f"{len(self._shapes)} of {self.setup.num_ranks} ranks were heard"
        return "the engine has not bound its block pool"

    def _trip(self, where: str, error: Exception) -> None:
        """Stop serving after an exception of ours, and end every load that the engine expects."""
        self.guard.trip(where, error)
        if self.serving is not None:
            self._unkept |= self.serving.unkept
            self.former, self.serving = self.serving, None

    # -- the engine's hooks -----------------------------------------------------------------------

    expect = _hook("expect", None)
    match = _hook("match", 0)
    finished = _hook("finished", None)
    give_back = _hook("give_back", None)
    hit_sources = _hook("hit_sources", {})
    frees_soon = _hook("frees_soon", False)
    _reset = _hook("reset", None)
    _take_stats = _hook("take_stats", None)

    def allocated(
        self,
        request: EngineRequest,
        tables: Callable[[], Sequence[Sequence[int]]],
        num_external_tokens: int,
    ) -> None:
        """Order a request's load, now that it has device blocks: ``tables()``, by group."""
        serving = self.serving
        if serving is not None:
            try:
                serving.allocated(request, tables, num_external_tokens)
                return
            except Exception as error:
                self._trip("allocated", error)
        if num_external_tokens:  # report the load as lost, or the engine would wait for ever
            name, blocks = request.request_id, tables()[0]
            if self.former is not None:
                blocks = self.former.promised_blocks(name, blocks, num_external_tokens)
            self._unkept[name] = LoadOrder((), tuple(blocks))

    def orders(
        self,
        scheduled: Mapping[str, int],
        num_tokens: int,
        *,
        new: bool,
        preempted: Collection[str],
    ) -> StepOrders:
        """Return this step's orders for every rank; ``new``: some requests run the first time."""
        serving = self.serving
        if serving is not None and not self._unkept:
            try:
                return serving.orders(scheduled, num_tokens, new=new, preempted=preempted)
            except Exception as error:
                self._trip("orders", error)
        lost, self._unkept = self._unkept, {}
        holds = self.former is not None and self.former.engine.num_held > 0
        return StepOrders(loads=lost, computes=num_tokens > 0, drain=holds)

    def take(self, report: StepReceipts) -> None:
        """Process the ranks' receipts of one step."""
        if report.shapes:
            self.meet_ranks(report.shapes)
        serving = self.serving
        if serving is not None:
            try:
                serving.take(report)
            except Exception as error:
                self._trip("take", error)
        if self._resets is not None:
            for health in report.health:
                self._resets.note(health)
        self._drained.update(report.drained)
        if self.former is not None and len(self._drained) == self.setup.num_ranks:
            try:  # no rank copies any more
                self.former.engine.release_all()
            except Exception:
                log.exception("kvferry could not give its device blocks back")

    def reset(self) -> bool:
        """Forget every block; return whether blocks on disk stay forgotten even if the server dies.

        The ranks learn of the reset with the next step in any case. Blocks on disk are reset also
        while kvferry is out of service, because the next server would find them.
        """
        self._reset()
        if self._resets is None:  # before the first step, in engines without a handshake
            self._is_reset_due = True
            return bool(self.refusal) or not self.setup.config.disk
        try:
            number = self.serving.scheduler.epoch if self.serving is not None else new_epoch(0)
            reason = self._resets.write(number)
        except Exception as error:
            self._trip("reset", error)
            reason = self.guard.reason
        if reason:
            log.error("what is on disk may be found again if the server dies now: %s", reason)
        return not reason

    def sleep(self) -> bool:
        """Handle an engine's sleep, in which it empties its cache and gives its memory back.

        Stored blocks stay if every rank can notice changed weights; else they are forgotten.
        """
        is_safe = self.serving is not None and all(s.sees_weights for s in self._shapes.values())
        return is_safe or self.reset()

    @property
    def has_work(self) -> bool:
        """Whether the engine should keep stepping although no request runs."""
        return self.serving.has_work if self.serving is not None else bool(self._unkept)

    def take_stats(self) -> dict[str, float] | None:
        """Return the figures since the last call; if idle for good, say so once a second."""
        if self.serving is not None:
            return self._take_stats()
        is_for_good = self.guard.reason or self.refusal
        if not is_for_good or time.monotonic() < self._reported_at + _STATS_SECONDS:
            return None
        self._reported_at = time.monotonic()
        return idle_figures("failed" if self.guard.reason else "refused", self.idle_reason)

    def take_events(self) -> Iterable[Any]:
        """Return the events for routers since the last call."""
        events = self.serving.events if self.serving is not None else None
        return events.take() if events is not None else ()

    def close(self) -> None:
        for serving in (self.serving, self.former):
            if serving is not None:
                serving.close()
