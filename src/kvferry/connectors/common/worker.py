"""The connector in an engine's worker: carries out plans and reports their receipts.

::

    begin ── loads ──┐                    ┌── receipts ──> the scheduler side
                     ├─> our worker ─────>┤
    after_forward ── stores               └── requests ──> the engine: loaded, or failed

A store must be queued after the forward pass that writes its blocks; a load may start before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvferry.config import Config
from kvferry.connectors.common.loads import AwaitedLoad, FinishedLoads
from kvferry.connectors.common.messages import (
    NO_PLAN,
    Guard,
    LoadOrder,
    RankShape,
    StepOrders,
    StepReceipts,
)
from kvferry.connectors.common.overlap import LayerwiseLoads
from kvferry.connectors.common.ranks import (
    Broadcast,
    RankPlace,
    movers_of,
    open_rank,
    shape_of,
)
from kvferry.connectors.common.weights import Freshness, Weights
from kvferry.errors import LayoutError
from kvferry.rank import Contents, RankMemory
from kvferry.tiers.disk.protocol import DiskFigures
from kvferry.transfer.layout import GroupLayout
from kvferry.types import (
    DEVICE,
    HOST,
    Health,
    Outcome,
    Plan,
    Question,
    Rank,
    Receipt,
    TierName,
    Transfer,
    TransferId,
)
from kvferry.worker import Worker

log = logging.getLogger(__name__)

_CHECK_SECONDS = 0.05
"""Least seconds between weight checks for held writes; each costs the model's thread 0.2 ms."""

_DISK_SECONDS = 1.0

_STALE = "the model's weights have changed"

_IDLE_SECONDS = 0.5e-3
"""Seconds that a step without a forward pass may wait for a load. An engine with nothing to compute
steps as fast as it can, and would keep the interpreter from the thread that queues the copies."""
_NAP_SECONDS = 2e-5


@dataclass(frozen=True)
class KvCache:
    """The KV cache on this rank: a layout per group, the device, and the order of the layers.

    ``tensors`` keeps the memory alive, because the copy engine copies by address.
    """

    layouts: Sequence[GroupLayout]
    device: Any
    layers: Sequence[str]
    tensors: Any


class WriteFence:
    """Holds back writes to tiers that outlive the server, until the weights have been checked."""

    def __init__(self, names: frozenset[TierName]) -> None:
        self._names = names
        self._held: list[Transfer] = []
        self._marked: list[Transfer] = []
        self._check_at = 0.0
        self.epoch = 0
        """The epoch of the held writes; once another epoch begins, they are stale."""

    @property
    def holds(self) -> bool:
        return bool(self._held or self._marked)

    def hold(self, transfers: list[Transfer]) -> list[Transfer]:
        """Hold the transfers to tiers that outlive the server; return the others."""
        self._held += [transfer for transfer in transfers if transfer.dst in self._names]
        return [transfer for transfer in transfers if transfer.dst not in self._names]

    def is_due(self) -> bool:
        """Whether it is time to check the weights for the held writes."""
        return bool(self._held) and time.monotonic() >= self._check_at

    def note_mark(self) -> None:
        """Note that digests are taken of the weights as they are now, which cover held writes."""
        if self._held:
            self._marked += self._held
            self._held = []
            self._check_at = time.monotonic() + _CHECK_SECONDS

    def take_marked(self) -> tuple[Transfer, ...]:
        """Remove and return the writes that the last digests cover."""
        marked, self._marked = tuple(self._marked), []
        return marked

    def take_all(self) -> tuple[Transfer, ...]:
        self.note_mark()
        return self.take_marked()


class WorkerSession:
    """Owns this rank's worker and host memory; knows which request waits for which transfer.

    Call it on the engine's worker thread only. It raises nothing: a broken rank fails its orders.
    """

    def __init__(
        self,
        *,
        place: RankPlace,
        config: Config,
        contents: Contents,
        find_weights: Callable[[Any], Weights | None] = lambda device: None,
        broadcast: Broadcast | None = None,
        refusal: str = "",
    ) -> None:
        """``find_weights`` gets the KV cache's device; ``broadcast`` sends to all ranks.

        ``refusal`` says why the scheduler side will be idle; then this rank takes no memory.
        """
        self.guard = Guard(f"rank {place.rank}")
        self.rank = place.rank
        self.shape = RankShape(self.rank, refusal=refusal or "the engine has no KV cache yet")
        self._is_idle = bool(refusal)
        self._config = config
        self._place = place
        self._contents = contents
        self._find_weights = find_weights
        self._broadcast = broadcast
        self._cache: KvCache | None = None
        self._find_cache: Callable[[], KvCache] | None = None
        self._memory: RankMemory | None = None
        self._worker: Worker | None = None
        self._reported_ready = 0
        self._is_grown = True  # all host memory is ready and reported
        self._disks: tuple[tuple[Rank, str, DiskFigures], ...] = ()
        self._disks_at = 0.0
        self._has_sent_shape = self._drained = False
        self._later: Plan = NO_PLAN
        self._computes = False
        self._loads: list[AwaitedLoad] = []
        self._num_awaited = 0  # receipts that are still to come
        self._moves: set[TransferId] = set()  # orders for lower tiers under way
        self._receipts: list[Receipt] = []
        self._health: list[Health] = []
        self.finished = FinishedLoads()
        self.is_busy = True
        """Whether an earlier step left work or reports, so that no step can be skipped."""
        self._freshness = Freshness()
        names = frozenset(TierName(str(spec.name)) for spec in config.all_tiers if spec.persists)
        self._fence = WriteFence(names) if names else None
        self._keeps = True  # lasting tiers keep this epoch's blocks for the next server
        self.layerwise: LayerwiseLoads | None = None
        """Set if the model may read loads before they have landed."""

    # -- start and end --------------------------------------------------------------------------

    def register(self, find_cache: Callable[[], KvCache]) -> None:
        """Open host memory, tiers and a worker for the KV cache that ``find_cache`` describes."""
        if self._is_idle:
            return
        self._find_cache = find_cache
        try:
            self._register(find_cache())
        except Exception as error:
            self.guard.trip("register", error)
            self.shape = RankShape(self.rank, refusal=self.guard.reason)

    def _register(self, cache: KvCache) -> None:
        self._cache = cache
        weights = self._find_weights(cache.device)
        contents, first = self._contents, None
        if self._fence is not None and weights is not None:
            contents = replace(contents, weights=weights.digests_of_all())
            first = weights.begin().result()
        self._freshness = Freshness(weights, first)
        memory = self._memory = open_rank(
            cache.device, cache.layouts, self._config, self._place, contents, self._broadcast
        )
        self._is_grown = False
        mover, tiers = movers_of(memory, self._place)
        if self._config.overlap_loads != "off" and len(cache.layouts) == 1:
            self.layerwise = LayerwiseLoads(
                memory.engine, cache.layers, cache.layouts[0], land=self._drain
            )
        self._worker = Worker(
            {(DEVICE, HOST): mover, (HOST, DEVICE): mover}, tiers=tiers, rank=self.rank
        )
        shape = shape_of(memory, cache.layouts, self._place)
        self.shape = replace(shape, sees_weights=weights is not None)

    def unregister(self) -> None:
        """Finish all copies before the KV tensors, and maybe the weights, lose their memory."""
        self._drain()
        try:
            self._check_fence()
            self._release_fence()
            self._freshness.fall_asleep()
        except Exception as error:
            self.guard.trip("unregister", error)

    def restore(self) -> None:
        """Resume after :meth:`unregister`; go out of service if the tensors' addresses changed."""
        if self._cache is None or self._find_cache is None:
            return
        try:
            now = self._find_cache().layouts
            for old, new in zip(self._cache.layouts, now, strict=True):
                if not np.array_equal(old.bases, new.bases):
                    raise LayoutError("the KV cache is at other addresses than before the sleep")
        except Exception as error:
            self.guard.trip("restore", error)

    def note_started(self) -> None:
        """Note that the engine has started: host memory need not yield to its warm-up any more."""
        if self._memory is not None:
            self._memory.activity.note_started()

    def introduce(self) -> RankShape:
        """Return this rank's shape, once; without this call the first step's receipts have it."""
        shape, self.shape = self.shape, self.shape.without_blocks()  # it may be large: sent once
        return shape

    def close(self) -> None:
        parts = [part for part in (self._worker, self._memory) if part is not None]
        for end in (self._check_fence, self._release_fence, *(part.close for part in parts)):
            try:
                end()
            except Exception:
                log.exception("kvferry did not close: %s", end.__qualname__)

    # -- a step ---------------------------------------------------------------------------------

    def begin(self, orders: StepOrders) -> None:
        """Start the step's loads; also its stores if there is no forward pass to wait for."""
        if orders.is_quiet and not self.is_busy:
            return
        self.is_busy = True
        try:
            self._begin(orders)
        except Exception as error:
            self.guard.trip("begin", error)
            self._give_up(orders)

    def _give_up(self, orders: StepOrders) -> None:
        """Fail everything ordered and under way, so that nothing waits for this broken rank."""
        self._drain()
        for load in self._loads:
            if not load.is_told:  # loads reported early have landed by now
                load.lose()
        self._end_loads()
        # The fence may hold some of this step's orders already.
        lost: list[Transfer | Question] = [*orders.plan.transfers, *orders.plan.questions]
        if self._fence is not None:
            lost += self._fence.take_all()
        self._refuse({order.id: order for order in lost}.values(), self.guard.reason)

    def _begin(self, orders: StepOrders) -> None:
        self._computes = orders.computes
        for request_id, order in orders.loads.items():
            self._await(request_id, order, orders)
        if self._later.transfers:
            self._flush()
        if self._fence is not None:
            self._release_fence(orders.epoch)
            self._fence.epoch = orders.epoch
        if orders.epoch != self._freshness.epoch:
            self._freshness.enter(orders.epoch)
            self._keeps = True
        plan = orders.plan
        if plan.transfers or plan.questions or plan.forget or orders.loads:
            self._carry_out(orders)
        if orders.computes:
            if self._memory is not None and not self._is_grown:
                self._memory.activity.note_step()
            if self._fence is not None and self._fence.is_due():
                self._check_fence()
        else:
            if self._later.transfers:
                self._flush()
            if self._fence is not None:
                self._check_fence()
                self._release_fence(orders.epoch)
        if orders.drain:
            self._drain()
            self._drained = True

    def _carry_out(self, orders: StepOrders) -> None:
        plan = orders.plan
        stores: list[Transfer] = []
        others: list[Transfer] = []
        for transfer in plan.transfers:
            (stores if transfer.src == DEVICE else others).append(transfer)
        if self.shape.tiers:
            self._moves.update([order.id for order in others if order.dst != DEVICE])
            self._moves.update([question.id for question in plan.questions])
        if self._fence is not None:
            others = self._fence.hold(others)
        if orders.loads and self._freshness.is_stale(orders.epoch):
            self._refuse(others, _STALE)
            others = []
        if others or plan.questions or plan.forget:
            self._execute(replace(plan, transfers=tuple(others)))
        if orders.loads:  # their blocks must match the weights as they are now
            self._freshness.mark()
            if self._fence is not None:
                self._fence.note_mark()
        self._later = Plan(plan.step, tuple(stores))

    def _await(self, request_id: str, order: LoadOrder, orders: StepOrders) -> None:
        """Track a load, or a further piece of one, to report its end to the engine."""
        for load in self._loads:
            if load.request_id == request_id and not load.is_last:
                break
        else:
            load = AwaitedLoad(request_id, orders.epoch)
            self._loads.append(load)
        load.note(order, orders.plan.transfers, may_be_early=self.layerwise is not None)

    def after_forward(self) -> None:
        """Start the step's stores: the forward pass that writes their blocks is queued."""
        if self.layerwise is not None and self._computes:
            self.layerwise.end_forward()
        if self._later.transfers:
            self._flush()

    def _flush(self) -> None:
        later, self._later = self._later, NO_PLAN
        self._execute(later)

    def _execute(self, plan: Plan) -> None:
        orders: list[Transfer | Question] = [*plan.transfers, *plan.questions]
        if self._worker is None or self.guard.reason:
            self._refuse(orders, self.guard.reason or self.shape.refusal)
            if plan.forget and self._worker is not None:  # lasting tiers must still be reset
                self._worker.execute(replace(plan, transfers=(), questions=()))
            return
        self._num_awaited += len(orders)
        if self._memory is not None and not self._is_grown:
            self._memory.activity.note_plan(plan)
        try:
            self._worker.execute(plan)
        except Exception as error:
            self.guard.trip("execute", error)
            self._refuse(orders, self.guard.reason)

    def _check_fence(self) -> None:
        if self._fence is not None and self._fence.holds:
            self._freshness.mark()
            self._fence.note_mark()

    def _release_fence(self, epoch: int | None = None) -> None:
        """Start the held writes that are checked; fail them if the weights have changed."""
        if self._fence is None:
            return
        held = self._fence.epoch
        if epoch is not None and epoch != held:
            self._refuse(self._fence.take_all(), _STALE)
            return
        checked = self._fence.take_marked()
        if checked and self._freshness.is_stale(held):
            self._refuse(checked, _STALE)
        elif checked:
            if held and self._keeps and not self._freshness.is_first():
                # The next server loads the weights that the namespace names, not these.
                self._keeps = False
                for tier in self._memory.tiers.values() if self._memory is not None else ():
                    tier.keep_nothing()
            self._execute(Plan(0, checked))

    def _refuse(self, orders: Iterable[Transfer | Question], reason: str) -> None:
        """Fail each order with a receipt, or the scheduler would wait for it for ever."""
        for order in orders:
            self._take(Receipt(order.id, self.rank, Outcome.FAILED, reason))

    # -- what happened --------------------------------------------------------------------------

    def poll(self) -> None:
        """Process receipts; in a step without a forward pass, wait briefly for loads to end."""
        if not (self._num_awaited or self._freshness.is_marked or self.shape.tiers or self._loads):
            return
        self._poll()
        end = time.monotonic() + _IDLE_SECONDS
        while self._loads or (self._moves and not self._receipts):
            is_heard = self._receipts and not any(load.is_last for load in self._loads)
            if self._computes or self.finished.arrived or is_heard or time.monotonic() >= end:
                return
            time.sleep(_NAP_SECONDS)
            self._poll()

    def _poll(self) -> None:
        try:
            if self._freshness.is_marked:
                self._freshness.look()
            if self._worker is not None:
                for receipt in self._worker.poll():
                    self._num_awaited -= 1
                    self._take(receipt)
                if self.shape.tiers:
                    self._health += self._worker.health()
            if self._loads:
                self._end_loads()
            if self.layerwise is not None and self._loads:
                self._tell_early(self.layerwise)
        except Exception as error:
            self.guard.trip("poll", error)
            self._give_up(StepOrders())

    def _end_loads(self) -> None:
        """Report loads to the engine that have no transfer under way any more."""
        ended = [load for load in self._loads if load.has_ended]
        for load in ended:
            self._loads.remove(load)
            if load.is_told:
                if load.lost:  # only if the device is lost, and all that was computed with it
                    log.error("a load failed after it was on its way: %s", load.reason)
                continue
            if self._freshness.is_stale(load.epoch):
                load.lose()  # some blocks landed before the weights changed
            self.finished.end(load.request_id, load.lost)

    def _tell_early(self, layerwise: LayerwiseLoads) -> None:
        """Report a load that has not landed yet and cannot fail any more, so its request runs."""
        load, freshness = self._loads[0], self._freshness
        if not layerwise.may_tell(load, computes=self._computes):
            return
        if freshness.is_known and not freshness.is_stale(load.epoch):
            layerwise.tell(load)
            self.finished.arrived.add(load.request_id)

    def _drain(self) -> None:
        """Wait for all copies from and to the device, and take their receipts."""
        if self._later.transfers:
            self._flush()
        if self._worker is not None:
            try:
                for receipt in self._worker.drain():
                    self._num_awaited -= 1
                    self._take(receipt)
            except Exception as error:
                self.guard.trip("drain", error)

    def _take(self, receipt: Receipt) -> None:
        for load in self._loads:
            blocks = load.waiting.pop(receipt.transfer_id, None)
            if blocks is None:
                continue
            if self.layerwise is not None:
                self.layerwise.landed(receipt.transfer_id)
            if not load.is_told and self._freshness.is_stale(load.epoch):
                receipt = replace(receipt, outcome=Outcome.FAILED, reason=receipt.reason or _STALE)
            if receipt.outcome is not Outcome.OK:
                load.lost.update(blocks)
                load.reason = receipt.reason
        self._moves.discard(receipt.transfer_id)
        self._receipts.append(receipt)

    def take_receipts(self) -> StepReceipts | None:
        """Return the receipts and changes for the scheduler side; None if there are none."""
        if not (self.is_busy or self._receipts):
            return None
        freshness, fence = self._freshness, self._fence
        news: dict[str, Any] = {
            "receipts": tuple(self._receipts),
            "shapes": () if self._has_sent_shape else (self.shape,),
            "drained": (self.rank,) if self._drained else (),
            "stale": freshness.unreported,
            "health": tuple(self._health),
        }
        self._receipts, self._health, self._drained, freshness.unreported = [], [], False, ()
        if not self._has_sent_shape:
            self._has_sent_shape, self.shape = True, self.shape.without_blocks()
        if self._memory is not None and (not self._is_grown or self.shape.tiers):
            news |= self._memory_news(self._memory)
        awaits = self._num_awaited or freshness.is_marked or self.shape.tiers or self._loads
        is_left = self._later.transfers or not self._is_grown
        self.is_busy = bool(awaits or is_left or (fence is not None and fence.holds))
        return StepReceipts(**news) if any(news.values()) else None

    def _memory_news(self, memory: RankMemory) -> dict[str, Any]:
        """Return changes in usable slots, pinned bytes and the drives' figures."""
        rank, news = self.rank, dict[str, Any]()
        if not self._is_grown and (num_ready := memory.ready_slots) != self._reported_ready:
            self._reported_ready = num_ready
            self._is_grown = num_ready == memory.host.num_slots
            news["ready"] = ((rank, num_ready, memory.host.stats().pinned_bytes),)
        if memory.tiers and time.monotonic() >= self._disks_at:
            self._disks_at = time.monotonic() + _DISK_SECONDS
            disks = tuple((rank, name, figures) for name, figures in memory.disks().items())
            if disks != self._disks:
                self._disks = news["disks"] = disks
        return news
