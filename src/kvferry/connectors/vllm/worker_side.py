"""The connector in a vLLM worker: carries out plans and says what became of them, in both words.

::

    begin ── loads ──┐                    ┌── receipts ──> the scheduler's side
                     ├─> our worker ─────>┤
    after_forward ── stores               └── requests ──> vLLM: their blocks are there, or not

A store must come after the forward pass that writes its blocks is queued; a load may start before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvferry.config import Config
from kvferry.connectors.vllm.logs import Guard
from kvferry.connectors.vllm.messages import NO_PLAN, RankShape, StepOrders, StepReceipts
from kvferry.connectors.vllm.overlap import LandingLoads
from kvferry.connectors.vllm.ranks import (
    Place,
    device_of,
    layouts_of,
    mover_of,
    open_rank,
    shape_of,
    tier_movers,
)
from kvferry.connectors.vllm.requests import AwaitedLoad, LoadsInPieces, ToldLoads
from kvferry.connectors.vllm.weights import Freshness, weights_of_caller
from kvferry.rank import Contents, RankMemory
from kvferry.tiers.disk.figures import DiskFigures
from kvferry.types import (
    DEVICE,
    HOST,
    Health,
    Outcome,
    Plan,
    Question,
    Rank,
    Receipt,
    Transfer,
    TransferId,
)
from kvferry.worker import Worker

LASTING_EPOCH = 0
"""Its blocks have the same names in every life of a server; those of later epochs do not."""

_LOOK_SECONDS = 0.05
"""A look takes the thread that runs the model 0.2 ms."""


class LastingWrites:
    """Owns the writes that are held, no tier."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.names = frozenset(spec.name for spec in config.all_tiers if spec.outlives_us)
        self._clock = clock
        self._held: list[Transfer] = []
        self._marked: list[Transfer] = []
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._held) + len(self._marked)

    def hold(self, transfers: Sequence[Transfer]) -> list[Transfer]:
        """Keep those that write to what outlives us; returns the others."""
        self._held += [transfer for transfer in transfers if transfer.dst in self.names]
        return [transfer for transfer in transfers if transfer.dst not in self.names]

    def is_due(self) -> bool:
        """Whether it is time to look at the weights for what is held."""
        return bool(self._held) and self._clock() >= self._look_at

    def note_mark(self) -> None:
        """Sums of the weights as they are now will be taken."""
        self._marked += self._held
        self._held = []
        self._look_at = self._clock() + _LOOK_SECONDS

    def take_marked(self) -> tuple[Transfer, ...]:
        """Those whose blocks are older than the last sums."""
        marked, self._marked = tuple(self._marked), []
        return marked

    def take_all(self) -> tuple[Transfer, ...]:
        self.note_mark()
        return self.take_marked()


# ------------------------------------------------------------------------------------------------
# What a rank has to tell of its memory, when it has changed: slots, pinned bytes, drives.

Told = tuple[tuple[Rank, int], ...]
Disks = tuple[tuple[Rank, str, DiskFigures], ...]

_DISK_SECONDS = 1.0


class MemoryNews:
    """Knows what was told so far. Owns none of the memory."""

    def __init__(
        self, rank: Rank, memory: RankMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._memory = memory
        self._clock = clock
        self._told_ready = 0
        self.is_grown = False
        """Whether all host memory can be used, and that was told."""
        self._disks: Disks = ()
        self._disks_at = 0.0

    def ready(self) -> tuple[Told, Told]:
        """Usable slots and pinned bytes, if there are more of them than was told."""
        if self.is_grown:
            return (), ()
        num_ready = self._memory.ready_slots
        if num_ready == self._told_ready:
            return (), ()
        self._told_ready = num_ready
        self.is_grown = num_ready == self._memory.host.num_slots
        pinned_bytes = self._memory.host.stats().pinned_bytes
        return ((self._rank, num_ready),), ((self._rank, pinned_bytes),)

    def disks(self) -> Disks:
        """What the drives did so far, if that is other than was told a second ago."""
        if not self._memory.tiers or self._clock() < self._disks_at:
            return ()
        self._disks_at = self._clock() + _DISK_SECONDS
        now = tuple((self._rank, name, figures) for name, figures in self._memory.disks().items())
        if now == self._disks:
            return ()
        self._disks = now
        return now


# ------------------------------------------------------------------------------------------------
# The connector in a vLLM worker: carries out plans and says what became of them, in both words.
#
# ::
#
#     begin ── loads ──┐                    ┌── receipts ──> the scheduler's side
#                      ├─> our worker ─────>┤
#     after_forward ── stores               └── requests ──> vLLM: their blocks are there, or not
#
# A store must come after the forward pass that writes its blocks is queued; a load may start
# before.

log = logging.getLogger(__name__)

_STALE = "the model's weights have changed"

_IDLE_SECONDS = 0.5e-3
"""How long a step without a forward may wait for a load. An engine with nothing to compute steps as
fast as it can, and would keep the interpreter from the thread that queues the copies."""
_NAP_SECONDS = 2e-5


class WorkerSide:
    """Owns this rank's worker and host memory; knows which request waits for which transfer."""

    def __init__(
        self,
        *,
        place: Place,
        config: Config,
        groups: Sequence[Sequence[str]],
        num_blocks: int,
        contents: Contents,
        refusal: str = "",
    ) -> None:
        """``refusal`` says why the scheduler's side will be idle: then no memory is taken."""
        self.guard = Guard(f"rank {place.rank}")
        self.rank = place.rank
        self.shape = RankShape(self.rank, refusal=refusal or "vLLM has not registered its KV cache")
        self._is_idle = bool(refusal)
        self._config = config
        self._place = place
        self._contents = contents
        self._groups = groups
        self._num_blocks = num_blocks
        self._kv_caches: Mapping[str, Any] = {}
        self._memory: RankMemory | None = None
        self._worker: Worker | None = None
        self._told_shape = self._drained = False
        self._news: MemoryNews | None = None
        self._later: Plan = NO_PLAN
        self._computes = False
        self._is_run_due = False  # a load has come, and the model has not run since
        self._loads: dict[TransferId, AwaitedLoad] = {}  # one for each transfer it waits for
        self._pieces = LoadsInPieces()
        self._num_awaited = 0  # receipts
        self._below: set[TransferId] = set()  # what tiers were asked for and have not answered
        self._receipts: list[Receipt] = []
        self._health: list[Health] = []
        self.told = ToldLoads()
        self.is_busy = True  # something of an earlier step is still to be seen to, or told
        self._freshness = Freshness()
        self._lasting = LastingWrites(config)
        self.early: LandingLoads | None = None  # where loads may be read before they have landed

    # -- start and end --------------------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Find the blocks in vLLM's tensors and make the host memory for them."""
        if self._is_idle:
            return
        try:
            self._register(kv_caches)
        except Exception as error:
            self.guard.trip("register", error)
            self.shape = RankShape(self.rank, refusal=self.guard.reason)

    def register_whole(self, kv_cache: Any) -> None:
        """As ``register``, for one tensor that holds all layers of the only group."""
        self.register({names[0]: kv_cache for names in self._groups})

    def _register(self, kv_caches: Mapping[str, Any]) -> None:
        layouts = layouts_of(kv_caches, self._groups, self._num_blocks)
        self._kv_caches = dict(kv_caches)  # the engine copies by address
        device = device_of(kv_caches)
        weights = weights_of_caller(device)
        contents, first = self._contents, None
        if self._lasting.names and weights is not None:
            contents = replace(contents, weights=weights.sums_of_all())
            first = weights.begin().result()
        self._freshness = Freshness(weights, first)
        memory = self._memory = open_rank(device, layouts, self._config, self._place, contents)
        self._news = MemoryNews(self.rank, memory)
        mover = mover_of(memory, self._place)
        if self._config.overlap_loads != "off" and len(layouts) == 1:
            self.early = LandingLoads(memory.engine, self._groups[0], layouts[0], land=self._drain)
        self._worker = Worker(
            {(DEVICE, HOST): mover, (HOST, DEVICE): mover},
            tiers=tier_movers(memory, self._place),
            rank=self.rank,
        )
        self.shape = shape_of(memory, layouts, self._place)

    @property
    def _is_grown(self) -> bool:
        """Whether nothing is left to tell of the host memory."""
        return self._news is None or self._news.is_grown

    def introduce(self) -> RankShape:
        """vLLM asks for this once, when it has captured its graphs and before the first step."""
        if self._memory is not None:
            self._memory.note_started()
        shape, self.shape = self.shape, self.shape.without_blocks()  # it may be large: told once
        return shape

    def close(self) -> None:
        parts = [part for part in (self._worker, self._memory) if part is not None]
        for end in (self._look_for_lasting, self._release_lasting, *(part.close for part in parts)):
            try:
                end()
            except Exception:
                log.exception("kvferry did not close: %s", end.__qualname__)

    # -- a step ---------------------------------------------------------------------------------

    def begin(self, orders: StepOrders) -> None:
        """Start the step's loads, and its stores too where there is no forward to wait for."""
        if orders.is_quiet and not self.is_busy:
            self._computes = True
            self._is_run_due = False
            return
        self.is_busy = True
        try:
            self._begin(orders)
        except Exception as error:
            self.guard.trip("begin", error)
            self._give_up(orders)

    def _give_up(self, orders: StepOrders) -> None:
        """Nobody may wait for us: what was asked and what was on its way counts as failed."""
        self._drain()
        for load in self._loads.values():
            if not load.is_told and not load.is_open:  # of those told all has landed by now
                self.told.fail(load.request_id, load.blocks)
        for request_id, lost in self._pieces.give_up(orders):
            self.told.fail(request_id, lost)
        ordered = {transfer.id for transfer in orders.plan.transfers}
        self._loads.clear()
        held = [transfer for transfer in self._lasting.take_all() if transfer.id not in ordered]
        self._refuse((*held, *orders.plan.transfers, *orders.plan.questions), self.guard.reason)

    def _begin(self, orders: StepOrders) -> None:
        self._computes = orders.computes
        if self._later.transfers:
            self._flush()
        if self._lasting:
            self._release_lasting(orders.epoch)
        self._freshness.enter(orders.epoch)
        plan = orders.plan
        if plan.transfers or plan.questions or plan.forget or orders.loads or orders.undone:
            self._carry_out(orders)
        self._is_run_due = self._is_run_due and not orders.computes
        if not orders.computes:
            if self._later.transfers:
                self._flush()
            self._look_for_lasting()
            self._release_lasting(orders.epoch)
        elif self._memory is not None and not self._is_grown:
            self._memory.note_step()
        if self._lasting.is_due():
            self._look_for_lasting()
        if orders.drain:
            self._drain()
            self._drained = True

    def _carry_out(self, orders: StepOrders) -> None:
        for request_id, ids in orders.loads.items():
            load = self._pieces.ordered(request_id, ids, orders)
            self._loads.update(dict.fromkeys(ids, load))
            if self.early is not None and not load.in_pieces:
                load.early = orders.early.get(request_id)
                self.early.ordered(load)
        if self._memory is not None and orders.loads:
            # The forward of this step, that of a request whose load came first, or that of one
            # which may run before its own has landed, runs beside them: even if the model rests
            # while they are submitted.
            loading = {load.request_id for load in self._loads.values()}
            runs = orders.computes or self._is_run_due or len(loading) > 1 or bool(orders.early)
            self._memory.note_beside(runs)
        stores: list[Transfer] = []
        others: list[Transfer] = []
        for transfer in orders.plan.transfers:
            if transfer.id in self._loads:
                self._loads[transfer.id].bring(transfer.id, transfer.dst_slots.tolist())
            (stores if transfer.src == DEVICE else others).append(transfer)
        plan = orders.plan
        if self.shape.tiers:
            self._below.update([order.id for order in others if order.dst != DEVICE])
            self._below.update([question.id for question in plan.questions])
        for request_id, blocks in orders.undone.items():
            closed = self._pieces.close(request_id, blocks)
            if closed is None:
                self.told.fail(request_id, blocks)
            else:
                self._freshness.mark()  # what came of it must fit the weights as they are now
                if not closed.waiting:
                    self._end(closed)
        if orders.epoch == LASTING_EPOCH:
            others = self._lasting.hold(others)
        if orders.loads and self._freshness.is_stale(orders.epoch):
            self._refuse(others, _STALE)
            self._execute(Plan(plan.step, (), plan.questions, plan.forget))
        else:
            if others or plan.questions or plan.forget:
                self._execute(Plan(plan.step, tuple(others), plan.questions, plan.forget))
            if orders.loads:
                self._freshness.mark()
                self._lasting.note_mark()
        self._later = Plan(plan.step, tuple(stores))

    def after_forward(self) -> None:
        """The step's forward is queued: its blocks may be stored."""
        if self.early is not None and self._computes:
            self.early.end_forward()
        if self._later.transfers:
            self._flush()

    def _flush(self) -> None:
        if self._later.transfers:
            later, self._later = self._later, NO_PLAN
            self._execute(later)

    def _execute(self, plan: Plan) -> None:
        orders: list[Transfer | Question] = [*plan.transfers, *plan.questions]
        if self._worker is None or self.guard.reason:
            self._refuse(orders, self.guard.reason or self.shape.refusal)
            if plan.forget and self._worker is not None:  # what outlives us must hear of it still
                self._worker.execute(Plan(plan.step, forget=plan.forget))
            return
        self._num_awaited += len(orders)
        if self._memory is not None and not self._is_grown:
            self._memory.note_plan(plan)
        try:
            self._worker.execute(plan)
        except Exception as error:
            self.guard.trip("execute", error)
            self._refuse(orders, self.guard.reason)

    def _look_for_lasting(self) -> None:
        if self._lasting:
            self._freshness.mark()
            self._lasting.note_mark()

    def _release_lasting(self, epoch: int = LASTING_EPOCH) -> None:
        """Write to what outlives us what was held, unless it may be of other weights."""
        if epoch != LASTING_EPOCH:
            self._refuse(self._lasting.take_all(), _STALE)
            return
        looked_at = self._lasting.take_marked()
        if looked_at and self._freshness.is_stale(LASTING_EPOCH):
            self._refuse(looked_at, _STALE)
        elif looked_at:
            self._execute(Plan(0, looked_at))

    def _refuse(self, orders: Sequence[Transfer | Question], reason: str) -> None:
        """Every order ends in a receipt, or someone would wait for it for ever."""
        for order in orders:
            self._take(Receipt(order.id, self.rank, Outcome.FAILED, reason))

    # -- what happened --------------------------------------------------------------------------

    def poll(self) -> None:
        """Take what has ended by now; where nothing else is to do, what ends in a moment."""
        if not (self._num_awaited or self._freshness.is_marked or self.shape.tiers):
            return
        self._poll()
        end = time.monotonic() + _IDLE_SECONDS
        while self._loads or (self._below and not self._receipts):
            if self._computes or self.told.arrived or time.monotonic() >= end:
                return
            time.sleep(_NAP_SECONDS)
            self._poll()

    def _poll(self) -> None:
        if self._worker is not None:
            try:
                self._freshness.look()
                self._take_all(self._worker.poll())
                if self.shape.tiers:
                    self._health += self._worker.health()
                if self.early is not None:
                    self._tell_early(self.early)
            except Exception as error:
                self.guard.trip("poll", error)
                self._give_up(StepOrders())

    def _tell_early(self, early: LandingLoads) -> None:
        """Let a request run whose load cannot fail any more, though it has not landed yet."""
        load = early.due(beside_others=self._computes)
        if load is None or not self._freshness.is_known or self._freshness.is_stale(load.epoch):
            return
        early.told(load)
        self.told.arrived.add(load.request_id)

    def _drain(self) -> None:
        """Finish the copies from and to the device."""
        self._flush()
        if self._worker is not None:
            try:
                self._take_all(self._worker.drain_device())
            except Exception as error:
                self.guard.trip("drain", error)

    def _take_all(self, receipts: Sequence[Receipt]) -> None:
        self._num_awaited -= len(receipts)
        for receipt in receipts:
            self._take(receipt)

    def _take(self, receipt: Receipt) -> None:
        load = self._loads.pop(receipt.transfer_id, None)
        if load is None:
            if self._below:
                self._below.discard(receipt.transfer_id)
            self._receipts.append(receipt)
            return
        if not load.is_told and self._freshness.is_stale(load.epoch):
            receipt = replace(receipt, outcome=Outcome.FAILED, reason=receipt.reason or _STALE)
        self._receipts.append(receipt)
        if load.end(receipt.transfer_id, ok=receipt.outcome is Outcome.OK):
            self._end(load, receipt.reason)

    def _end(self, load: AwaitedLoad, reason: str = "") -> None:
        """Nothing more of a load is on its way, or will be."""
        if load.in_pieces and self._freshness.is_stale(load.epoch):
            load.lose(load.blocks.copy())  # the first came before the weights changed
        if self.early is not None:
            self.early.ended(load)
        if load.is_told:
            if load.failed:  # with the device: what vLLM computed of it is lost like all else
                log.error("a load failed after it was on its way: %s", reason)
        elif load.failed:
            self.told.fail(load.request_id, load.lost)
        else:
            self.told.arrived.add(load.request_id)
            self._is_run_due = True

    def take_receipts(self) -> StepReceipts | None:
        """What the scheduler's side does not know yet; None if that is nothing."""
        if not (self.is_busy or self._receipts):
            return None
        stale = self._freshness.take_stale()
        disks = self._news.disks() if self._news is not None else ()
        receipts, self._receipts = tuple(self._receipts), []
        health, self._health = tuple(self._health), []
        drained, self._drained = (self.rank,) if self._drained else (), False
        shapes = () if self._told_shape else (self.shape,)
        if not self._told_shape:
            self._told_shape, self.shape = True, self.shape.without_blocks()
        ready, pinned = self._news.ready() if self._news is not None else ((), ())
        awaits = self._num_awaited or self._freshness.is_marked or self.shape.tiers
        self.is_busy = bool(awaits or self._later.transfers or self._lasting or not self._is_grown)
        if receipts or ready or shapes or drained or stale or health or disks:
            return StepReceipts(receipts, ready, shapes, drained, pinned, stale, health, disks)
        return None
