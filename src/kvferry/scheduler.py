"""The scheduler half: match, plan, settle. Decides which blocks move; never touches a byte.

::

    match -> pinned hit -> load  \\
                                  plan => workers => settle
    store ---------------------- /

The engine speaks in tokens and hands over block tables; which slots move follows from the groups.
A request id may be used again once the request is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvferry import reach
from kvferry.answers import DeviceBlocks, FailedLoad, Landing, Match, MatchState, Settled
from kvferry.config import Config
from kvferry.errors import ClosedError, InputError
from kvferry.flight import Flight, Flights
from kvferry.keys import Keys
from kvferry.lease import Lease
from kvferry.pool import Pool
from kvferry.request import GroupKeys, Hit, Loading, RequestRecord
from kvferry.stats import MatchCounts, SchedulerStats
from kvferry.types import (
    DEVICE,
    HOST,
    Plan,
    Rank,
    Receipt,
    RequestId,
    SlotArray,
    Transfer,
    TransferId,
    as_slots,
)

NO_BLOCK = -1
"""In a block table: the engine keeps no device block here (outside a window, say)."""

BlockTable = Sequence[int] | npt.NDArray[np.integer]
"""One group's device blocks of a request, by position."""


@dataclass(frozen=True, eq=False)
class _Order:
    """A copy decided on but not yet in a plan."""

    group: int
    lease: Lease
    device_blocks: SlotArray
    host_slots: SlotArray


@dataclass(frozen=True, eq=False)
class _LoadOrder(_Order):
    """A load: unlike a store, it belongs to a request that waits for it."""

    request_id: RequestId
    transfer_id: TransferId


class Scheduler:
    """One engine's scheduler half. Owns requests, hits and flights; the pool owns the slots.

    Not thread-safe: call it from the engine's scheduling thread. Deadlines are looked at in
    :meth:`settle`, so call that every step even without receipts.
    """

    def __init__(
        self,
        pool: Pool,
        groups: Sequence[reach.Group],
        *,
        config: Config | None = None,
        num_ranks: int = 1,
        hash_block_tokens: int | None = None,
        joins_loads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``joins_loads`` says that the engine shares device blocks between requests.

        A block that one request loads then serves the others once it has landed, so a second
        request that wants it waits and loads nothing.
        """
        if num_ranks < 1:
            raise InputError(f"num_ranks must be at least 1, got {num_ranks}")
        self.pool = pool
        self.groups = tuple(groups)
        self.epoch = 0
        self._config = config if config is not None else Config()
        hash_tokens = hash_block_tokens or min(group.slot_tokens for group in self.groups)
        self._alignment = reach.hit_alignment(self.groups, hash_block_tokens=hash_tokens)
        self._hash_tokens = hash_tokens
        self._keys = [GroupKeys(group, g, hash_tokens) for g, group in enumerate(self.groups)]
        self._joins_loads = joins_loads
        self._clock = clock
        self._flights = Flights(num_ranks)
        self._requests: dict[RequestId, RequestRecord] = {}
        self._loads: list[_LoadOrder] = []
        self._stores: list[_Order] = []
        self._loaders: dict[TransferId, RequestId] = {}
        self._being_loaded = np.zeros(pool.num_slots, dtype=np.int32)
        self._released: list[DeviceBlocks] = []
        self._counts = MatchCounts()
        self._step = 0
        self._closed = False

    # -- match ----------------------------------------------------------------------------------

    def match(
        self,
        request_id: RequestId,
        keys: Keys,
        *,
        computed_tokens: int = 0,
        max_tokens: int | None = None,
    ) -> Match:
        """How many tokens of this request can be had without computing them; pins their slots.

        ``keys`` is the request's chain; the engine itself has the first ``computed_tokens``.
        ``max_tokens`` caps the answer (a request must compute at least one token itself). Asking
        again while nothing changed is cheap. A pinned hit is let go by ``load``, ``finish``,
        ``preempt``, or its deadline.
        """
        self._require_open()
        covered = len(keys) * self._hash_tokens
        max_tokens = covered if max_tokens is None else min(max_tokens, covered)
        record = self._record(request_id)
        if record.loading is not None:
            return Match(MatchState.WAIT, computed_tokens, computed_tokens)
        if record.hit is not None and self._still_holds(record.hit, computed_tokens, max_tokens):
            return record.hit.match
        record.let_go()
        record.hit = self._look_up(keys, computed_tokens, max_tokens)
        if not record.counted:
            record.counted = True
            self._counts.queries += 1
            self._counts.asked_tokens += max(0, max_tokens - computed_tokens)
        return record.hit.match

    def _still_holds(self, hit: Hit, computed_tokens: int, max_tokens: int) -> bool:
        if hit.match.computed_tokens != computed_tokens or hit.max_tokens != max_tokens:
            return False
        if hit.match.state is MatchState.WAIT:
            return bool(self._being_loaded.take(hit.joined).any())
        if hit.generation != self.pool.generation:
            if bool(self.pool.cached(hit.watch).all()):
                return False
            hit.generation = self.pool.generation
        hit.deadline = self._clock() + self._config.match_deadline
        return True

    def _look_up(self, keys: Keys, computed_tokens: int, max_tokens: int) -> Hit:
        generation = self.pool.generation
        present = [
            self.pool.cached(group_keys.cut(keys, range(group_keys.count(keys)), self.epoch))
            for group_keys in self._keys
        ]
        num_tokens = reach.longest_hit(
            self.groups,
            present,
            max_tokens,
            alignment=self._alignment,
            computed_tokens=computed_tokens,
        )
        leases = tuple(
            self._pin(g, keys, num_tokens, computed_tokens) for g in range(len(self.groups))
        )
        hit = Hit(
            match=Match(MatchState.HIT, num_tokens, computed_tokens),
            max_tokens=max_tokens,
            leases=leases,
            joined=self._joined(leases),
            watch=self._watch(keys, present, num_tokens),
            generation=generation,
            deadline=self._clock() + self._config.match_deadline,
        )
        if len(hit.joined):
            hit.decline(MatchState.WAIT)
        elif num_tokens <= computed_tokens:
            hit.decline(MatchState.MISS)
        return hit

    def _joined(self, leases: Sequence[Lease | None]) -> SlotArray:
        """The slots of a hit that another request is loading right now."""
        pinned = [lease.slots for lease in leases if lease is not None]
        if not pinned or not self._joins_loads:
            return as_slots(())
        slots = np.concatenate(pinned)
        return slots[self._being_loaded.take(slots) > 0]

    def _pin(self, group: int, keys: Keys, num_tokens: int, computed_tokens: int) -> Lease | None:
        slots = reach.needed(self.groups[group], num_tokens, computed_tokens=computed_tokens)
        if num_tokens <= computed_tokens or not slots:
            return None
        return self.pool.pin(self._keys[group].cut(keys, slots, self.epoch))

    def _watch(self, keys: Keys, present: Sequence[npt.NDArray[np.bool_]], num_tokens: int) -> Keys:
        """Keys that must be cached before a hit longer than ``num_tokens`` is possible."""
        watch = Keys.empty()
        for g, group in enumerate(self.groups):
            if isinstance(group, reach.FullAttention):
                missing = np.flatnonzero(~present[g][num_tokens // group.slot_tokens :])
                if len(missing):
                    first = num_tokens // group.slot_tokens + int(missing[0])
                    watch += self._keys[g].cut(keys, range(first, first + 1), self.epoch)
        return watch

    # -- load and store ---------------------------------------------------------------------------

    def load(self, request_id: RequestId, tables: Sequence[BlockTable]) -> tuple[DeviceBlocks, ...]:
        """Order the pinned hit of a request into its device blocks; it goes with the next plan.

        ``tables[g]`` is the request's whole block table of group g, long enough for the hit.
        Returns the device blocks written: hold each until ``settle`` releases it. Empty if the
        hit was lost meanwhile (a reset, its deadline): the tokens must be computed then.
        """
        self._require_open()
        record = self._record(request_id)
        hit = record.hit
        if hit is None or hit.match.state is not MatchState.HIT:
            return ()
        orders = [
            self._load_order(request_id, g, hit, lease, table)
            for g, (lease, table) in enumerate(zip(hit.leases, self._tables(tables), strict=True))
            if lease is not None
        ]
        record.hit = None
        record.loading = Loading(hit.match, {order.transfer_id for order in orders})
        for order in orders:
            self._loaders[order.transfer_id] = request_id
            self._being_loaded[order.lease.slots] += 1
        self._loads += orders
        self._counts.hit_tokens += hit.match.to_load
        return tuple(DeviceBlocks(order.group, order.device_blocks) for order in orders)

    def _load_order(
        self, request_id: RequestId, g: int, hit: Hit, lease: Lease, table: BlockTable
    ) -> _LoadOrder:
        group, match = self.groups[g], hit.match
        blocks = reach.needed_device_blocks(
            group, match.num_tokens, computed_tokens=match.computed_tokens
        )
        if len(table) < blocks.stop:
            raise InputError(
                f"request {request_id!r}: group {g}'s block table has {len(table)} blocks, the hit "
                f"of {match.num_tokens} tokens needs {blocks.stop}"
            )
        first_slot = blocks.start // group.blocks_per_slot
        places = np.arange(blocks.start, blocks.stop)
        slots = lease.slots[places // group.blocks_per_slot - first_slot]
        return _LoadOrder(
            group=g,
            lease=lease,
            device_blocks=as_slots(table[blocks.start : blocks.stop]),
            host_slots=slots * group.blocks_per_slot + places % group.blocks_per_slot,
            request_id=request_id,
            transfer_id=self._flights.new_id(),
        )

    def store(
        self,
        request_id: RequestId,
        keys: Keys,
        tables: Sequence[BlockTable],
        num_tokens: int,
    ) -> tuple[DeviceBlocks, ...]:
        """Order what is new of the first ``num_tokens`` of a request into the pool.

        Call it once the compute of these tokens is queued on the device. Whole slots only; what is
        stored already, on its way, or finds no room is left out. Returns the device blocks read:
        hold each until ``settle`` releases it.
        """
        self._require_open()
        record = self._record(request_id)
        if record.outdated:
            return ()
        num_tokens = min(num_tokens, len(keys) * self._hash_tokens)
        orders = []
        for g, table in enumerate(self._tables(tables)):
            done = num_tokens // self.groups[g].slot_tokens
            if done > record.stored[g]:
                order = self._store_order(g, keys, range(record.stored[g], done), table)
                record.stored[g] = done
                orders += [order] if order is not None else []
        self._stores += orders
        return tuple(DeviceBlocks(o.group, o.device_blocks) for o in orders)

    def _store_order(self, g: int, keys: Keys, slots: range, table: BlockTable) -> _Order | None:
        group = self.groups[g]
        per_slot = group.blocks_per_slot
        if len(table) < slots.stop * per_slot:
            raise InputError(
                f"group {g}'s block table has {len(table)} blocks, "
                f"{slots.stop * per_slot} are to be stored"
            )
        blocks = np.asarray(table[slots.start * per_slot : slots.stop * per_slot], dtype=np.int64)
        blocks = blocks.reshape(-1, per_slot)
        held = np.flatnonzero((blocks != NO_BLOCK).all(axis=1))
        chained = isinstance(group, reach.FullAttention)
        group_keys = self._keys[g].cut(keys, slots, self.epoch).take(held)
        parent = self._keys[g].before(keys, slots, self.epoch) if chained else None
        lease = self.pool.reserve(group_keys, parent=parent, chained=chained)
        if lease is None:
            return None
        places = lease.slots[:, None] * per_slot + np.arange(per_slot)
        return _Order(
            group=g,
            lease=lease,
            device_blocks=as_slots(blocks[held[lease.positions]].ravel()),
            host_slots=places.ravel(),
        )

    # -- plan and settle --------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Everything ordered since the last plan, loads first; hand it to every rank's worker.

        The stores of one group travel together: one copy of many blocks beats many of a few.
        """
        self._require_open()
        self._step += 1
        now = self._clock()
        transfers = []
        for order in self._loads:
            transfer = Transfer(
                order.transfer_id, HOST, DEVICE, order.host_slots, order.device_blocks, order.group
            )
            self._flights.launch(transfer, (order.lease,), now + self._config.load_deadline)
            transfers.append(transfer)
        for g in range(len(self.groups)):
            orders = [order for order in self._stores if order.group == g]
            if orders:
                transfer = Transfer(
                    self._flights.new_id(),
                    DEVICE,
                    HOST,
                    np.concatenate([order.device_blocks for order in orders]),
                    np.concatenate([order.host_slots for order in orders]),
                    g,
                )
                leases = tuple(order.lease for order in orders)
                self._flights.launch(transfer, leases, now + self._config.store_deadline)
                transfers.append(transfer)
        self._loads, self._stores = [], []
        return Plan(self._step, tuple(transfers))

    def settle(self, receipts: Iterable[Receipt] = ()) -> Settled:
        """Take the ranks' receipts and look at the deadlines; says what changed for the engine."""
        self._require_open()
        landed = self._flights.settle(receipts)
        return self._report(landed)

    def lose_rank(self, rank: Rank, reason: str) -> Settled:
        """A rank is gone for good and touches no memory: what waits for it fails now."""
        self._require_open()
        return self._report(self._flights.lose_rank(rank, reason))

    def _report(self, landed: Sequence[Flight]) -> Settled:
        now = self._clock()
        loaded: list[RequestId] = []
        failed: list[FailedLoad] = []
        for flight in landed:
            self._release(flight)
            self._tell_loader(flight, loaded, failed)
        for flight in self._flights.expire(now):
            self._tell_loader(flight, loaded, failed)
            for lease in flight.leases:
                self.pool.disown(lease)
        for record in self._requests.values():
            if record.hit is not None and record.hit.deadline <= now:
                self._counts.expired_hits += 1
                record.let_go()
        released, self._released = tuple(self._released), []
        landings = tuple(Landing(flight.transfer.id, flight.reason) for flight in landed)
        return Settled(tuple(loaded), tuple(failed), released, landings)

    def _release(self, flight: Flight) -> None:
        transfer = flight.transfer
        if transfer.src == DEVICE:
            self._released.append(DeviceBlocks(transfer.group, transfer.src_slots))
            return
        self._released.append(DeviceBlocks(transfer.group, transfer.dst_slots))
        for lease in flight.leases:
            self._being_loaded[lease.slots] -= 1

    def _tell_loader(
        self, flight: Flight, loaded: list[RequestId], failed: list[FailedLoad]
    ) -> None:
        request_id = self._loaders.pop(flight.transfer.id, None)
        if request_id is None:
            return
        record = self._requests[request_id]
        loading = record.loading
        assert loading is not None
        loading.waiting.discard(flight.transfer.id)
        loading.reason = loading.reason or flight.reason
        if loading.waiting and not loading.reason:
            return
        # The first failure fails the request; what else it waits for lands on its own.
        self._forget_loads(record)
        if not loading.reason:
            loaded.append(request_id)
        else:
            match = loading.match
            failed.append(
                FailedLoad(request_id, match.computed_tokens, match.to_load, loading.reason)
            )

    # -- a request's ends -------------------------------------------------------------------------

    def finish(self, request_id: RequestId) -> None:
        """The request is over (done or aborted). Its stores go on; its hit and loads do not count.

        Unknown requests are fine: engines end requests that never came to us.
        """
        record = self._requests.pop(request_id, None)
        if record is not None:
            record.let_go()
            self._cancel_loads(request_id)
            self._forget_loads(record)

    abort = finish

    def preempt(self, request_id: RequestId) -> None:
        """The engine took the request's device blocks away; it may be matched again later."""
        record = self._requests.get(request_id)
        if record is not None:
            record.let_go()
            self._cancel_loads(request_id)
            self._forget_loads(record)
            if record.outdated:
                record.outdated = False
                record.stored = [0] * len(self.groups)

    def _cancel_loads(self, request_id: RequestId) -> None:
        """Loads not yet in a plan need not happen."""
        for order in [o for o in self._loads if o.request_id == request_id]:
            self._loads.remove(order)
            order.lease.release()
            self._being_loaded[order.lease.slots] -= 1
            self._released.append(DeviceBlocks(order.group, order.device_blocks))

    def _forget_loads(self, record: RequestRecord) -> None:
        if record.loading is not None:
            for transfer_id in record.loading.waiting:
                self._loaders.pop(transfer_id, None)
            record.loading = None

    def reset(self) -> None:
        """Forget every block, at once. Transfers in flight end harmlessly.

        A request whose load is under way keeps what it was promised, as it keeps the blocks it
        already has on the device; but nothing of it is stored until it has been preempted, for
        those blocks may stem from weights that are no more.
        """
        self._require_open()
        self.epoch += 1
        for record in self._requests.values():
            record.let_go()
            record.outdated = True
        self.pool.reset()

    def close(self) -> None:
        """End every request, flight and lease. Close the workers first. Safe to call twice."""
        if self._closed:
            return
        for request_id in list(self._requests):
            self.finish(request_id)
        for order in self._stores:
            order.lease.abort()
        self._stores = []
        self._flights.abandon("closed")
        self._closed = True

    # -- looking ----------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Transfers handed out whose receipts are not all here yet."""
        return len(self._flights)

    @property
    def num_queued(self) -> int:
        """Copies ordered but not yet in a plan."""
        return len(self._loads) + len(self._stores)

    def stats(self) -> SchedulerStats:
        """A snapshot of everything counted so far."""
        flights, matches = self._flights.counts, self._counts
        return SchedulerStats(
            pool=self.pool.counts,
            queries=matches.queries,
            asked_tokens=matches.asked_tokens,
            hit_tokens=matches.hit_tokens,
            expired_hits=matches.expired_hits,
            in_flight=len(self._flights),
            landed=flights.landed,
            failed=flights.failed,
            overdue=flights.overdue,
            stale_receipts=flights.stale_receipts,
            bytes_moved=MappingProxyType(dict(flights.bytes_moved)),
            seconds_moved=MappingProxyType(dict(flights.seconds_moved)),
        )

    def check_integrity(self) -> None:
        """Prove the bookkeeping, the pool's included; raises IntegrityError."""
        self.pool.check_integrity()

    def _record(self, request_id: RequestId) -> RequestRecord:
        record = self._requests.get(request_id)
        if record is None:
            record = self._requests[request_id] = RequestRecord.new(self.groups)
        return record

    def _tables(self, tables: Sequence[BlockTable]) -> Sequence[BlockTable]:
        if len(tables) != len(self.groups):
            raise InputError(
                f"got {len(tables)} block tables for {len(self.groups)} groups; give one per group"
            )
        return tables

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the scheduler is closed")
