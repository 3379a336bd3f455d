"""The scheduler half: requests, plans, completions. Decides which blocks move; touches no bytes.

::

    open ──> Request: match -> load  \\
                             store /  plan => workers => settle

The engine passes token counts and block tables; the groups determine which blocks move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvferry.cache import reach
from kvferry.cache.events import MANY_EVENTS, EventKind
from kvferry.cache.policies import learned
from kvferry.cache.policies.load_or_compute import LoadOrCompute
from kvferry.cache.pool import Pool
from kvferry.cache.tenants import Tenants
from kvferry.config import Config
from kvferry.core.identity import new_epoch
from kvferry.core.keys import KeyChain
from kvferry.errors import ClosedError, InputError, IntegrityError
from kvferry.hints import Hints
from kvferry.scheduler.control import Control, Prefetch
from kvferry.scheduler.journal import Bookkeeper, Entry, Explanation, Onlooker
from kvferry.scheduler.lookup import Hits, Matcher
from kvferry.scheduler.promotion import Promoter
from kvferry.scheduler.request import Completion, FailedLoad, Request, Requests
from kvferry.scheduler.stores import DeferredStores, Stores
from kvferry.scheduler.tier import LowerTier, SlotTier
from kvferry.scheduler.tiering import LowerTiers
from kvferry.scheduler.transfers import (
    EngineBlocks,
    EngineShape,
    InFlight,
    Ordered,
    Transfers,
)
from kvferry.scheduler.writeback import Writeback
from kvferry.settings.eviction import TenantShare
from kvferry.telemetry.stats import SchedulerStats
from kvferry.tiers.ipc.small_file import read_small, write_small
from kvferry.types import (
    DEVICE,
    HOST,
    DeviceBlocks,
    Health,
    Landing,
    Plan,
    Question,
    Rank,
    Receipt,
    RequestId,
    Reset,
)

log = logging.getLogger("kvferry")

_MANY_EVENTS = 64
"""Unread event log records at which a busy engine drains them, too: about a millisecond."""

LEARNED_FILE = "learned-policy"
"""File name of the eviction policy's learned state, in the first directory of the disk tier."""

LEARNED_SECONDS = 1.0
"""Seconds the drive may take to read or write that file."""

_CLOSED = "this scheduler is closed"


@dataclass(frozen=True)
class Settled:
    """The result of one ``settle``: what changed for the engine.

    ``loaded`` requests may run. ``failed`` ones must compute what they meant to load. ``released``
    device blocks are touched by no transfer any more: drop the hold taken when ``load``, ``store``
    or ``leave`` returned them (one hold per mention). ``landed`` are all completed transfers.
    ``expired`` requests did not load their hit by its deadline: the hit was released. ``ordered``
    are further pieces of pipelined loads: hold their device blocks, as for ``load``.
    """

    loaded: tuple[Request, ...] = ()
    failed: tuple[FailedLoad, ...] = ()
    released: tuple[DeviceBlocks, ...] = ()
    landed: tuple[Landing, ...] = ()
    expired: tuple[Request, ...] = ()
    ordered: tuple[Ordered, ...] = ()


_NOTHING = Settled()


class Scheduler:
    """One engine's scheduler half. Owns requests and transfers; the pools own the slots.

    Not thread-safe: call it from the engine's scheduling thread. Deadlines are checked in
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
        num_device_blocks: int | None = None,
        block_bytes: Sequence[int] = (),
        spare_tokens: int = 0,
        tiers: Sequence[LowerTier] = (),
        joins_loads: bool = True,
        loads_early: bool = False,
        engine: EngineBlocks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve an engine whose layers form ``groups``, from the host slots in ``pool``.

        ``hash_block_tokens`` are the tokens of one key of a chain (default: the smallest block).
        Bounds on loads and stores follow ``num_device_blocks``. ``block_bytes`` (of one device
        block, by group) are needed to know bytes in flight and load times. A hit ends
        ``spare_tokens`` early: the last block of a draft model's layers depends on the next token.
        ``tiers`` are the lower tiers. ``joins_loads``: the engine shares device blocks between
        requests, so a second request for a block being loaded waits for that load. ``loads_early``
        allows pipelined loads: see ``Settled.ordered``. ``engine`` allows deferred stores.
        """
        shape = EngineShape(
            groups=tuple(groups),
            num_ranks=num_ranks,
            hash_block_tokens=hash_block_tokens,
            num_device_blocks=num_device_blocks,
            block_bytes=tuple(block_bytes) or (0,) * len(groups),
            spare_tokens=spare_tokens,
            joins_loads=joins_loads,
            loads_early=loads_early,
        )
        self._config = config if config is not None else Config()
        config = self._config
        self.pool = pool
        self.groups = shape.groups
        self.epoch = 0
        """0 until the first :meth:`reset`; each reset sets a new number that was never used."""
        self._num_resets = 0
        self._learned: Path | None = None
        self._clock = clock
        self._closed = False
        self._ready = [pool.num_ready] * num_ranks
        self.transfers = transfers = Transfers(num_ranks, shape.block_bytes, config)
        worth = LoadOrCompute(config.load_policy)
        self.lower = lower = LowerTiers(
            pool, tiers, transfers, clock, worth, slot_bytes=max(shape.block_bytes)
        )
        self.writeback = Writeback(
            pool,
            lower.tiers,
            transfers,
            clock,
            lower.moves,
            config,
            piece_slots=lower.piece_slots,
        )
        """Copies blocks to lower tiers; flushes blocks that only the host holds while idle."""
        self._pools = (pool, *lower.pools.values())
        for each in self._pools:
            each.eviction.pins.bound(config.pin_share)
        self.matcher = matcher = Matcher(shape.groups, pool, lower, shape.hash_tokens)
        self.stores = Stores(matcher, pool, transfers, config, shape, clock)
        self.hits = hits = Hits(matcher, pool, transfers, config, shape, clock, worth)
        self._tenants = _divided(config.tenants, pool, lower) if config.tenants else None
        self.has_tenants = self._tenants is not None
        self.book = Bookkeeper(
            pool.log, matcher, pool, self.stores.admission, lower, self.writeback, self._tenants
        )
        self.deferred: DeferredStores | None = None
        if engine is not None:
            self.deferred = self.stores.deferred = DeferredStores(
                engine,
                least_tokens=min(shape.sizes),
                is_full=matcher.is_full,
                num_device_blocks=shape.num_device_blocks or 0,
                clock=clock,
            )
        promoter = Promoter(pool, matcher, lower, hits, transfers, shape, config, clock)
        self._requests = requests = Requests(
            pool=pool,
            log=pool.log,
            matcher=matcher,
            hits=hits,
            stores=self.stores,
            transfers=transfers,
            lower=lower,
            book=self.book,
            promoter=promoter,
            sizes=shape.sizes,
            spare_tokens=shape.spare_tokens,
            tenants=self._tenants,
            deferred=self.deferred,
            clock=clock,
        )
        self.control = Control(pool, matcher, lower, promoter, requests.live, clock)
        """Carries out actions on blocks by their keys."""
        entries = self.book.entries
        self.onlooker = Onlooker(self._snapshot, entries.get, partial(tuple, entries))
        """Counters and journal, for other threads to read."""

    # -- requests -------------------------------------------------------------------------------

    def open(
        self,
        request_id: RequestId,
        chain: KeyChain,
        hints: Hints | None = None,
        *,
        unheeded: str = "",
    ) -> Request:
        """Open a request; call the methods of :class:`Request` until it ends.

        ``chain`` has the keys of its blocks and may grow. ``request_id`` is for people and need not
        be unique. ``unheeded`` says why some of the client's hints are not among ``hints``. Raises
        what an event log reader, such as the eviction policy, has raised since the last call.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        if len(self.book.events) > _MANY_EVENTS:
            self.drain_events()
        for pool in self._pools:
            feed = pool.eviction.feed
            if feed.failure is not None or len(feed.events) >= MANY_EVENTS:
                pool.raise_failure()
        if self.book.failure is not None:
            self.book.raise_failure()
        return Request(request_id, chain, self._requests, hints, unheeded)

    def prefetch(self, request: Request) -> None:
        """Prefetch the blocks of a request that waits in the engine's queue, from the next plan on.

        Prefetches take at most a share of the host's slots. Blocks that are not matched in time are
        evicted first.
        """
        self.control.prefetch_queued(request)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests.live

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests that have not ended, and ended ones with deferred stores."""
        return tuple(self._requests.live)

    @property
    def many_events_wait(self) -> bool:
        """Whether so many records are unread that a busy engine, too, must drain them."""
        return len(self.book.events) > _MANY_EVENTS

    def drain_events(self) -> None:
        """Let all event log readers read their records; call it when the engine has time."""
        self.book.drain()
        for pool in self._pools:
            pool.catch_up()

    # -- deferred stores ------------------------------------------------------------------------

    def store_left(self, *, is_idle: bool = False) -> list[Ordered]:
        """Order the deferred stores of ended requests that are due; all of them if ``is_idle``.

        Call it every step. Returns the orders: hold their device blocks until ``settle`` releases
        them.
        """
        deferred, requests = self.deferred, self._requests
        ordered: list[Ordered] = []
        if deferred is None:
            return ordered
        due = deferred.take_due(is_idle=is_idle)
        for number, rest in enumerate(due):
            request: Request = rest.request
            ordered += request.store_left(rest, deferred)
            lacks = request.progress.tokens + requests.least_tokens <= rest.num_tokens
            if lacks and self.stores.is_full:
                deferred.put_back(due[number:])
                break
            requests.released.extend(rest.held)
            request.end_left()
        deferred.is_wanted = False
        return ordered

    # -- reports from the engine ----------------------------------------------------------------

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note that the engine computed ``num_tokens`` prompt tokens in ``seconds``."""
        self.hits.worth.note_prefill(num_tokens, seconds)

    def note_ready(self, rank: Rank, num_slots: int) -> None:
        """Note that the first ``num_slots`` host slots of a rank can be used.

        A slot is used once it is ready on every rank: its bytes are spread over all of them.
        """
        ready = self._ready
        if not 0 <= rank < len(ready):
            raise InputError(f"rank {rank} has slots ready; ranks are 0 to {len(ready) - 1}")
        if num_slots > ready[rank]:
            ready[rank] = num_slots
            self.pool.grow(min(*ready, self.pool.num_slots))

    def note_health(self, health: Health) -> None:
        """Note that a tier became unavailable, or available again, on one rank.

        It is used only while available on all ranks. Requests stop waiting for it by ``settle``.
        """
        self.lower.note_health(health)
        self.writeback.note_health(health.tier)

    # -- plan and settle --------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return all orders since the last plan, loads first; pass it to every rank's worker.

        Does not drain the event log: call :meth:`drain_events` when the engine has time.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        if self.lower.tiers:
            self._order_for_tiers()
        return self.transfers.launch(self._clock())

    def _order_for_tiers(self) -> None:
        """Order prefetches and writebacks; keep exceptions for :meth:`open` to raise."""
        try:
            if self.control.has_prefetches:
                self.control.advance()
            if self.writeback.counts_requests:  # admission must count all earlier lookups first
                self.book.drain()
            self.writeback.spill()
        except Exception as error:
            self.book.failure = self.book.failure or error

    def settle(self, receipts: Iterable[Receipt] = (), *, looks: bool = True) -> Settled:
        """Take the ranks' receipts and check the deadlines; return what changed for the engine.

        Pass ``looks=False`` to skip the check of transfer deadlines, if the engine knows that its
        ranks could not answer for a while.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        landed, now, requests = self.transfers.settle(receipts), self._clock(), self._requests
        overdue: Sequence[InFlight] = ()
        if looks and now >= self.transfers.next_deadline:
            overdue = self.transfers.expire(now)
        tells = landed or overdue or requests.pinned or requests.released
        if not tells and not requests.promoter.loads:
            return _NOTHING
        return self._complete(landed, overdue, now)

    def disown(self, request: Request) -> None:
        """Make all ordered stores of a request unmatchable, in flight or not.

        Call it when the device blocks may be overwritten before the stores complete.
        """
        dropped, _ = self.transfers.disown(request)
        request.num_storing -= len(dropped)

    def take_back(self) -> list[DeviceBlocks]:
        """Make all stores unmatchable, so that the engine can take their device blocks back now.

        Returns the blocks to release; :meth:`settle` does not report them any more.
        """
        dropped, released = self.transfers.disown()
        released += [DeviceBlocks(group, order.device_blocks) for group, order in dropped]
        for _, order in dropped:
            if order.request is not None:
                order.request.num_storing -= 1
        for rest in self.deferred.take_all() if self.deferred is not None else ():
            rest.request.end_left()
            released += rest.held
        return released

    def _complete(
        self, landed: Sequence[InFlight], overdue: Sequence[InFlight], now: float
    ) -> Settled:
        requests, done = self._requests, Completion()
        landings = []
        for flight in landed:
            self._landed(flight, done)
            landings.append(Landing(flight.transfer.id, flight.reason))
        if done.num_bytes:
            self.hits.worth.note_load(done.num_bytes, done.seconds)
        for flight in overdue:
            self._give_up(flight, done)
        ordered: list[Ordered] = []
        if requests.promoter.loads:
            ordered, ended = requests.promoter.advance()
            for request, promised, reason in ended:
                request.end_load(promised, reason, done)
        expired: tuple[Request, ...] = ()
        if requests.pinned:
            expired = tuple([each for each in tuple(requests.pinned) if each.expire(now)])
            self.book.counts.expired_hits += len(expired)
        released, requests.released = requests.released, []
        return Settled(
            tuple(done.loaded),
            tuple(done.failed),
            tuple(released),
            tuple(landings),
            expired,
            tuple(ordered),
        )

    def _landed(self, flight: InFlight, done: Completion) -> None:
        transfer, requests = flight.transfer, self._requests
        if isinstance(transfer, Question) or DEVICE not in (transfer.src, transfer.dst):
            self._moved(flight)
        elif transfer.dst == DEVICE:
            requests.released.append(DeviceBlocks(transfer.group, transfer.dst_slots))
            for receipt in flight.receipts:
                done.num_bytes += receipt.num_bytes
                done.seconds += receipt.seconds
            if not flight.overdue:
                self._loaded(flight, done)
        else:
            if not flight.taken_back:
                requests.released.append(DeviceBlocks(transfer.group, transfer.src_slots))
            for request in flight.served:
                self.pool.log.append(EventKind.RESULT, request=request.id, detail=flight)
                request.stored()
            if self.lower.tiers and not flight.reason:
                self._write_through(flight, transfer.group)

    def _loaded(self, flight: InFlight, done: Completion) -> None:
        """End the wait of a request for a load that completed or is overdue."""
        if self.hits.joins_loads:
            for lease in flight.leases:
                self.hits.ended(lease.slots)
        (request,) = flight.served
        request.landed(flight, done)

    def _moved(self, flight: InFlight) -> None:
        move = self.lower.landed(flight)
        if move is not None and not move.upward:
            self.writeback.wrote(move.tier.name, ok=not flight.lost.all())
        self._came(flight)

    def _came(self, flight: InFlight) -> None:
        """Notify the requests and prefetches that wait for a promotion or an answer of a tier."""
        callers: tuple[Request | Prefetch, ...] = (
            *self._requests.live,
            *self.control.prefetches,
        )
        for caller in callers:
            promotion = caller.promotion
            if promotion is not None and flight.transfer.id in promotion.waits:
                promotion.waits.discard(flight.transfer.id)
                self.pool.log.append(EventKind.RESULT, request=caller.id, detail=flight)
                if isinstance(caller, Request):
                    caller.came()

    def _give_up(self, flight: InFlight, done: Completion) -> None:
        """Let no request wait for an overdue transfer; its slots stay leased until it completes."""
        transfer = flight.transfer
        if isinstance(transfer, Question):
            self._moved(flight)
        elif transfer.dst == DEVICE:
            self._loaded(flight, done)
        elif transfer.src != DEVICE:
            self.lower.overdue(flight)
            self._came(flight)
        for lease in flight.in_doubt:
            lease.disown()

    def _write_through(self, flight: InFlight, group: int) -> None:
        chained = isinstance(self.groups[group], reach.FullAttention)
        for lease in flight.leases:
            parent = self.pool.key_before(lease) if chained else None
            keys = self.pool.keys_of(lease)
            self.writeback.stored(keys, parent=parent, chained=chained)

    def reset(self, *, is_kept: bool = True) -> None:
        """Forget every block on every tier, at once. Transfers in flight end harmlessly.

        A live request keeps its device blocks and loads in flight, which may be of old weights. So
        none of its blocks are stored until it is preempted. Reset the engine's own prefix cache,
        too: blocks that it still finds there would be stored as new. Pass ``is_kept=False`` if the
        weights are not those that the namespace names: blocks stored from now on then serve only
        this server.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        requests = self._requests
        self.drain_events()  # earlier misses must be explained by the state before the reset
        if self.deferred is not None:
            for rest in self.deferred.take_all():
                requests.released.extend(rest.held)
                rest.request.end_left()
        for request in requests.live:
            request.forget()
        self.control.reset()
        self.pool.reset()
        self._num_resets += 1
        self.epoch = new_epoch(max(self.epoch, self.lower.reset_number))
        self.lower.reset(Reset(self.epoch, self.epoch, is_kept))
        self.writeback.reset()
        self.matcher.begin_epoch(self.epoch)

    def close(self) -> None:
        """End every request, transfer and lease. Close the workers first. Safe to call twice."""
        if not self._closed:
            self.control.reset()
            for request in self.requests:
                request.end()
            self.transfers.close()
            for pool in self._pools:
                pool.catch_up()
            if self._learned is not None:
                self._save_learned(self._learned)
            self.book.close()
            self._closed = True

    def watch_requests(self) -> None:
        """Start recording requests and restore the learned eviction policy, as configured."""
        for folder in self._config.disk[:1]:
            self._learned = Path(folder) / LEARNED_FILE
            self._restore_learned(self._learned)
        if self._config.record is not None:
            self.book.record(Path(self._config.record), self._config.record_size, self._clock())

    def _restore_learned(self, path: Path) -> None:
        policy = self.pool.eviction.policy
        if not isinstance(policy, learned.Learns):
            return
        try:
            found = read_small(path, LEARNED_SECONDS)
            if found and not learned.unpack(policy, found):
                log.warning("%s is not this policy's: the eviction policy learns anew", path)
        except (OSError, ValueError) as error:
            log.warning("What the eviction policy learned before cannot be read: %s", error)

    def _save_learned(self, path: Path) -> None:
        data = learned.pack(self.pool.eviction.policy)
        try:
            if data:
                write_small(path, data, LEARNED_SECONDS)
        except OSError as error:
            log.warning("What the eviction policy learned was not saved to %s: %s", path, error)

    # -- figures --------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Transfers in a plan whose receipts have not all arrived."""
        return len(self.transfers.in_flight)

    def take_released(self) -> tuple[DeviceBlocks, ...]:
        """Return the device blocks that no transfer touches any more, ahead of ``settle``."""
        released = self._requests.released
        if not released:
            return ()
        self._requests.released = []
        return tuple(released)

    @property
    def num_queued(self) -> int:
        """Copies ordered but not yet in a plan."""
        return self.transfers.num_queued

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Return the hit and miss reason of a request's last lookup; None if it is too long ago."""
        entry = self.journal(request_id)
        return entry.explanation if entry is not None else None

    def journal(self, request_id: RequestId) -> Entry | None:
        """Return what is remembered of a request and its transfers; None if it is too long ago."""
        self.book.drain()
        return self.book.entries.get(request_id)

    def recent(self) -> tuple[RequestId, ...]:
        """Return the requests in the journal, the latest last."""
        self.book.drain()
        return tuple(self.book.entries)

    def stats(self) -> SchedulerStats:
        """Return a snapshot of all counters."""
        self.book.drain()
        return self._snapshot()

    def _snapshot(self) -> SchedulerStats:
        pool, tiers, worth, tenants = self.pool, self.lower.tiers, self.hits.worth, self._tenants
        matches, moved = self.book.counts, self.transfers.counts
        below, keyed = self.lower.pools, self.lower.keyed
        placed = [tier for tier in tiers if isinstance(tier, SlotTier)]
        every = ({HOST: pool} | below).items()
        quotas = {name: owned for name, each in every if (owned := each.eviction.quotas)}
        return SchedulerStats(
            pool=pool.counts,
            tiers={name: each.counts for name, each in below.items()},
            queries=matches.queries,
            asked_tokens=matches.asked_tokens,
            hit_tokens=matches.hit_tokens,
            promoted_tokens=self._requests.promoter.promoted_tokens,
            expired_hits=matches.expired_hits,
            unheeded_hints=matches.unheeded_hints,
            tier_hit_tokens={
                name: matches.tier_hit_tokens[name]
                for name in (DEVICE, HOST, *[tier.name for tier in tiers])
            },
            shed_stores=self.stores.num_shed,
            verdicts=dict(matches.verdicts),
            missed=dict(matches.missed),
            in_flight=self.num_in_flight,
            landed=moved.landed,
            failed=moved.failed,
            overdue=moved.overdue,
            stale_receipts=moved.stale_receipts,
            traffic=dict(moved.traffic),
            queued=self.num_queued,
            bytes_in_flight=self.transfers.num_bytes,
            leases={name: each.num_leases for name, each in every},
            resets=self._num_resets,
            tenants=tenants.snapshot(quotas) if tenants is not None else {},
            lost_blocks=moved.lost_blocks,
            ailments={tier.name: tier.ailment for tier in tiers},
            asked={t.name: (t.num_asked, t.num_found) for t in keyed},
            refused={t.name: t.num_refused for t in keyed},
            restored={tier.name: tier.num_restored for tier in placed},
            bandwidth=worth.bandwidth,
            prefill_rate=worth.prefill_rate,
        )

    def check_integrity(self) -> None:
        """Check the invariants of the pools and of leases; raise IntegrityError if one is broken.

        Every lease must belong to a pinned hit or a transfer, or its slots would stay leased.
        """
        held = list(self.transfers.leases())
        for request in self._requests.pinned:
            held += request.pinned_leases
        for pool in self._pools:
            pool.check_integrity()
            if not pool.leases <= set(held):
                raise IntegrityError("a lease is neither a pinned hit's nor a transfer's")


# -- wiring -------------------------------------------------------------------------------------


def _divided(shares: Sequence[TenantShare], pool: Pool, lower: LowerTiers) -> Tenants:
    pools = {HOST: pool} | lower.pools
    tenants = Tenants(shares)
    for each in pools.values():
        each.eviction.divide(tenants.shares, tenants.before)
    for tier in lower.keyed:
        log.warning(
            "tenants: shares do not hold for tier %s, which decides itself what it keeps; they "
            "hold for %s",
            tier.name,
            " and ".join(pools),
        )
    return tenants
