"""A serving engine and its workers in miniature, holding real bytes, around one scheduler.

The engine allocates device blocks, computes into them, and trusts the scheduler's word about holds
and loads; the workers copy late, in any order, or fail. Every (key, group, rank, weights) has bytes
of its own, so a block that serves the wrong tokens cannot look right.

::

    device[rank][group]  one row per device block        poisoned when a block is given out
    hosts[rank]          one row per slot, poisoned from the start

What is checked at each step is said where it is checked; :meth:`Simulation.check` is what always
holds and :meth:`Simulation.drain` what holds in the end.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from tests.fakes.by_name import ByName, SettledByName

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.cache.slots import SlotState
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.scheduler.transfers import NO_BLOCK
from kvferry.types import (
    DEVICE,
    DeviceBlocks,
    Match,
    MatchState,
    Outcome,
    Rank,
    Receipt,
    TierName,
    Transfer,
)

ROW_BYTES = 8
POISON = 0xEE
MATCH_DEADLINE, COPY_DEADLINE = 60.0, 30.0


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Shape:
    """How big a simulation is."""

    groups: tuple[reach.Group, ...]
    prompts: tuple[tuple[int, ...], ...]
    """Chains of hash block numbers; equal numbers at equal places are shared beginnings."""
    num_ranks: int = 2
    num_slots: int = 4
    num_device_blocks: int = 8
    hash_tokens: int = 4


@dataclass(eq=False)
class Request:
    """One request in the engine: ``waiting``, ``loading`` or ``running``."""

    id: str
    prompt: tuple[int, ...]
    keys: Keys
    tables: list[list[int]]
    state: str = "waiting"
    computed: int = 0
    loading_tokens: tuple[int, int] = (0, 0)
    weights: list[int] = field(default_factory=list)
    """Which weights the bytes of each hash block come from, by place."""
    loading_weights: int = 0


class Simulation:
    """Everything outside the scheduler. Owns the device, the hosts' bytes and the workers."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.clock = Clock()
        self.pool = Pool(shape.num_slots)
        self.scheduler = ByName(
            self.pool,
            shape.groups,
            config=Config(
                load_deadline=COPY_DEADLINE,
                store_deadline=COPY_DEADLINE,
                match_deadline=MATCH_DEADLINE,
                load_policy="always",
            ),
            num_ranks=shape.num_ranks,
            hash_block_tokens=shape.hash_tokens,
            clock=self.clock,
        )
        self.hosts = [_poisoned(shape.num_slots) for _ in range(shape.num_ranks)]
        self.device = [
            [_poisoned(shape.num_device_blocks) for _ in shape.groups]
            for _ in range(shape.num_ranks)
        ]
        self.owned: list[Counter[int]] = [Counter() for _ in shape.groups]
        self.holds: list[Counter[int]] = [Counter() for _ in shape.groups]
        self.requests: dict[str, Request] = {}
        self.pending: list[list[Transfer]] = [[] for _ in range(shape.num_ranks)]
        self.receipts: list[Receipt] = []
        self.lost: set[int] = set()
        self.weights = 0
        self._meanings: dict[bytes, tuple[str, int]] = {}
        self.num_loaded = 0

    # -- the engine's side ----------------------------------------------------------------------

    def arrive(self, request_id: str, prompt: int) -> Request:
        numbers = self.shape.prompts[prompt]
        request = Request(request_id, numbers, chain_of(numbers), [[] for _ in self.shape.groups])
        self.requests[request_id] = request
        return request

    def match(self, request: Request, computed: int = 0, max_tokens: int | None = None) -> Match:
        """Ask what can be had. The answer must fit the question."""
        assert request.state == "waiting"
        match = self.scheduler.match(
            request.id, request.keys, computed_tokens=computed, max_tokens=max_tokens
        )
        limit = len(request.keys) * self.shape.hash_tokens
        limit = limit if max_tokens is None else min(limit, max_tokens)
        assert match.computed_tokens == computed
        assert match.num_tokens == computed or computed < match.num_tokens <= limit
        assert (match.to_load > 0) == (match.state is MatchState.HIT)
        return match

    def load(self, request: Request, computed: int, num_tokens: int) -> bool:
        """Allocate for a hit and order it; False if the device had no room or the hit was lost."""
        assert request.state == "waiting"
        assert not any(request.tables)
        if not self._grow(request, num_tokens):
            return False
        tables = request.tables
        self._compute(request, 0, computed)
        request.computed = computed
        self._leave_out_unread(request, computed, num_tokens)
        mentioned = self.scheduler.load(request.id, tables)
        request.state = "running"
        if not mentioned:
            self._blank_blocks(request, computed)
            return False
        self._hold(mentioned)
        expected = {
            (g, tables[g][b])
            for g, group in enumerate(self.shape.groups)
            for b in reach.needed(group, num_tokens, computed_tokens=computed)
        }
        assert {(g, int(b)) for g, blocks in mentioned for b in blocks} == expected
        request.state = "loading"
        request.loading_tokens = (computed, num_tokens)
        request.loading_weights = self.weights
        return True

    def start(self, request: Request) -> None:
        """Run without a hit."""
        assert request.state == "waiting"
        request.state = "running"

    def compute(self, request: Request, num_tokens: int) -> bool:
        """Fill blocks up to ``num_tokens``; False if the device has no room for them."""
        assert request.state == "running"
        if num_tokens <= request.computed:
            return True
        if not self._grow(request, num_tokens):
            return False
        self._compute(request, request.computed, num_tokens)
        request.computed = num_tokens
        return True

    def store(self, request: Request) -> None:
        assert request.state == "running"
        mentioned = self.scheduler.store(request.id, request.keys, request.tables, request.computed)
        for g, blocks in mentioned:
            assert set(blocks.tolist()) <= set(request.tables[g]), "stored a block of nobody's"
        self._hold(mentioned)

    def preempt(self, request: Request) -> None:
        self.scheduler.preempt(request.id)
        self._give_up_blocks(request)
        request.state = "waiting"
        request.computed = 0
        request.weights = []

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request.id)
        self._give_up_blocks(request)
        del self.requests[request.id]

    def reset(self) -> None:
        """New weights: from now on the same tokens give other bytes."""
        self.scheduler.reset()
        self.weights += 1

    # -- the workers' side ----------------------------------------------------------------------

    def plan(self) -> None:
        plan = pickle.loads(pickle.dumps(self.scheduler.plan()))
        for transfer in plan.transfers:
            for rank in range(self.shape.num_ranks):
                if rank not in self.lost:
                    self.pending[rank].append(transfer)

    def execute(self, rank: int, position: int, outcome: str = "ok") -> Receipt:
        """One rank does one of its transfers; one that fails leaves half of it, and garbage."""
        transfer = self.pending[rank].pop(position)
        self._check_claimed(transfer)
        source = self._rows(rank, transfer.src, transfer.group)[transfer.src_slots]
        target = self._rows(rank, transfer.dst, transfer.group)
        if outcome == "ok":
            target[transfer.dst_slots] = source
            receipt = Receipt(transfer.id, Rank(rank), Outcome.OK)
        else:
            target[transfer.dst_slots] = POISON
            half = len(transfer) // 2
            target[transfer.dst_slots[:half]] = source[:half]
            receipt = Receipt(transfer.id, Rank(rank), Outcome.FAILED, "injected")
        self.receipts.append(receipt)
        return receipt

    def deliver(self, receipts: Iterable[Receipt] = ()) -> SettledByName:
        """Hand receipts over (also ones handed over before) and act on the answer."""
        receipts = list(receipts)
        for receipt in receipts:
            if receipt in self.receipts:
                self.receipts.remove(receipt)
        settled = self.scheduler.settle(receipts)
        self._act_on(settled)
        return settled

    def work_off(self) -> None:
        """A quiet moment: everything ordered is carried out and reported."""
        self.plan()
        for rank, todo in enumerate(self.pending):
            while todo:
                self.execute(rank, 0)
        self.deliver(list(self.receipts))

    def lose_rank(self, rank: int) -> None:
        """A worker dies: it copies nothing more, though receipts it sent may still arrive."""
        self.lost.add(rank)
        self.pending[rank] = []
        self._act_on(self.scheduler.lose_rank(Rank(rank), f"rank {rank} died"))  # type: ignore[arg-type]

    def wait_past_deadlines(self) -> SettledByName:
        self.clock.now += 1000.0
        return self.deliver()

    # -- what always holds ----------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check_integrity()
        for rank in range(self.shape.num_ranks):
            for transfer in self.pending[rank]:
                self._check_claimed(transfer)
        for request in self.requests.values():
            if request.state == "running":
                self._check_bytes(request, 0, request.computed, "it computes with")

    def _check_claimed(self, transfer: Transfer) -> None:
        """What a transfer not yet carried out touches belongs to nobody else."""
        for tier, slots in ((transfer.src, transfer.src_slots), (transfer.dst, transfer.dst_slots)):
            if tier == DEVICE:
                held = [self.holds[transfer.group][int(block)] for block in slots]
                assert min(held) > 0, f"{transfer} touches a device block that was let go"
            else:
                pool = self.pool
                free = pool.table.state[slots] == SlotState.FREE
                assert not free.any(), f"{transfer} touches a free slot"
                if tier == transfer.src:
                    assert (pool.table.readers[slots] > 0).all(), (
                        f"{transfer} reads an unpinned slot"
                    )

    def _check_bytes(self, request: Request, first: int, last: int, what: str) -> None:
        """The device blocks that queries at ``last`` and later read hold the right bytes."""
        for g, group in enumerate(self.shape.groups):
            if last % group.stop_tokens:
                continue
            for place in reach.needed(group, last, computed_tokens=first):
                if (place + 1) * group.block_tokens > last:
                    continue  # only partly filled
                block = request.tables[g][place]
                assert block != NO_BLOCK
                for rank in range(self.shape.num_ranks):
                    expected = self._content(request, g, place, rank)
                    found = self.device[rank][g][block].tobytes()
                    assert found == expected, (
                        f"{request.id}, group {g}, rank {rank}: device block {block} at place "
                        f"{place} is not what {what}"
                    )

    # -- what holds in the end ------------------------------------------------------------------

    def drain(self) -> None:
        """Let everything end: nothing may be left claimed, held, waiting or leaked."""
        for _ in range(40):
            self.work_off()
            self.check()
            if not self.scheduler.num_queued and not self.scheduler.num_in_flight:
                break
        assert self.scheduler.num_in_flight == 0
        assert self.scheduler.num_queued == 0
        assert not any(any(counts.values()) for counts in self.holds), "a hold was never released"
        for request in list(self.requests.values()):
            assert request.state != "loading", f"{request.id} waits for a load that never ends"
            if request.state == "waiting":
                assert self.match(request).state is not MatchState.WAIT, (
                    f"{request.id} waits for nobody"
                )
            self.finish(request)
        self.check()
        self._check_empty()
        self.scheduler.close()
        self._check_empty()

    def _check_empty(self) -> None:
        pool, counts = self.pool, self.pool.counts
        pool.check_integrity()
        assert pool.num_leases == 0, f"{pool.num_leases} leases were never ended"
        assert counts.leased == 0
        assert counts.free + counts.cached == counts.total
        assert self.scheduler.num_in_flight == 0
        assert self.scheduler.num_queued == 0
        assert not self.scheduler.hits._being_loaded.any(), "a slot is still said to be loading"

    # -- the parts ------------------------------------------------------------------------------

    def _act_on(self, settled: SettledByName) -> None:
        for request_id in settled.loaded:
            request = self.requests[request_id]
            assert request.state == "loading", f"{request_id} was loaded while {request.state}"
            first, last = request.loading_tokens
            self._note_weights(request, first, last, request.loading_weights)
            self._check_bytes(request, first, last, "it was told to have loaded")
            request.computed = last
            request.state = "running"
            self.num_loaded += 1
        for failure in settled.failed:
            request = self.requests[failure.request_id]
            assert request.state == "loading"
            first, last = request.loading_tokens
            assert (failure.first_token, failure.num_tokens) == (first, last - first)
            assert failure.reason
            self._blank_blocks(request, first)
            request.state = "running"
        self._drop_holds(settled.released)

    def _drop_holds(self, released: Sequence[DeviceBlocks]) -> None:
        for g, blocks in released:
            for block in blocks.tolist():
                assert self.holds[g][block] > 0, f"block {block} was released but not held"
                self.holds[g][block] -= 1
        for g, blocks in released:
            for transfers in self.pending:
                for transfer in transfers:
                    if transfer.group == g and DEVICE in (transfer.src, transfer.dst):
                        at = transfer.src_slots if transfer.src == DEVICE else transfer.dst_slots
                        for block in set(blocks.tolist()) & set(at.tolist()):
                            assert self.holds[g][block] > 0, "released while a transfer needs it"

    def _hold(self, mentioned: Sequence[DeviceBlocks]) -> None:
        for g, blocks in mentioned:
            self.holds[g].update(blocks.tolist())

    def _blank_blocks(self, request: Request, first: int) -> None:
        """A failed load may still be writing: what follows ``first`` moves to other blocks."""
        for g, group in enumerate(self.shape.groups):
            keep = first // group.block_tokens
            for block in request.tables[g][keep:]:
                if block != NO_BLOCK:
                    self.owned[g][block] -= 1
            del request.tables[g][keep:]
        request.computed = min(request.computed, first)

    def _give_up_blocks(self, request: Request) -> None:
        for g, table in enumerate(request.tables):
            for block in table:
                if block != NO_BLOCK:
                    self.owned[g][block] -= 1
        request.tables = [[] for _ in self.shape.groups]

    def _free_blocks(self, g: int) -> list[int]:
        return [
            block
            for block in range(self.shape.num_device_blocks)
            if not self.owned[g][block] and not self.holds[g][block]
        ]

    def _leave_out_unread(self, request: Request, computed: int, num_tokens: int) -> None:
        """No device block where a hit brings nothing, or garbage would look like computed KV."""
        for g, group in enumerate(self.shape.groups):
            read = reach.needed(group, num_tokens, computed_tokens=computed)
            for place in range(computed // group.block_tokens, len(request.tables[g])):
                if place not in read:
                    self.owned[g][request.tables[g][place]] -= 1
                    request.tables[g][place] = NO_BLOCK

    def _grow(self, request: Request, num_tokens: int) -> bool:
        more: list[list[int]] = []
        for g, group in enumerate(self.shape.groups):
            wanted = -(-num_tokens // group.block_tokens) - len(request.tables[g])
            free = self._free_blocks(g)
            if len(free) < wanted:
                return False
            more.append(free[: max(0, wanted)])
        for g, blocks in enumerate(more):
            for block in blocks:
                self.owned[g][block] += 1
                for rank in range(self.shape.num_ranks):
                    self.device[rank][g][block] = POISON
            request.tables[g] += blocks
        return True

    def _compute(self, request: Request, first: int, last: int) -> None:
        self._note_weights(request, first, last, self.weights)
        for g, group in enumerate(self.shape.groups):
            for place in range(first // group.block_tokens, last // group.block_tokens):
                block = request.tables[g][place]
                for rank in range(self.shape.num_ranks):
                    content = self._content(request, g, place, rank)
                    self.device[rank][g][block] = np.frombuffer(content, dtype=np.uint8)

    def _note_weights(self, request: Request, first: int, last: int, weights: int) -> None:
        step = self.shape.hash_tokens
        del request.weights[first // step :]
        request.weights += [weights] * (-(-last // step) - len(request.weights))

    def _content(self, request: Request, g: int, place: int, rank: int) -> bytes:
        """The bytes of one device block: they depend on all that came before, and the weights."""
        end = (place + 1) * self.shape.groups[g].block_tokens
        last = -(-end // self.shape.hash_tokens)
        weights = request.weights[min(last, len(request.weights)) - 1]
        what = f"{request.prompt[:last]} {end} {g} {weights}"
        content = blake2b(f"{what} {rank}".encode(), digest_size=ROW_BYTES).digest()
        self._meanings[content] = (what, rank)
        return content

    def meaning(self, rank: int, content: bytes) -> tuple[str, bool]:
        """What these bytes are, and whether they belong to this rank."""
        what, owner = self._meanings.get(content, ("poison", rank))
        return what, owner == rank

    def _rows(self, rank: int, tier: TierName, group: int) -> np.ndarray:
        return self.device[rank][group] if tier == DEVICE else self.hosts[rank]


def chain_of(numbers: Sequence[int]) -> Keys:
    """A request's chain: each key covers its number and all before it."""
    return Keys.from_bytes(
        [
            blake2b(repr(tuple(numbers[: i + 1])).encode(), digest_size=32).digest()
            for i in range(len(numbers))
        ]
    )


def _poisoned(rows: int) -> np.ndarray:
    return np.full((rows, ROW_BYTES), POISON, dtype=np.uint8)
