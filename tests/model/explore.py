"""Every order in which a few requests and ranks can do what they do, for tiny sizes.

Depth first over whole states. A state is taken to be known when everything that can influence what
comes next is equal: slots, keys, order of eviction, hits, flights, queues, holds, and the bytes of
device and host. All but the first branch of a state begin with a copy, so none touches another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.pools import evict
from tests.model import snapshots
from tests.model.simulation import Request, Shape, Simulation

from kvferry.scheduler import request as half
from kvferry.types import DEVICE, MatchState, Question, Transfer, TransferId

Action = tuple[Any, ...]
"""A name and its arguments."""


@dataclass
class Scenario:
    """What may happen besides the usual, and how often."""

    shape: Shape
    lives: tuple[int, ...] = (1, 1)
    """How often each prompt's request comes."""
    disturbances: Mapping[str, int] = field(default_factory=dict)
    """Any of ``fail``, ``expire``, ``preempt``, ``abort``, ``reset``, ``evict``, ``lose``."""
    pins: bool = False
    """Whether a request may look, keep its hit pinned, and act on it later."""


@dataclass
class Report:
    """What an exploration saw."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    depth: int = 0
    loads: int = 0
    actions: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.actions.items()))
        return (
            f"{self.states} states, {self.transitions} transitions, depth {self.depth}, "
            f"{self.ends} ends, {self.loads} loads landed; {kinds}"
        )


class World:
    """A simulation and what may still happen in it."""

    def __init__(self, scenario: Scenario) -> None:
        self.sim = Simulation(scenario.shape)
        self.left = dict(scenario.disturbances)
        self.lives = list(scenario.lives)
        self.pins = scenario.pins
        for prompt in range(len(self.lives)):
            self._come(prompt)

    def _come(self, prompt: int) -> None:
        if self.lives[prompt]:
            self.lives[prompt] -= 1
            self.sim.arrive(str(prompt), prompt)

    # -- what can be done -----------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        sim = self.sim
        for request in sim.requests.values():
            yield from self._of_request(request)
        if sim.scheduler.num_queued:
            yield ("plan",)
        for rank, todo in enumerate(sim.pending):
            for position in range(len(todo)):
                yield ("copy", rank, position, "ok")
                if self.left.get("fail"):
                    yield ("copy", rank, position, "failed")
        if self.left.get("expire") and sim.scheduler.num_in_flight:
            yield ("expire",)
        for name in ("reset", "evict"):
            if self.left.get(name):
                yield (name,)
        if self.left.get("lose"):
            for rank in range(sim.shape.num_ranks):
                yield ("lose", rank)

    def _of_request(self, request: Request) -> Iterator[Action]:
        if request.state == "waiting":
            if self.pins:
                yield ("look", request.id)
            yield ("go", request.id)
        elif request.state == "running":
            if request.computed < len(request.keys) * self.sim.shape.hash_tokens:
                yield ("run", request.id)
            else:
                yield ("finish", request.id)
        for name in ("preempt", "abort"):
            if self.left.get(name):
                yield (name, request.id)

    def do(self, action: Action) -> None:
        name, *rest = action
        getattr(self, f"_{name}")(*rest)

    def _look(self, request_id: str) -> None:
        self.sim.match(self.sim.requests[request_id])

    def _go(self, request_id: str) -> None:
        request = self.sim.requests[request_id]
        match = self.sim.match(request)
        if match.state is MatchState.HIT:
            self.sim.load(request, 0, match.num_tokens)
        elif match.state is MatchState.MISS:
            self.sim.start(request)

    def _run(self, request_id: str) -> None:
        """One hash block is computed, and stored at once."""
        request = self.sim.requests[request_id]
        if self.sim.compute(request, request.computed + self.sim.shape.hash_tokens):
            self.sim.store(request)

    def _finish(self, request_id: str) -> None:
        self.sim.finish(self.sim.requests[request_id])
        self._come(int(request_id))

    def _abort(self, request_id: str) -> None:
        self.left["abort"] -= 1
        self._finish(request_id)

    def _preempt(self, request_id: str) -> None:
        self.left["preempt"] -= 1
        self.sim.preempt(self.sim.requests[request_id])

    def _plan(self) -> None:
        self.sim.plan()

    def _copy(self, rank: int, position: int, outcome: str) -> None:
        self.left["fail"] = self.left.get("fail", 0) - (outcome == "failed")
        self.sim.deliver([self.sim.execute(rank, position, outcome)])

    def _expire(self) -> None:
        self.left["expire"] -= 1
        self.sim.wait_past_deadlines()

    def _reset(self) -> None:
        self.left["reset"] -= 1
        self.sim.reset()

    def _evict(self) -> None:
        self.left["evict"] -= 1
        evict(self.sim.pool, 1)

    def _lose(self, rank: int) -> None:
        self.left["lose"] -= 1
        self.sim.lose_rank(rank)

    # -- telling states apart -------------------------------------------------------------------

    def fingerprint(self) -> tuple[object, ...]:
        """Equal for two worlds that differ only in the names of slots, blocks, ranks, transfers."""
        sim, scheduler, pool = self.sim, self.sim.scheduler, self.sim.pool
        flights = sorted(scheduler.transfers.in_flight.items())
        outbox: Any = scheduler.transfers
        names = Names()
        indexed = sorted(
            (pool.table.index.key_of(slot), slot) for slot in pool.table.index.slots().tolist()
        )
        slots = tuple((key, names.slot(slot)) for key, slot in indexed)
        flying = tuple((names.order(f.transfer), f.reason == "", f.overdue) for _, f in flights)
        queued = tuple(names.transfer(order.transfer) for order in outbox._loads)
        stores = tuple(
            (g, names.blocks(g, o.device_blocks), names.slots(o.lease.slots))
            for g, (_, orders) in outbox._stores.items()
            for o in orders
        )
        requests = tuple(
            (
                *(request.id, request.state, request.computed, request.loading_tokens),
                *(tuple(request.weights), request.loading_weights),
                tuple(names.blocks(g, table) for g, table in enumerate(request.tables)),
                self._record(scheduler.named.get(request.id), names),
            )
            for request in sim.requests.values()
        )
        held = tuple(
            (g, names.blocks(g, [block]), count)
            for g, counts in enumerate(sim.holds)
            for block, count in sorted(counts.items())
            if count
        )
        return (
            *(tuple(sorted(self.left.items())), tuple(self.lives), sim.weights),
            *(slots, flying, queued, stores, requests, held),
            names.slots(pool.eviction.policy.peek(pool.num_slots)),
            tuple(self._slot(slot, names) for slot in list(names.of_slots)),
            pool.num_free,
            tuple((g, names.blocks(g, blocks)) for g, blocks in scheduler._requests.released),
            tuple(sorted(self._rank(rank, names) for rank in range(sim.shape.num_ranks))),
        )

    def _slot(self, slot: int, names: Names) -> tuple[int, ...]:
        pool = self.sim.pool
        parent = names.slot(pool.table.chains.parent_of(slot))
        return int(pool.table.state[slot]), int(pool.table.readers[slot]), parent

    def _rank(self, rank: int, names: Names) -> tuple[object, ...]:
        """One rank's view. What lies in memory that is free will be written before it is read."""
        sim = self.sim
        flights = sim.scheduler.transfers.in_flight
        device = (sim.device[rank][g][block] for g, block in names.of_blocks if block >= 0)
        host = (sim.hosts[rank][slot] for slot in names.of_slots if slot >= 0)
        return (
            rank in sim.lost,
            tuple(names.of_transfers[t] for t, f in sorted(flights.items()) if rank in f.waiting),
            tuple(names.of_transfers.get(transfer.id, -1) for transfer in sim.pending[rank]),
            tuple(sim.meaning(rank, row.tobytes()) for row in (*device, *host)),
        )

    def _record(self, record: half.Request | None, names: Names) -> tuple[object, ...] | None:
        if record is None:
            return None
        hit = record._hit
        pinned = None
        if hit is not None:
            leases = tuple(None if le is None else names.slots(le.slots) for le in hit.leases)
            fresh = hit.generation == self.sim.pool.generation
            joined = None if hit.joined is None else names.slots(hit.joined)
            look = hit.found
            found = (look.computed_tokens, look.max_tokens, look.host_tokens, look.missing)
            pinned = (found, hit.is_declined, leases, joined, fresh)
        waiting = tuple(sorted(names.of_transfers[t] for t in record.loading))
        return (
            *(record.state, tuple(record.progress.stored), record.progress.is_outdated),
            *(pinned, waiting),
            *(record._missed, record.progress.past),
        )


class Names:
    """Numbers given in the order of first mention, so that equal worlds get equal ones."""

    def __init__(self) -> None:
        self.of_slots: dict[int, int] = {-1: -1}
        self.of_blocks: dict[tuple[int, int], int] = {}
        self.of_transfers: dict[TransferId, int] = {}

    def slot(self, slot: int) -> int:
        return self.of_slots.setdefault(slot, len(self.of_slots))

    def slots(self, slots: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.slot(int(slot)) for slot in slots)

    def blocks(self, group: int, blocks: Iterable[int]) -> tuple[int, ...]:
        return tuple(
            self.of_blocks.setdefault((group, int(block)), len(self.of_blocks)) for block in blocks
        )

    def order(self, order: Transfer | Question) -> tuple[object, ...]:
        assert isinstance(order, Transfer), "nothing is asked where there are no tiers"
        return self.transfer(order)

    def transfer(self, transfer: Transfer) -> tuple[object, ...]:
        self.of_transfers.setdefault(transfer.id, len(self.of_transfers))
        loads = transfer.dst == DEVICE
        host = transfer.src_slots if loads else transfer.dst_slots
        device = transfer.dst_slots if loads else transfer.src_slots
        return loads, transfer.group, self.slots(host), self.blocks(transfer.group, device)


class _State:
    """A state that was met: the first branch goes on in its world, the others in copies of it."""

    def __init__(self, world: World) -> None:
        self._actions = list(world.actions())
        self._snapshot = snapshots.keep(world) if len(self._actions) > 1 else b""
        self._world: World | None = world

    @property
    def is_done(self) -> bool:
        return not self._actions

    def branch(self) -> tuple[World, Action]:
        world, self._world = self._world, None
        return world or snapshots.again(self._snapshot), self._actions.pop()


def explore(scenario: Scenario, *, most_states: int = 100_000) -> Report:
    """Visit every state; each must be sound, and each end must leave nothing behind."""
    report = Report(states=1)
    world = World(scenario)
    known = {hash(world.fingerprint())}
    path = [_State(world)]
    while path:
        if path[-1].is_done:
            path.pop()
            continue
        world, action = path[-1].branch()
        before = world.sim.num_loaded
        world.do(action)
        report.transitions += 1
        report.actions[action[0]] += 1
        report.loads += world.sim.num_loaded - before
        mark = hash(world.fingerprint())
        if mark not in known:
            world.sim.check()
            known.add(mark)
            path.append(_State(world))
            report.states += 1
            report.depth = max(report.depth, len(path))
            if path[-1].is_done:
                report.ends += 1
                world.sim.drain()
            if report.states > most_states:
                raise AssertionError(f"more than {most_states} states: {report}")
    return report
