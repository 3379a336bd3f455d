"""Every order of a request's verbs: the engine may call them as it likes, and at any time.

Checked is who waits for what, that nothing is lost or left, that a rank copies between claimed
blocks alone, and that a load brings the blocks that it names: a copy carries their keys for bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.crafted_keys import keys
from tests.fakes.pools import evict
from tests.model import request_laws, snapshots

from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.cache.slots import SlotState
from kvferry.config import Config
from kvferry.core.keys import Key
from kvferry.errors import InputError
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.scheduler import Scheduler, Settled
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.scheduler.transfers import BlockTable, Ordered
from kvferry.types import (
    DEVICE,
    HOST,
    DeviceBlocks,
    Outcome,
    Rank,
    Receipt,
    TierName,
    Transfer,
    TransferId,
)

VERBS = ("match", "load", "run", "store", "preempt", "end", "leave")
EVENTS = ("fail", "late", "reset")
Action = tuple[Any, ...]


@dataclass(frozen=True)
class Life:
    """How one request is: its chain, and how many of its tokens the engine has when it comes."""

    chain: tuple[int, ...]
    computed: int = 0
    tokens: int = 8


@dataclass(frozen=True)
class Scenario:
    """A tiny scheduler, what it holds at first, and what may happen to it."""

    lives: tuple[Life, ...]
    kept: tuple[int, ...] = ()
    num_slots: int = 4
    num_ranks: int = 1
    below: bool = False
    has_rests: bool = False
    evicts: bool = False
    joins_loads: bool = True
    events: tuple[str, ...] = EVENTS
    begins: tuple[Action, ...] = ()
    depth: int = 5


class Blocks:
    """An engine whose blocks stay where they are; its requests find them by their number."""

    num_free = 1000
    num_held = 0

    def __init__(self, evicts: bool) -> None:
        self.evicts = evicts

    def tables(self, request: Request, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        return table_of(request)

    remains = tables


def table_of(request: Request) -> list[list[int]]:
    first = 10 * int(request.id)
    return [list(range(first, first + len(request.chain)))]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """One scheduler and its requests; holds of device blocks are counted as an engine would."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.tiers: tuple[SlotTier, ...] = ()
        if scenario.below:
            self.tiers = (SlotTier(TierName("disk"), Pool(4), WriteMode.THROUGH),)
        self.scheduler = Scheduler(
            Pool(scenario.num_slots),
            (FullAttention(4),),
            config=Config(load_policy="always", match_deadline=60.0),
            num_ranks=scenario.num_ranks,
            num_device_blocks=1000,
            tiers=self.tiers,
            joins_loads=scenario.joins_loads,
            engine=Blocks(scenario.evicts) if scenario.has_rests else None,
            clock=self.clock,
        )
        self.holds: Counter[int] = Counter()
        self.unanswered: list[list[TransferId]] = [[] for _ in range(scenario.num_ranks)]
        self.sent: dict[TransferId, Transfer] = {}
        self.named: dict[TransferId, dict[int, Key]] = {}  # blocks' keys, by device block
        self.slots: list[dict[tuple[TierName, int], Key | None]] = [
            {} for _ in range(scenario.num_ranks)
        ]
        self.left = Counter(scenario.events)
        if scenario.kept:
            self._keep(scenario.kept)
        self.requests = [
            self.scheduler.open(str(number), keys(life.chain))
            for number, life in enumerate(scenario.lives)
        ]
        self.before = [request.state for request in self.requests]
        for action in scenario.begins:
            self.do(action)

    def _keep(self, numbers: Sequence[int]) -> None:
        writer = self.scheduler.open("9", keys(numbers))
        self._hold(writer.store(table_of(writer), 4 * len(numbers)))
        writer.end()
        for _ in range(2):  # what is stored goes down when it has landed
            self._plan()
            self._answer_all()
        if self.tiers:
            evict(self.scheduler.pool, len(numbers))

    # -- what can happen ------------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        for number, request in enumerate(self.requests):
            if request.state is not State.ENDED:
                for verb in VERBS:
                    yield (verb, number)
        if self.scheduler.num_queued:
            yield ("plan",)
        for rank, unanswered in enumerate(self.unanswered):
            if unanswered:
                yield ("answer", rank, True)
                if self.left["fail"]:
                    yield ("answer", rank, False)
        if self.left["late"]:
            yield ("late",)
        for event in ("reset", "evict"):
            if self.left[event]:
                yield (event,)
        if self.scheduler.deferred:
            yield ("store left",)

    def do(self, action: Action) -> None:
        verb, *rest = action
        spoken_to = None
        if verb in VERBS:
            spoken_to = rest[0]
            getattr(self, f"_{verb}")(self.requests[spoken_to], self.scenario.lives[spoken_to])
            law = verb
        elif verb == "answer":
            rank, ok = rest
            self.left["fail"] -= not ok
            self._settle([self._answer(rank, ok)])
            law = "settle"
        elif verb == "evict":
            self.left["evict"] -= 1
            evict(self.scheduler.pool, 1)
            law = "others"
        elif verb == "late":
            self.left["late"] -= 1
            self.clock.now += 100.0
            self._settle([])
            law = "settle"
        elif verb == "store left":
            self._hold(self.scheduler.store_left(is_idle=True))
            law = verb
        else:
            self.left["reset"] -= verb == "reset"
            self._plan() if verb == "plan" else self.scheduler.reset()
            law = verb
        self._check(law, spoken_to)

    def _check(self, law: str, spoken_to: int | None) -> None:
        for number, (request, before) in enumerate(zip(self.requests, self.before, strict=True)):
            is_other = spoken_to is not None and number != spoken_to
            request_laws.check_step("others" if is_other else law, before, request.state)
        self.before = [request.state for request in self.requests]
        request_laws.check(self.scheduler, self.requests)

    def drain(self) -> None:
        """Everything ends; then nothing is left."""
        for request in self.requests:
            request.end()
        for _ in range(3):
            self._plan()
            self._answer_all()
        request_laws.check_nothing_left(self.scheduler)
        assert not +self.holds, "a device block is held for ever"

    # -- the verbs ------------------------------------------------------------------------------

    def _match(self, request: Request, life: Life) -> None:
        over = request.state in (State.LEFT, State.ENDED)
        try:
            request.match(computed_tokens=life.computed, max_tokens=4 * len(life.chain) - 1)
        except InputError:
            assert over

    def _load(self, request: Request, life: Life) -> None:
        self._hold(request.load(table_of(request)))

    def _run(self, request: Request, life: Life) -> None:
        over = request.state in (State.LEFT, State.ENDED)
        try:
            request.run()
        except InputError:
            assert over

    def _store(self, request: Request, life: Life) -> None:
        over = request.state in (State.LEFT, State.ENDED)
        try:
            self._hold(request.store(table_of(request), life.tokens))
        except InputError:
            assert over

    def _preempt(self, request: Request, life: Life) -> None:
        request.preempt()

    def _end(self, request: Request, life: Life) -> None:
        request.end()

    def _leave(self, request: Request, life: Life) -> None:
        self._hold(request.leave(life.tokens))

    # -- the engine and the ranks ---------------------------------------------------------------

    def _hold(self, ordered: Iterable[DeviceBlocks | Ordered]) -> None:
        for part in ordered:
            blocks = part.blocks.tolist()
            self.holds.update(blocks)
            if isinstance(part, Ordered):
                named = self.named.setdefault(part.transfer, {})
                named.update(zip(blocks, part.keys, strict=True))

    def _plan(self) -> None:
        for transfer in self.scheduler.plan().transfers:
            self.sent[transfer.id] = transfer
            for unanswered in self.unanswered:
                unanswered.append(transfer.id)

    def _answer_all(self) -> None:
        ranks = range(self.scenario.num_ranks)
        self._settle([self._answer(rank, True) for rank in ranks for _ in self.unanswered[rank][:]])

    def _answer(self, rank: int, ok: bool) -> Receipt:
        """A rank does the oldest of its transfers; one that fails leaves garbage."""
        transfer = self.sent[self.unanswered[rank].pop(0)]
        for tier, blocks in (
            (transfer.src, transfer.src_slots),
            (transfer.dst, transfer.dst_slots),
        ):
            if tier == DEVICE:
                assert all(self.holds[int(block)] > 0 for block in blocks), "it was let go"
            else:
                pool = self.scheduler.pool if tier == HOST else self.tiers[0].pool
                assert (pool.table.state[blocks] != SlotState.FREE).all(), "a slot is free"
                assert tier == transfer.dst or (pool.table.readers[blocks] > 0).all()
        slots, named = self.slots[rank], self.named.get(transfer.id, {})
        for src, dst in zip(transfer.src_slots.tolist(), transfer.dst_slots.tolist(), strict=True):
            word = named[src] if transfer.src == DEVICE else slots.get((transfer.src, src))
            if transfer.dst != DEVICE:
                slots[transfer.dst, dst] = word if ok else None
            elif ok:
                assert word == named[dst], "another block's bytes were loaded"
        return _receipt(transfer.id, rank, ok)

    def _settle(self, receipts: Sequence[Receipt]) -> None:
        self._act_on(self.scheduler.settle(receipts))

    def _act_on(self, settled: Settled) -> None:
        for part in settled.released:
            for block in part.blocks:
                assert self.holds[int(block)] > 0, "a device block was let go that nobody held"
                self.holds[int(block)] -= 1
        for request in settled.loaded:
            assert request.state in (State.LOADED, State.RUNNING)

    # -- telling states apart -------------------------------------------------------------------

    def fingerprint(self) -> object:
        scheduler, now = self.scheduler, self.clock.now
        pool = scheduler.pool
        outbox: Any = scheduler.transfers
        ids = sorted({*scheduler.transfers.in_flight, *(t for ts in self.unanswered for t in ts)})
        ids += [order.transfer.id for order in outbox._loads]
        ids += [order.transfer.id for order in outbox._moves]
        names = {transfer_id: number for number, transfer_id in enumerate(dict.fromkeys(ids))}
        rests = scheduler.deferred
        return (
            tuple(self._of(request, names) for request in self.requests),
            tuple(sorted(self.left.items())),
            tuple(tuple(names[t] for t in ts) for ts in self.unanswered),
            tuple(
                (
                    *(names[t], f.transfer.src, f.transfer.src_slots.tobytes(), f.overdue),
                    *(f.transfer.dst_slots.tobytes(), tuple(sorted(f.waiting))),
                    *(f.reason, f.deadline - now),
                )
                for t, f in sorted(scheduler.transfers.in_flight.items())
                if isinstance(f.transfer, Transfer)
            ),
            tuple(
                (o.lease.slots.tobytes(), o.device_blocks.tobytes()) for o in outbox.store_orders()
            ),
            tuple((o.leases[0].slots.tobytes(), int(o.served[0].id)) for o in outbox._loads),
            tuple(o.transfer.dst_slots.tobytes() for o in outbox._moves),
            tuple(pool.table.index.key_of(slot) for slot in pool.table.index.slots().tolist()),
            tuple(pool.table.index.slots().tolist()),
            (pool.table.state.tobytes(), pool.table.readers.tobytes()),
            tuple(pool.eviction.policy.peek(pool.num_slots).tolist()),
            tuple((g, blocks.tobytes()) for g, blocks in scheduler._requests.released),
            tuple(sorted((+self.holds).items())),
            tuple(r.request.id for r in rests._rests) if rests else (),
            scheduler.epoch,
            tuple(tuple(sorted(slots.items())) for slots in self.slots),
        )

    def _of(self, request: Request, names: dict[TransferId, int]) -> object:
        hit = request._hit
        found = None
        if hit is not None:
            leases = tuple(None if le is None else le.slots.tobytes() for le in hit.leases)
            joined = None if hit.joined is None else hit.joined.tobytes()
            fresh = hit.generation == self.scheduler.pool.generation
            loads = hit.num_loads == self.scheduler.hits._num_loads
            found = (leases, joined, fresh, loads, hit.found.host_tokens, hit.is_declined)
        below = request.promotion.has_promoted if request.promotion is not None else False
        progress = request.progress
        return (
            *(request.state, tuple(progress.stored), progress.is_outdated, found, request._missed),
            *(request.was_asked, request.is_answered),
            *(below, progress.past, request._computed),
            tuple(sorted(names[t] for t in request.loading)),
            tuple(sorted(names[t] for t in request_laws.waits_of(request))),
        )


def _receipt(transfer_id: TransferId, rank: int, ok: bool) -> Receipt:
    outcome = Outcome.OK if ok else Outcome.FAILED
    return Receipt(transfer_id, Rank(rank), outcome, "" if ok else "no")


@dataclass
class Report:
    states: int = 0
    steps: int = 0
    seen: Counter[State] = field(default_factory=Counter)
    verbs: Counter[str] = field(default_factory=Counter)


def explore(scenario: Scenario) -> Report:
    """Every sequence of steps up to the scenario's depth; every state ends with nothing left."""
    report = Report()
    world = World(scenario)
    known = {hash(world.fingerprint())}
    frontier = [(snapshots.keep(world), list(world.actions()))]
    for depth in range(1, scenario.depth + 1):
        following = []
        for snapshot, actions in frontier:
            for action in actions:
                world = snapshots.again(snapshot)
                world.do(action)
                report.steps += 1
                report.verbs[action[0]] += 1
                mark = hash(world.fingerprint())
                if mark in known:
                    continue
                known.add(mark)
                report.states += 1
                report.seen.update(request.state for request in world.requests)
                if depth < scenario.depth:
                    following.append((snapshots.keep(world), list(world.actions())))
                world.drain()
        frontier = following
    return report
