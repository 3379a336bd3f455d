"""A serving engine with a prefix cache, its ranks and the tiers below them, all holding bytes.

Larger than a unit test and smaller than a server: it batches nothing and computes nothing, but it
shares device blocks between requests, walks its free queue, preempts, aborts, changes weights, and
has ranks that answer late, never, or wrongly. Every (tokens so far, group, rank, weights) has a
value of its own, so a block in the wrong place cannot look right::

    device[group]   values by rank and block, a reference count and a prefix cache
    host            values by rank and slot
    lower tiers    a reference tier of either kind per rank: it may refuse, lose, or go away

A request that holds a block from before a weights change computes *stained* values from then on.
A stained value that turns up in a pool is the fault this is here to find.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from tests.fakes.by_name import ByName, SettledByName, blocks_of
from tests.fakes.lasting import ShelfTier
from tests.fakes.memory_tiers import KeyedMemoryTier, MemoryTier
from tests.model import request_laws
from tests.model.stage import (
    LONG_AGO,
    STAIN,
    VALUE_BYTES,
    Device,
    RankSide,
    Served,
    Setup,
    Stories,
    Values,
    salt,
    single,
)

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.cache.slots import SlotState
from kvferry.config import Config
from kvferry.core.identity import scope
from kvferry.core.keys import Key, Keys
from kvferry.errors import TransferError
from kvferry.hostmem.slots import HostTier
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.tier import SlotTier, WriteMode, lower_tier
from kvferry.scheduler.transfers import NO_BLOCK, BlockTable
from kvferry.telemetry.stats import SchedulerStats
from kvferry.tiers.contract import Batch, BatchId, Way
from kvferry.tiers.movers import TierMover
from kvferry.tiers.queued import Task
from kvferry.types import (
    DEVICE,
    HOST,
    DeviceBlocks,
    MatchState,
    Outcome,
    Plan,
    Question,
    Rank,
    Receipt,
    TierName,
    Transfer,
)

STORE_TOKENS = 16
"""Where requests are stored late: so small ones would never be stored while they run."""

Shelves = dict[TierName, dict[int, tuple[Key, bytes]]]
"""What one rank's placed tiers hold, by place."""


class Serving:
    """Everything outside the scheduler, for one scheduler. Owns the requests and all bytes."""

    def __init__(self, setup: Setup, **settings: object) -> None:
        self.setup = setup
        self.now = 0.0
        self.stories = Stories(setup)
        self.groups = setup.groups
        self.device_groups = tuple(single(group) for group in setup.groups)
        self.alignment = math.lcm(
            setup.hash_tokens, *(group.block_tokens for group in self.device_groups)
        )
        self.config = Config.from_dict(
            {
                **({"max_storing_blocks": max(1, setup.num_blocks // 4)} if setup.bounded else {}),
                "load_deadline": 5.0,
                "store_deadline": 5.0,
                "promote_deadline": 3.0,
                "lookup_deadline": 1.0,
                "match_deadline": 8.0,
                "store_threshold": setup.store_threshold,
                "load_policy": setup.load_policy,
                **settings,
            }
        )
        self.rank_salts = np.array([salt(LONG_AGO + r) for r in range(setup.num_ranks)])
        self.num_lives = 0
        self.past: list[SchedulerStats] = []
        self.num_restored = 0
        self._newest_weights = 0
        self._begin_life([{} for _ in range(setup.num_ranks)])
        self.num_arrived = 0
        self.num_finished = 0
        self.num_loads = 0
        self.num_failed = 0
        self.num_pieces = 0
        self.num_parts = 0
        self.num_left = self.num_late = self.num_continued = 0
        self._known: dict[tuple[int, int], tuple[int, int]] = {}
        for story, keys in enumerate(self.stories.keys):
            for g, group in enumerate(self.groups):
                ratio = group.block_tokens // setup.hash_tokens
                for slot, key in enumerate(keys[ratio - 1 :: ratio]):
                    self._known[int.from_bytes(key, "little"), g] = (story, slot)

    def _begin_life(self, shelves: Sequence[Shelves]) -> None:
        """A process with nothing but its settings, the weights as they are loaded, and what is on
        each rank's shelves.
        """
        setup = self.setup
        self.num_lives += 1
        self.weights = 0
        self.pool = Pool(setup.num_slots)
        self.ranks = [self._new_rank(number, shelves[number]) for number in range(setup.num_ranks)]
        self.tiers = tuple(
            lower_tier(
                name,
                num_places,
                write,
                recovered=[rank.movers[name].recovered() for rank in self.ranks],
            )
            for name, num_places, write in self._specs
        )
        for tier in self.tiers:
            if tier.pool is not None:
                slots = np.flatnonzero(tier.pool.table.state[:-1] == SlotState.CACHED)
                for slot, key in zip(
                    slots.tolist(), tier.pool.table.index.keys_of(slots), strict=True
                ):
                    for shelf in (each[tier.name] for each in shelves):
                        assert shelf[slot][0] == key, "a rank does not have what was restored"
        self.num_restored += sum(
            tier.num_restored for tier in self.tiers if isinstance(tier, SlotTier)
        )
        with patch("kvferry.scheduler.stores.STORE_TOKENS", STORE_TOKENS):
            self.scheduler = ByName(
                self.pool,
                setup.groups,
                config=self.config,
                num_ranks=setup.num_ranks,
                hash_block_tokens=setup.hash_tokens,
                num_device_blocks=setup.num_blocks if setup.bounded else None,
                block_bytes=[VALUE_BYTES] * len(setup.groups),
                tiers=self.tiers,
                joins_loads=setup.joins_loads,
                loads_early=setup.piece_slots > 0,
                engine=self if setup.stores_late else None,
                clock=lambda: self.now,
            )
        if setup.piece_slots:
            self.scheduler.lower.piece_slots = setup.piece_slots
            self.scheduler._requests.promoter._share = lambda tiers: 1.0  # type: ignore[method-assign]
        self.devices = [Device(setup.num_blocks, setup.num_ranks) for _ in setup.groups]
        self.host = [rank.host.rows.view(np.uint64)[:, 0] for rank in self.ranks]
        self.requests: dict[str, Served] = {}
        self.left: dict[Request, Served] = {}
        self.receipts: list[Receipt] = []
        self.num_held = 0
        """References to device blocks that copies, and what ended requests left, have."""

    @property
    def _specs(self) -> list[tuple[TierName, int | None, WriteMode]]:
        return [
            (TierName(f"lower{at}"), num_places, write)
            for at, (num_places, write) in enumerate(self.setup.tiers)
        ]

    def _new_rank(self, number: int, shelves: Shelves) -> RankSide:
        rank = RankSide(Rank(number), HostTier(self.setup.num_slots, VALUE_BYTES))
        for name, num_places, _ in self._specs:
            tier: MemoryTier | KeyedMemoryTier
            if num_places is None:
                tier = KeyedMemoryTier(VALUE_BYTES, name=name)
            else:
                tier = ShelfTier(shelves.setdefault(name, {}), num_places, VALUE_BYTES, name)
            tier.fault = rank.fault
            rank.tiers[name] = tier
            rank.movers[name] = TierMover(rank.host, tier, rank=rank.rank)
        return rank

    def restart(self, lose: Callable[[int], bool]) -> None:
        """The server dies, whatever it was doing, and comes back with the weights it had at first.

        ``lose`` says for each place of each rank whether what lay there did not reach the medium.
        """
        self.past.append(self.scheduler.stats())
        shelves: list[Shelves] = []
        for rank in self.ranks:
            kept: Shelves = {}
            for name, tier in rank.tiers.items():
                if isinstance(tier, ShelfTier):
                    kept[name] = {
                        at: block
                        for at, block in tier.shelf.items()
                        if at in tier._blocks and not lose(at)
                    }
            shelves.append(kept)
        self._begin_life(shelves)

    # -- requests -------------------------------------------------------------------------------

    def arrive(self, story: int, prompt: int, answer: int) -> Served:
        self.num_arrived += 1
        prompt = max(1, min(prompt, self.setup.longest - 1))
        request = Served(
            f"r{self.num_arrived}",
            story % self.setup.num_stories,
            prompt,
            min(self.setup.longest, prompt + max(1, answer)),
            [[] for _ in self.groups],
        )
        self.requests[request.id] = request
        return request

    def admit(self, request: Served) -> MatchState:
        """Look a waiting request up, and start it if there is room for what it gets."""
        assert request.state == "waiting"
        # It may have been computed further before it was preempted; one token is always left.
        wanted = max(request.prompt, request.computed) - 1
        device = self._device_hit(request, wanted)
        keys = self.stories.keys[request.story][: wanted // self.setup.hash_tokens]
        match = self.scheduler.match(request.id, keys, computed_tokens=device, max_tokens=wanted)
        assert match.computed_tokens == device
        assert (match.state is MatchState.HIT) == (match.to_load > 0)
        assert match.num_tokens <= max(wanted, device)
        if match.state is MatchState.WAIT:
            return match.state
        needed = [
            reach.needed(group, match.num_tokens, computed_tokens=device)
            if match.to_load
            else range(0)
            for group in self.groups
        ]
        tables = self._acquire(request, device)
        if any(len(n) > len(d.free) for n, d in zip(needed, self.devices, strict=True)):
            self._give_back(tables)
            if self.scheduler.deferred is not None:
                self.scheduler.deferred.is_wanted = True
            return MatchState.WAIT
        request.tables = tables
        request.computed = device
        request.published = device
        request.stained = False
        request.state = "running"
        if match.state is MatchState.HIT:
            self._load(request, needed, device, match.num_tokens)
        return match.state

    def _load(self, request: Served, needed: Sequence[range], device: int, num_tokens: int) -> None:
        for g, (table, places) in enumerate(zip(request.tables, needed, strict=True)):
            end = num_tokens // self.groups[g].block_tokens
            table += [NO_BLOCK] * (end - len(places) - len(table))
            table += self.devices[g].allocate(len(places))
        held = self.scheduler.load(request.id, request.tables)
        if not held:
            self._cut(request, device)
            return
        self._hold(held)
        request.state = "loading"
        request.loading = (device, num_tokens, self.weights)

    def compute(self, request: Served, count: int) -> bool:
        """Compute so many tokens more, preempting later requests for room; finishes at the end."""
        assert request.state == "running"
        upto = min(request.target, request.computed + count)
        while not self._can_grow(request, upto):
            victims = [r for r in self.requests.values() if r.state == "running"]
            if victims[-1] is request:
                return False
            self.preempt(victims[-1])
        version = self.weights + (STAIN if request.stained else 0)
        for g, (group, pool) in enumerate(zip(self.groups, self.devices, strict=True)):
            table = request.tables[g]
            first = request.computed // group.block_tokens
            table += pool.allocate(max(0, -(-upto // group.block_tokens) - len(table)))
            whole = range(first, upto // group.block_tokens)
            blocks = table[whole.start : whole.stop]
            self._fill(
                g, blocks, self.stories.values[request.story][g][whole.start : whole.stop], version
            )
        self.scheduler.note_prefill(upto - request.computed, (upto - request.computed) * 2e-6)
        request.computed = upto
        self._publish(request)
        self._store(request)
        self._trim(request)
        if upto == request.target:
            self.finish(request)
        return True

    def _fill(self, g: int, blocks: list[int], values: Values, version: int) -> None:
        pool = self.devices[g]
        pool.expected[blocks] = values ^ salt(version)
        pool.values[:, blocks] = pool.expected[blocks] ^ self.rank_salts[:, None]

    def finish(self, request: Served) -> None:
        if self.setup.stores_late:
            self._leave(request)
        else:
            self._store(request)
            self.scheduler.finish(request.id)
        self._give_back(request.tables)
        del self.requests[request.id]
        self.num_finished += 1

    def _leave(self, request: Served) -> None:
        ours = self.scheduler.named.pop(request.id)
        self.left[ours] = request
        held = ours.leave(request.computed)
        self._hold([DeviceBlocks(part.group, part.blocks) for part in held])
        self.num_left += ours.state is State.LEFT

    def abort(self, request: Served) -> None:
        self.scheduler.abort(request.id)
        self._give_back(request.tables)
        del self.requests[request.id]

    def preempt(self, request: Served) -> None:
        self.scheduler.preempt(request.id)
        self._give_back(request.tables)
        request.tables = [[] for _ in self.groups]
        request.state = "waiting"

    def reset(self) -> None:
        """New weights, in place. The engine forgets its own cache, and who runs is stained."""
        self._newest_weights += 1
        self.weights = self._newest_weights
        for pool in self.devices:
            pool.forget_all()
        for request in self.requests.values():
            request.stained = request.state != "waiting"
        # As random as any, and the same when a life is told again: faults go by keys.
        epoch = int(salt(self.weights)) >> 1
        with patch("kvferry.scheduler.scheduler.new_epoch", lambda before: epoch):
            self.scheduler.reset()

    # -- what the scheduler asks of the engine's blocks, where requests are stored late ------------

    @property
    def evicts(self) -> bool:
        heads = [next(iter(pool.free), None) for pool in self.devices]
        return any(
            head is None or head in pool.cached_as
            for head, pool in zip(heads, self.devices, strict=True)
        )

    @property
    def num_free(self) -> int:
        return min(len(pool.free) for pool in self.devices)

    def tables(self, request: Request, num_tokens: int, from_token: int) -> list[BlockTable]:
        tables = zip(self.left[request].tables, self.groups, strict=True)
        return [table[: num_tokens // group.block_tokens] for table, group in tables]

    def remains(self, request: Request, num_tokens: int, from_token: int) -> list[BlockTable]:
        values = self.stories.values[self.left[request].story]
        return [
            [pool.cache.get(int(value), NO_BLOCK) for value in own[: num_tokens // g.block_tokens]]
            for own, pool, g in zip(values, self.devices, self.groups, strict=True)
        ]

    # -- the device -----------------------------------------------------------------------------

    def _device_hit(self, request: Served, wanted: int) -> int:
        if not self.setup.joins_loads:
            return 0
        present = [
            np.array([int(v) in pool.cache for v in values], dtype=bool)
            for values, pool in zip(self.stories.values[request.story], self.devices, strict=True)
        ]
        return reach.longest_hit(self.device_groups, present, wanted, alignment=self.alignment)

    def _acquire(self, request: Served, num_tokens: int) -> list[list[int]]:
        tables: list[list[int]] = []
        for g, (group, pool) in enumerate(zip(self.groups, self.devices, strict=True)):
            places = reach.needed(self.device_groups[g], num_tokens)
            values = self.stories.values[request.story][g][places.start : places.stop]
            blocks = [pool.cache[int(value)] for value in values]
            pool.hold(blocks)
            skipped = places.start if places else num_tokens // group.block_tokens
            tables.append([NO_BLOCK] * skipped + blocks)
        return tables

    def _can_grow(self, request: Served, num_tokens: int) -> bool:
        return all(
            -(-num_tokens // group.block_tokens) - len(table) <= len(pool.free)
            for group, table, pool in zip(self.groups, request.tables, self.devices, strict=True)
        )

    def _publish(self, request: Served) -> None:
        if request.stained or not self.setup.joins_loads:
            return
        for g, (group, pool) in enumerate(zip(self.groups, self.devices, strict=True)):
            values = self.stories.values[request.story][g]
            ratio = group.block_tokens // self.setup.hash_tokens
            for place in range(
                request.published // group.block_tokens, request.computed // group.block_tokens
            ):
                block = request.tables[g][place]
                if block != NO_BLOCK:
                    end = (place + 1) * ratio - 1
                    key = self.stories.keys[request.story][end] if ratio else b""
                    pool.publish(block, int(values[place]), key)
        request.published = request.computed

    def _store(self, request: Served) -> None:
        if request.state != "running":
            return
        keys, rests = self.stories.keys[request.story], self.scheduler.deferred
        if rests is not None:
            num_left, ours = len(rests), self.scheduler.called(request.id, keys)
            ours.run()
            self.num_continued += len(rests) < num_left
            if not ours.is_worth_storing(request.computed):
                return
        tables, computed = request.tables, request.computed
        self._hold(self.scheduler.store(request.id, keys, tables, computed))

    def _trim(self, request: Served) -> None:
        for group, table, pool in zip(self.groups, request.tables, self.devices, strict=True):
            passed = max(0, int(group.first_token(request.computed))) // group.block_tokens
            pool.release([block for block in table[:passed] if block != NO_BLOCK])
            table[:passed] = [NO_BLOCK] * min(passed, len(table))

    def _cut(self, request: Served, num_tokens: int) -> None:
        for group, table, pool in zip(self.groups, request.tables, self.devices, strict=True):
            first = -(-num_tokens // group.block_tokens)
            pool.release([block for block in table[first:] if block != NO_BLOCK])
            del table[first:]
        # Places a window has passed have no block, but they are there.

    def _give_back(self, tables: list[list[int]]) -> None:
        for table, pool in zip(tables, self.devices, strict=True):
            pool.release([block for block in table if block != NO_BLOCK])
            table.clear()

    def _hold(self, held: Iterable[DeviceBlocks]) -> None:
        for g, blocks in held:
            self.devices[g].hold(blocks.tolist())
            self.num_held += len(blocks)

    # -- the copies -----------------------------------------------------------------------------

    def dispatch(self) -> int:
        """End of a step: hand the plan to every rank."""
        if self.scheduler.deferred is not None:
            is_idle = not any(each.state == "running" for each in self.requests.values())
            ordered = self.scheduler.store_left(is_idle=is_idle)
            self.num_late += len(ordered)
            self._hold(blocks_of(ordered))
        plan = pickle.loads(pickle.dumps(self.scheduler.plan()))
        for rank in self.ranks:
            self._hand_over(rank, plan)
        return len(plan.transfers) + len(plan.questions)

    def _hand_over(self, rank: RankSide, plan: Plan) -> None:
        for name in plan.forget:
            rank.movers[name].forget()
        orders: list[Transfer | Question] = [*plan.questions, *plan.transfers]
        rank.todo += orders
        for order in orders:
            tier = self._lower_tier(order)
            if tier is not None:
                rank.submitted[order.id] = rank.tiers[tier]._generation

    def _lower_tier(self, order: Transfer | Question) -> TierName | None:
        if isinstance(order, Question):
            return order.tier
        ends = {order.src, order.dst} - {DEVICE, HOST}
        return ends.pop() if ends else None

    def execute(self, rank: RankSide, at: int, outcome: str = "ok") -> None:
        """One rank does one of its orders.

        ``fail`` leaves nonsense behind, ``refuse`` does not; ``some`` blocks fail below the host.
        """
        transfer = rank.todo.pop(at)
        tier = self._lower_tier(transfer)
        if tier is not None:
            self.receipts.append(self._execute_below(rank, tier, transfer, outcome))
            return
        assert isinstance(transfer, Transfer)
        try:
            self._copy(rank, transfer, outcome)
        except TransferError as error:
            receipt = Receipt(transfer.id, rank.rank, Outcome.FAILED, str(error))
        else:
            num_bytes = len(transfer) * VALUE_BYTES
            receipt = Receipt(transfer.id, rank.rank, Outcome.OK, "", num_bytes, 1e-6 * num_bytes)
        self.receipts.append(receipt)

    def _copy(self, rank: RankSide, transfer: Transfer, outcome: str) -> None:
        src, dst, host = transfer.src_slots, transfer.dst_slots, self.host[rank.rank]
        device = self.devices[transfer.group]
        values = device.values[rank.rank]
        touched = (src if transfer.src == DEVICE else dst).tolist()
        assert all(device.holders[block] for block in touched), "a copy outlived its hold"
        if outcome == "refuse":
            raise TransferError("injected: refused")
        if transfer.dst == DEVICE:
            values[dst] = host[src] if outcome == "ok" else 0xBAD
        else:
            host[dst] = values[src] if outcome == "ok" else 0xBAD
        if outcome != "ok":
            raise TransferError("injected: half-way")

    def _execute_below(
        self, rank: RankSide, tier: TierName, order: Transfer | Question, outcome: str
    ) -> Receipt:
        """As the tier's own thread would, but now: it may have waited for long."""
        rank_tier, mover = rank.tiers[tier], rank.movers[tier]
        rank.mood = outcome
        if isinstance(order, Question):
            batch = Batch(BatchId(order.id), Way.FIND, Keys(order.keys), math.inf)
        else:
            batch = replace(mover._batch(order), deadline=math.inf)
            if order.dst == HOST:  # what a read leaves where it fails is anything
                self.host[rank.rank][order.dst_slots] = 0xBAD
        generation = rank.submitted.pop(order.id, rank_tier._generation)
        mover._under_way[batch.id] = len(batch)
        return mover._receipt(rank_tier._carry_out(Task(batch, generation)))

    def settle(self, receipts: Iterable[Receipt] = ()) -> None:
        """Hand receipts over and act on the answer."""
        receipts = list(receipts)
        for receipt in receipts:
            self.receipts.remove(receipt)
        self._act(self.scheduler.settle(receipts))
        coming = self.scheduler._requests.promoter
        for load in coming.loads.values():
            assert not load.is_open or self.now < load.since + coming._patience, (
                "a load waits for a tier that says nothing"
            )

    def _act(self, settled: SettledByName) -> None:
        self._hold(settled.ordered)
        self.num_pieces += len(settled.ordered)
        for request_id in settled.loaded:
            request = self.requests[request_id]
            self._loaded(request, request.loading[1])
            self.num_loads += 1
        for failed in settled.failed:
            request = self.requests[failed.request_id]
            assert request.state == "loading"
            first, last, _ = request.loading
            assert failed.first_token + failed.num_tokens == last
            if not self.setup.piece_slots:
                assert first == failed.first_token
            assert first <= failed.first_token < last
            self.num_failed += 1
            self._cut(request, failed.first_token)
            self._loaded(request, failed.first_token)  # what came before that is there
            self.num_parts += failed.first_token > first
        for g, blocks in settled.released:
            self.devices[g].release(blocks.tolist())
            self.num_held -= len(blocks)

    def _loaded(self, request: Served, last: int) -> None:
        assert request.state == "loading"
        first, _, weights = request.loading
        for g, group in enumerate(self.groups):
            places = range(0)
            if last > first:
                places = reach.needed(group, last, computed_tokens=first)
            blocks = request.tables[g][places.start : places.stop]
            values = self.stories.values[request.story][g][places.start : places.stop]
            expected = values ^ salt(weights)
            self.devices[g].expected[blocks] = expected
            found = self.devices[g].values[:, blocks]
            assert np.array_equal(found, expected ^ self.rank_salts[:, None]), (
                f"{request.id}: group {g} was loaded with other bytes than it should have"
            )
        request.computed = last
        request.state = "running"
        self._publish(request)

    def lose_bytes(self, tier: int, slots: Sequence[int]) -> None:
        """A medium fails: some of what a tier holds is gone, on all ranks."""
        for rank in self.ranks:
            rank_tier = rank.tiers[self.tiers[tier].name]
            there = sorted(rank_tier._blocks)
            names = [there[slot % len(there)] for slot in slots] if there else []
            rank_tier._lose(names)

    def tier_goes(self, tier: int, rank: RankSide, reason: str) -> None:
        """A tier goes away on one rank, and the scheduler hears of it; no reason: it is back."""
        name = self.tiers[tier].name
        if reason:
            rank.tiers[name].go_away(reason)
        else:
            rank.tiers[name].come_back()
        change = rank.movers[name].health()
        if change is not None:
            self.scheduler.note_health(change)

    # -- what always holds ----------------------------------------------------------------------

    def check(self) -> None:
        """The bookkeeping is right and every promise is kept, in all pools and on the device."""
        self.left = {r: served for r, served in self.left.items() if r.state is not State.ENDED}
        request_laws.check(self.scheduler, [*self.scheduler.named.values(), *self.left])
        self._check_device()
        self._check_promises()
        self._check_pipelined()

    def _check_pipelined(self) -> None:
        loads = self.scheduler._requests.promoter.loads
        held = sum(load.end - load.first for load in loads.values() if load.is_open)
        assert not self.setup.bounded or held <= self.setup.num_blocks // 2
        for request, load in loads.items():
            assert request.state is State.LOADING
            assert load.first <= load.good <= load.end
            assert load.first < load.sent <= load.end
            assert load.is_open or request.loading or load.reason

    def _check_device(self) -> None:
        for pool in self.devices:
            held = sum(1 for holders in pool.holders if holders)
            assert held + len(pool.free) == len(pool.holders)
            assert not any(pool.holders[block] for block in pool.free)
        for request in self.requests.values():
            if request.state == "running":
                self._check_request(request)

    def _check_request(self, request: Served) -> None:
        for g, group in enumerate(self.groups):
            whole = request.computed // group.block_tokens
            table = np.array(request.tables[g][:whole], dtype=np.int64)
            places = np.flatnonzero(table != NO_BLOCK)
            blocks = table[places]
            pool = self.devices[g]
            expected = pool.expected[blocks]
            if not request.stained:
                values = self.stories.values[request.story][g][places]
                assert np.array_equal(expected, values ^ salt(self.weights)), (
                    f"{request.id} shares a block of other tokens or other weights"
                )
            assert np.array_equal(pool.values[:, blocks], expected ^ self.rank_salts[:, None]), (
                f"{request.id}: a block of group {g} was overwritten while in use"
            )

    def _check_promises(self) -> None:
        """What can be matched is there: on every rank, of these weights, of these tokens."""
        hosts: list[tuple[Pool, TierName | None]] = [(self.pool, None)]
        hosts += [(tier.pool, tier.name) for tier in self.tiers if tier.pool is not None]
        if not self.scheduler.transfers._forget:
            self._check_keyed()
        for pool, name in hosts:
            slots = np.flatnonzero(pool.table.state[:-1] == SlotState.CACHED)
            for slot, key in zip(slots.tolist(), pool.table.index.keys_of(slots), strict=True):
                if name is not None and self.num_lives > 1 and not self._is_known(key):
                    continue  # of another life's later weights: nobody can ask for it
                expected = self._expected(key)
                for rank, own in zip(self.ranks, self.rank_salts, strict=True):
                    if name is None:
                        found = self.host[rank.rank][slot]
                    else:
                        held = rank.tiers[name]._blocks.get(slot)
                        if held is None:
                            continue  # lost: a read of it says so
                        found = np.frombuffer(held, dtype=np.uint64)[0]
                    assert found == expected ^ own, (
                        f"slot {slot} of {name or 'the host'} promises other bytes than it has"
                    )

    def _check_keyed(self) -> None:
        """What a tier finds by its key is right, and of these weights, or was forgotten."""
        for tier in self.tiers:
            if tier.pool is None:
                for rank, own in zip(self.ranks, self.rank_salts, strict=True):
                    for key, held in rank.tiers[tier.name]._blocks.items():
                        found = np.frombuffer(held, dtype=np.uint64)[0]
                        assert found == self._expected(key) ^ own

    def _is_known(self, key: bytes) -> bool:
        word = int.from_bytes(key, "little")
        masks = [scope(self.scheduler.epoch, g) for g in range(len(self.groups))]
        return any(
            (word ^ int.from_bytes(mask, "little"), g) in self._known
            for g, mask in enumerate(masks)
        )

    def _expected(self, key: bytes) -> np.uint64:
        for g in range(len(self.groups)):
            mask = int.from_bytes(scope(self.scheduler.epoch, g), "little")
            known = self._known.get((int.from_bytes(key, "little") ^ mask, g))
            if known is not None:
                story, slot = known
                value: np.uint64 = self.stories.values[story][g][slot] ^ salt(self.weights)
                return value
        raise AssertionError("a pool has a key that nobody ever asked for under these weights")

    # -- what holds in the end ------------------------------------------------------------------

    def quiesce(self, max_steps: int = 400) -> None:
        """A calm hour: whatever happened before, every request finishes, and soon.

        Ranks that hang stay so.
        """
        for _ in range(max_steps):
            if not self.requests:
                break
            self.step()
        assert not self.requests, f"{len(self.requests)} requests wait for ever: {self.describe()}"

    def step(self, outcome: str = "ok", hung: Sequence[int] = ()) -> None:
        """One step of a plain serving loop: settle, compute, admit, dispatch, copy.

        Who runs comes before who waits: else two that load in turn take every block that comes free
        from a third, which then waits for ever.
        """
        self.now += 0.25
        self.settle(list(self.receipts))
        running = [each for each in self.requests.values() if each.state == "running"]
        for request in running:
            if request.state == "running":
                self.compute(request, 16)
        for request in list(self.requests.values()):
            if request.state == "waiting":
                self.admit(request)
        for request in list(self.requests.values()):
            if request.state == "running" and request not in running:
                self.compute(request, 16)
        self.dispatch()
        for rank in self.ranks:
            while rank.todo and rank.rank not in hung:
                self.execute(rank, 0, outcome)

    def drain(self) -> None:
        """Let everything end; then nothing may be claimed, held, queued or waited for."""
        for _ in range(100):
            self.dispatch()
            for rank in self.ranks:
                while rank.todo:
                    self.execute(rank, 0)
            self.settle(list(self.receipts))
            scheduler = self.scheduler
            if not (scheduler.num_in_flight or scheduler.num_queued or scheduler.deferred):
                break
        self.check()
        scheduler = self.scheduler
        assert scheduler.num_in_flight == 0
        assert scheduler.num_queued == 0
        for request in list(self.requests.values()):
            assert request.state != "loading", f"{request.id} waits for a load that is over"
            self.abort(request)
        request_laws.check_nothing_left(scheduler)
        for pool in scheduler._pools:
            assert pool.counts.leased == 0
        for device in self.devices:
            assert not any(device.holders), "a device block is still held"
        assert not scheduler._requests.promoter.loads

    def describe(self) -> str:
        states = [f"{r.id} {r.state} {r.computed}/{r.target}" for r in self.requests.values()]
        return f"{states}, {self.scheduler.num_in_flight} in flight"
