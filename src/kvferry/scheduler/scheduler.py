"""The scheduler half: requests, plans, settling. Decides which blocks move; never touches a byte.

::

    open ──> Request: match -> load  \\
                             store    plan => workers => settle
             offer ----------------- /

The engine speaks in tokens and hands over block tables; which blocks move follows from the groups.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.cache.tenants import Tenants
from kvferry.config import Config
from kvferry.core.identity import new_epoch
from kvferry.core.keys import KeyChain, Keys
from kvferry.errors import ClosedError, InputError
from kvferry.hints import Hints
from kvferry.scheduler.accounts import Accounts, listening
from kvferry.scheduler.control import Ahead, Control
from kvferry.scheduler.deferred_stores import Rests
from kvferry.scheduler.hits import Hits
from kvferry.scheduler.journal import Entry, Explainer, Explanation, Journal
from kvferry.scheduler.lookup import Matcher
from kvferry.scheduler.parts import Parts
from kvferry.scheduler.promotion import ComingLoads, store_left
from kvferry.scheduler.request import HintedRequest, Request
from kvferry.scheduler.stores import OnDevice, Stores
from kvferry.scheduler.tier import KeyedTier, LowerTier, SlotTier, WriteMode
from kvferry.scheduler.tiering import LowerTiers
from kvferry.scheduler.transfers import (
    BlockTable,
    EngineBlocks,
    EngineShape,
    Flight,
    Flights,
    Ordered,
    Outbox,
    Transit,
    Waits,
)
from kvferry.scheduler.writeback import admission_of, times_requested
from kvferry.settings.tenants import TenantShare
from kvferry.telemetry.stats import SchedulerStats
from kvferry.types import (
    DEVICE,
    HOST,
    DeviceBlocks,
    Health,
    Landing,
    Match,
    Plan,
    Question,
    Rank,
    Receipt,
    RequestId,
    Transfer,
)


def snapshot(parts: Parts, *, resets: int) -> SchedulerStats:
    """As of now; nothing in it changes afterwards."""
    pool, tiers, worth, tenants = parts.pool, parts.lower.tiers, parts.hits.worth, parts.tenants
    matches, moved = parts.accounts.counts, parts.flights.counts
    below = {tier.name: tier.pool for tier in tiers if tier.pool is not None}
    keyed = [tier for tier in tiers if isinstance(tier, KeyedTier)]
    placed = [tier for tier in tiers if isinstance(tier, SlotTier)]
    return SchedulerStats(
        pool=pool.counts,
        tiers=MappingProxyType({name: each.counts for name, each in below.items()}),
        queries=matches.queries,
        asked_tokens=matches.asked_tokens,
        hit_tokens=matches.hit_tokens,
        promoted_tokens=matches.promoted_tokens,
        expired_hits=matches.expired_hits,
        early_loads=matches.early_loads,
        shed_stores=parts.stores.num_shed,
        verdicts=MappingProxyType(dict(matches.verdicts)),
        missed=MappingProxyType(dict(matches.missed)),
        overlaps=MappingProxyType(dict(matches.overlaps)),
        in_flight=len(parts.flights),
        landed=moved.landed,
        failed=moved.failed,
        overdue=moved.overdue,
        stale_receipts=moved.stale_receipts,
        bytes_moved=MappingProxyType(dict(moved.bytes_moved)),
        seconds_moved=MappingProxyType(dict(moved.seconds_moved)),
        traffic=moved.traffic.snapshot(),
        queued=len(parts.outbox),
        bytes_in_flight=parts.transit.num_bytes,
        leases=MappingProxyType(
            {HOST: pool.num_leases, **{name: each.num_leases for name, each in below.items()}}
        ),
        resets=resets,
        tenants=MappingProxyType(tenants.snapshot() if tenants is not None else {}),
        memory_curve=parts.accounts.memory_curve,
        lost_blocks=moved.lost_blocks,
        ailments=MappingProxyType({tier.name: tier.ailment for tier in tiers}),
        asked=MappingProxyType({tier.name: (tier.num_asked, tier.num_found) for tier in keyed}),
        restored=MappingProxyType({tier.name: tier.num_restored for tier in placed}),
        bandwidth=worth.bandwidth,
        prefill_rate=worth.prefill_rate,
        tier_bandwidth=MappingProxyType(
            {tier.name: worth.bandwidth_of(tier.name) for tier in tiers}
        ),
    )


class Onlooker:
    """What any thread may see of a scheduler: the counts and the journal. Owns neither; only reads.

    So a miss that was answered at once, and that nobody has counted yet, is not in it.
    """

    def __init__(self, count: Callable[[], SchedulerStats], journal: Journal) -> None:
        self._count = count
        self._journal = journal

    def stats(self) -> SchedulerStats:
        return self._count()

    def journal(self, request_id: RequestId) -> Entry | None:
        return self._journal.entry(request_id)

    def recent(self) -> tuple[RequestId, ...]:
        return self._journal.request_ids()


# ------------------------------------------------------------------------------------------------
# What changed for the engine by the receipts just taken.


@dataclass(frozen=True)
class FailedLoad:
    """A load that did not bring its bytes: the request must compute these tokens.

    Into other device blocks: a slow rank may write to the ones it named until they are released.
    """

    request: Request
    first_token: int
    num_tokens: int
    reason: str


@dataclass(frozen=True)
class Settled:
    """What changed by the receipts just taken.

    ``loaded`` requests may run. ``failed`` ones must compute what they hoped to load. ``released``
    device blocks are touched by no transfer any more: drop the hold taken when ``load``, ``store``
    or ``leave`` returned them (one hold per mention). ``landed`` are all transfers that ended.
    ``expired`` requests left their hit alone for too long: it is let go, as if never asked for.
    ``ordered`` are further pieces of loads whose blocks still come up: hold their device blocks, as
    when ``load`` returned the first.
    """

    loaded: tuple[Request, ...] = ()
    failed: tuple[FailedLoad, ...] = ()
    released: tuple[DeviceBlocks, ...] = ()
    landed: tuple[Landing, ...] = ()
    expired: tuple[Request, ...] = ()
    ordered: tuple[Ordered, ...] = ()


# ------------------------------------------------------------------------------------------------
# What becomes of transfers that have ended, or whose time is up, and of the blocks they used.
#
# ::
#
#     landed ──┬─> its leases end, its device blocks are the engine's again
#              └─> requests that wait for it go on
#     overdue ───> requests that wait for it go on without; its memory is still the ranks'


class Settling:
    """Tells requests and the engine what ended. Owns nothing but its way of telling."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._flights = parts.flights
        self._transit = parts.transit

    def report(self, landed: Sequence[Flight], now: float, *, looks: bool = True) -> Settled:
        """What changed for the engine, by these and, if it ``looks`` at that, by the time."""
        parts = self._parts
        loaded: list[Request] = []
        failed: list[FailedLoad] = []
        landings: list[Landing] = []
        num_bytes, seconds = 0, 0.0
        for flight in landed:
            transfer = flight.transfer
            landings.append(Landing(transfer.id, flight.reason))
            if isinstance(transfer, Question):
                self._end_move(flight)
            elif transfer.dst == DEVICE:
                for receipt in flight.receipts:
                    num_bytes += receipt.num_bytes
                    seconds += receipt.seconds
                self._end_load(flight, transfer, loaded, failed)
            elif transfer.src == DEVICE:
                self._end_store(flight, transfer)
            else:
                self._end_move(flight)
        if num_bytes:
            parts.hits.worth.note_load(num_bytes, seconds)
        if looks and now >= self._flights.next_deadline:
            for flight in self._flights.expire(now):
                self._give_up(flight, loaded, failed)
        ordered = self._load_on(loaded, failed) if parts.coming else ()
        expired = self._expire_hits(now) if parts.pinned else ()
        released = tuple(parts.released)
        parts.released.clear()
        return Settled(tuple(loaded), tuple(failed), released, tuple(landings), expired, ordered)

    def _end_load(
        self,
        flight: Flight,
        transfer: Transfer,
        loaded: list[Request],
        failed: list[FailedLoad],
    ) -> None:
        self._parts.released.append(DeviceBlocks(transfer.group, transfer.dst_slots))
        if not flight.overdue:
            self._stop_counting(flight, transfer)
            self._tell(flight, loaded, failed)

    def _end_store(self, flight: Flight, transfer: Transfer) -> None:
        parts = self._parts
        parts.released.append(DeviceBlocks(transfer.group, transfer.src_slots))
        if not flight.overdue:
            self._transit.store(transfer.group, -len(transfer.src_slots))
        for request in flight.served:
            parts.journal.ended(request.id, flight)
            if request.hints is not None:
                request.num_storing -= 1
                if not request.num_storing:
                    request.stored()
        if parts.lower.tiers and not flight.reason:
            self._write_through(flight, transfer.group)

    def _end_move(self, flight: Flight) -> None:
        brought = self._parts.lower.landed(flight)
        if brought is not None:
            tier, num_bytes, seconds = brought
            self._parts.hits.worth.note_load(num_bytes, seconds, tier)
        for request in self._parts.waits.take(flight.transfer.id):
            request.came(flight)

    def _give_up(self, flight: Flight, loaded: list[Request], failed: list[FailedLoad]) -> None:
        """Its time is up: nobody waits for it any longer. What it claims stays claimed."""
        transfer = flight.transfer
        if isinstance(transfer, Question):
            self._end_move(flight)
        elif transfer.dst == DEVICE:
            self._stop_counting(flight, transfer)
            self._tell(flight, loaded, failed)
        elif transfer.src == DEVICE:
            self._transit.store(transfer.group, -len(transfer.src_slots))
        else:
            self._parts.lower.overdue(flight)
            for request in self._parts.waits.take(transfer.id):
                request.came(flight)
        for lease in flight.in_doubt:
            lease.disown()

    def _stop_counting(self, flight: Flight, transfer: Transfer) -> None:
        self._transit.load(transfer.group, -len(transfer.dst_slots))
        for lease in flight.leases:
            self._parts.hits.ended(lease)

    def _tell(self, flight: Flight, loaded: list[Request], failed: list[FailedLoad]) -> None:
        (request,) = flight.served
        ended = request.landed(flight)
        if ended is not None:
            promised, reason = ended
            self._ended(request, promised, reason, loaded, failed)

    def _ended(
        self,
        request: Request,
        promised: Match,
        reason: str,
        loaded: list[Request],
        failed: list[FailedLoad],
    ) -> None:
        if reason:
            failed.append(FailedLoad(request, promised.computed_tokens, promised.to_load, reason))
        else:
            loaded.append(request)

    def _load_on(self, loaded: list[Request], failed: list[FailedLoad]) -> tuple[Ordered, ...]:
        """Order more of loads in pieces, before another request asks for the same blocks."""
        ordered, ended = self._parts.coming.advance()
        for request, promised, reason in ended:
            self._ended(request, promised, reason, loaded, failed)
        return tuple(ordered)

    def _write_through(self, flight: Flight, group: int) -> None:
        # Lazy stores come from anywhere; eager ones follow each other where every key is needed.
        parts = self._parts
        full = isinstance(parts.matcher.groups[group], reach.FullAttention)
        chained = full and not parts.stores.is_lazy
        for lease in flight.leases:
            parent = parts.pool.key_before(lease) if chained else None
            parts.lower.writeback.stored(parts.pool.keys_of(lease), parent=parent, chained=chained)

    def _expire_hits(self, now: float) -> tuple[Request, ...]:
        """Let go of hits that nobody took in time; whose they were."""
        expired = [request for request in tuple(self._parts.pinned) if request.expire(now)]
        self._parts.accounts.counts.expired_hits += len(expired)
        return tuple(expired)


# ------------------------------------------------------------------------------------------------
# Puts the parts of a scheduler together.

log = logging.getLogger("kvferry")

_MOST_ON_DEVICE = 1 << 20
"""Keys, where nobody says how many blocks the device has."""


def assemble(
    pool: Pool,
    shape: EngineShape,
    tiers: Sequence[LowerTier],
    config: Config,
    engine: EngineBlocks | None,
    clock: Callable[[], float],
) -> Parts:
    """As :class:`Scheduler` is asked for."""
    transit, flights = Transit(shape.block_bytes), Flights(shape.num_ranks)
    outbox = Outbox(flights, transit, config, len(shape.groups))
    lower = _lower(pool, tiers, outbox, shape, config, clock)
    matcher = Matcher(shape.groups, pool, lower, shape.hash_tokens)
    on_device = _on_device(shape) if config.store_mode == "lazy" else None
    stores = Stores(matcher, pool, outbox, transit, config, shape, on_device)
    tenants = _divided(config.tenants, pool, tiers) if config.tenants else None
    journal, admission = Journal(), stores.admission
    accounts = Accounts(
        matcher,
        Explainer(matcher, pool, admission, lower),
        journal,
        admission,
        lower,
        tenants,
        listening(pool, tiers, matcher),
        on_device,
    )
    parts = Parts(
        pool=pool,
        matcher=matcher,
        hits=Hits(matcher, pool, transit, config, shape, clock),
        stores=stores,
        transit=transit,
        flights=flights,
        outbox=outbox,
        lower=lower,
        waits=Waits(),
        journal=journal,
        accounts=accounts,
        tenants=tenants,
        rests=_rests(engine, shape, matcher, clock) if engine is not None else None,
        sizes=shape.sizes,
        least_tokens=min(shape.sizes),
        spare_tokens=shape.spare_tokens,
        clock=clock,
    )
    parts.coming = ComingLoads(parts, shape, config)
    return parts


def _lower(
    pool: Pool,
    tiers: Sequence[LowerTier],
    outbox: Outbox,
    shape: EngineShape,
    config: Config,
    clock: Callable[[], float],
) -> LowerTiers:
    """What lies below the host, and what of the host may go there and stay."""
    block_bytes, now = shape.slot_bytes * shape.num_ranks, clock()
    admissions = {}
    for tier in tiers:
        num_keys = pool.num_slots + tier.pool.num_slots if tier.pool is not None else None
        admission = admission_of(
            config, tier.name, num_keys=num_keys, block_bytes=block_bytes, now=now
        )
        if admission is not None:
            admissions[tier.name] = admission
        if times_requested(config, tier.name) > 1:  # when it is stored, it was requested once
            tier.write = WriteMode.SPILL
    lower = LowerTiers(
        pool,
        tiers,
        outbox,
        clock,
        slot_bytes=shape.slot_bytes,
        admissions=admissions,
        flush_tiers=frozenset(spec.name for spec in config.all_tiers if spec.outlives_us),
        flush_seconds=config.tier_flush,
    )
    for each in (pool, *(tier.pool for tier in tiers if tier.pool is not None)):
        each.holds.bound(config.pin_share)
    return lower


def _divided(shares: Sequence[TenantShare], pool: Pool, tiers: Sequence[LowerTier]) -> Tenants:
    """The tenants, who have their parts of every pool from now on."""
    pools: dict[str, Pool] = {HOST: pool}
    pools |= {tier.name: tier.pool for tier in tiers if tier.pool is not None}
    tenants = Tenants(shares, pools)
    for each in pools.values():
        each.divide(tenants.shares, tenants.ceilings, tenants.before, tenants.at_most)
    for tier in tiers:
        if tier.pool is None:
            log.warning(
                "tenants: shares and ceilings do not hold for tier %s, which decides itself what "
                "it keeps; they hold for %s",
                tier.name,
                " and ".join(pools),
            )
    return tenants


def _rests(
    engine: EngineBlocks, shape: EngineShape, matcher: Matcher, clock: Callable[[], float]
) -> Rests:
    return Rests(
        engine,
        least_tokens=min(shape.sizes),
        is_full=matcher.is_full,
        num_device_blocks=shape.num_device_blocks or 0,
        clock=clock,
    )


def _on_device(shape: EngineShape) -> OnDevice:
    """What the device has, as far as we were told: twice as many keys as it can have."""
    hash_tokens = shape.hash_tokens
    if shape.num_device_blocks is None:
        return OnDevice(_MOST_ON_DEVICE, hash_tokens)
    keys_a_block = -(-max(shape.sizes) // hash_tokens)
    return OnDevice(max(1024, 2 * shape.num_device_blocks * keys_a_block), hash_tokens)


# ------------------------------------------------------------------------------------------------
# The scheduler half: requests, plans, settling. Decides which blocks move; never touches a byte.
#
# ::
#
#     open ──> Request: match -> load  \
#                              store    plan => workers => settle
#              offer ----------------- /
#
# The engine speaks in tokens and hands over block tables; which blocks move follows from the
# groups.

_CLOSED = "the scheduler is closed"


class Scheduler:
    """One engine's scheduler half. Owns requests, hits and flights; the pools own the slots.

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

        ``hash_block_tokens`` is what one key of a request's chain covers (default: the smallest
        block). ``num_device_blocks`` lets the bounds on loads and stores follow the device's size,
        ``block_bytes`` (of one device block, per group) lets bytes in flight and load times be
        known. ``spare_tokens`` at the end of what is known of a request are neither loaded nor
        stored: drafts of them may still be refused. ``tiers`` lie below the host. ``joins_loads``
        says that the engine shares device blocks between requests: a block that one request loads
        then serves the others once it has landed, so a second request that wants it waits and loads
        nothing. With ``loads_early`` a hit's last blocks may still come up when it is answered; see
        ``Settled.ordered``. ``engine`` lets requests that end be stored late (``Request.leave``).
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
        self._parts = parts = assemble(pool, shape, tiers, self._config, engine, clock)
        self.pool = pool
        self._pools = (pool, *(tier.pool for tier in tiers if tier.pool is not None))
        self.groups = shape.groups
        self.epoch = 0
        """0 until everything is forgotten, then another number that no other life ever had."""
        self._num_resets = 0
        self._clock = clock
        self._closed = False
        self._ready = [pool.num_ready] * num_ranks
        self._transit, self._flights, self._outbox = parts.transit, parts.flights, parts.outbox
        self._settling = Settling(parts)
        self.control = Control(parts)  # what is done with blocks from outside
        self.writeback = parts.lower.writeback
        self._ahead = Ahead(parts, clock)
        self.has_tenants = parts.tenants is not None
        self.onlooker = Onlooker(self._snapshot, parts.journal)
        """What others may see of it, from any thread."""

    # -- requests -------------------------------------------------------------------------------

    def open(
        self,
        request_id: RequestId,
        chain: KeyChain,
        hints: Hints | None = None,
        *,
        unheeded: str = "",
    ) -> Request:
        """A request has come; its verbs are those of :class:`Request`, until it ends.

        ``chain`` names its blocks and may grow. Names are for people: two requests that live at
        the same time may have the same, and are told apart all the same. ``hints`` say what its
        sender knows of it; ``unheeded``, why some that came with it are not among them.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        for pool in self._pools:
            pool.raise_failure()
        if hints is None:
            request = Request(request_id, chain, self._parts)
        else:
            request = HintedRequest(request_id, chain, self._parts, hints, unheeded)
        self._parts.live[request] = None
        return request

    def prefetch(self, request: Request) -> None:
        """This request waits in the engine's queue: bring up what tiers have of it, meanwhile.

        Within a share of the host, and no sooner than the next plan. What came up and is not asked
        for in time goes before anything else.
        """
        self._ahead.ask(request)

    def num_loadable(self, keys: Keys, first: int, end: int) -> int:
        """How many blocks of the first group, from this one on, are in the host now."""
        return self.pool.match(self._parts.matcher.slot_keys(0, keys, range(first, end)))

    def __contains__(self, request: Request) -> bool:
        """Whether this request is one of ours and has not ended."""
        return request in self._parts.live

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those that have not ended, and those that have and left something to be stored."""
        return tuple(self._parts.live)

    @property
    def owing(self) -> tuple[Request, ...]:
        """Requests that were answered at once and are not counted yet."""
        return tuple(self._parts.owing)

    def count_answered(self, *, are_whole: bool = False) -> None:
        """Count and explain them now; see ``Parts.tell_owing``."""
        self._parts.tell_owing(are_whole=are_whole)

    # -- stores that no running request orders --------------------------------------------------

    @property
    def stores_wait(self) -> bool:
        """Whether as much is being stored as may be at a time: a store would leave more."""
        return self._parts.stores.is_full

    @property
    def rests(self) -> Rests | None:
        """What ended requests left; None where the engine does not let them."""
        return self._parts.rests

    def store_left(self, *, is_idle: bool = False) -> list[Ordered]:
        """Order what ended requests left and what is due by now; all of it if nothing else runs.

        Call it every step. Returns what was ordered: hold its device blocks until ``settle``
        releases them.
        """
        rests = self._parts.rests
        if rests is None or not (is_idle or rests.is_due):
            return []
        return store_left(self._parts, rests, is_idle=is_idle)

    @property
    def offer_depth(self) -> int:
        """How many blocks from the head of its free queue the engine should offer now."""
        return self._parts.stores.depth

    def offer(self, group: int, keys: Keys, blocks: BlockTable) -> tuple[Ordered, ...]:
        """With lazy stores: these device blocks are the next to be dropped, soonest first.

        ``keys[i]`` is the chain key at the end of ``blocks[i]``. Returns what is being stored: hold
        its device blocks until ``settle`` releases them.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        if self._parts.stores.admission.counts:  # what was asked before this counts before it
            self._parts.tell_owing()
        return self._parts.stores.offered(group, keys, blocks)

    # -- what the engine learns and tells -------------------------------------------------------

    def note_allocated(self, num_blocks: int) -> None:
        """The engine took this many device blocks in this step; lazy stores look ahead by it."""
        self._parts.stores.demand(num_blocks)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed this many prompt tokens in this time; load-or-compute learns it."""
        self._parts.hits.worth.note_prefill(num_tokens, seconds)

    def note_ready(self, rank: Rank, num_slots: int) -> None:
        """The first ``num_slots`` host slots of a rank can be used.

        A slot is given out once every rank has said so: its bytes are spread over all of them.
        """
        ready = self._ready
        if not 0 <= rank < len(ready):
            raise InputError(f"rank {rank} has slots ready; ranks are 0 to {len(ready) - 1}")
        if num_slots > ready[rank]:
            ready[rank] = num_slots
            self.pool.grow(min(*ready, self.pool.num_slots))

    def note_health(self, health: Health) -> None:
        """A tier went away on a rank, or came back: it is used while it can be on every rank.

        Who waits for one that is away waits no longer than to the next ``settle``.
        """
        self._parts.lower.note_health(health)

    # -- plan and settle --------------------------------------------------------------------------

    def plan(self, *, counts: bool = True) -> Plan:
        """Everything ordered since the last plan, loads first; hand it to every rank's worker.

        Who is in a hurry ``counts`` what was answered afterwards (:meth:`count_answered`).
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        if counts and self._parts.owing:
            self._parts.tell_owing()
        if self._parts.lower.tiers:
            if self.control.is_busy:
                self.control.advance()
            if self._ahead.is_busy:
                self._ahead.advance()
            self.writeback.spill()
        return self._outbox.launch(self._clock())

    def settle(self, receipts: Iterable[Receipt] = (), *, looks: bool = True) -> Settled:
        """Take the ranks' receipts and look at the deadlines; says what changed for the engine.

        Who knows that ranks could not answer for a while ``looks`` at deadlines when they could.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        landed = self._flights.settle(receipts)
        return self._settling.report(landed, self._clock(), looks=looks)

    def disown(self, request: Request) -> None:
        """What was ordered to be stored of a request is never to be found, whatever became of it.

        For who cannot say when its device blocks may be written again.
        """
        self._outbox.drop_stores(request)
        self._flights.disown(request)

    def lose_rank(self, rank: Rank, reason: str) -> Settled:
        """A rank is gone for good and touches no memory: what waits for it fails now."""
        if self._closed:
            raise ClosedError(_CLOSED)
        return self._settling.report(self._flights.lose_rank(rank, reason), self._clock())

    def reset(self) -> None:
        """Forget every block on every tier, at once. Transfers in flight end harmlessly.

        A request whose load is under way keeps what it was promised, as it keeps the blocks it
        already has on the device; but nothing of it is stored until it has been preempted, for
        those blocks may stem from weights that are no more. The engine must forget its own prefix
        cache too: what it still finds there, or offers, is taken for new.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        parts = self._parts
        # Before they count as outdated: what a miss owes is counted by what was true until now.
        parts.tell_owing()
        if parts.rests is not None:
            for rest in parts.rests.take_all():
                parts.released.extend(rest.held)
                rest.request.end_left()
        for request in parts.live:
            request.forget()
        self.control.reset()
        self._ahead.reset()
        self.pool.reset()
        parts.lower.reset()
        self._num_resets += 1
        self.epoch = new_epoch(self.epoch)
        parts.matcher.begin_epoch(self.epoch)

    def close(self) -> None:
        """End every request, flight and lease. Close the workers first. Safe to call twice."""
        if not self._closed:
            self.control.reset()
            self._ahead.reset()
            for request in self.requests:
                request.end()
            self._outbox.discard()
            self._flights.abandon("closed")
            self._parts.accounts.close()
            for pool in self._pools:
                pool.catch_up()
            self._closed = True

    def watch_requests(self) -> None:
        """Learn from requests, on a thread beside the engine: see the settings that say what."""
        self._parts.accounts.watch(self._config, self.pool, self._clock)

    # -- looking ----------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Transfers handed out whose receipts are not all here yet."""
        return len(self._flights)

    @property
    def num_awaited(self) -> int:
        """Those of them whose time is not up."""
        return self._flights.num_awaited

    @property
    def bytes_in_flight(self) -> int:
        """Bytes on their way between device and host, as far as their time is not up."""
        return self._transit.num_bytes

    def take_released(self) -> tuple[DeviceBlocks, ...]:
        """Device blocks that no transfer touches any more, for those who cannot wait for settle."""
        released = tuple(self._parts.released)
        self._parts.released.clear()
        return released

    @property
    def num_queued(self) -> int:
        """Copies ordered but not yet in a plan."""
        return len(self._outbox)

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request got no more than it did, as of its last look-up; None if too long ago."""
        entry = self.journal(request_id)
        return entry.explanation if entry is not None else None

    def journal(self, request_id: RequestId) -> Entry | None:
        """What is remembered of a request, its transfers too; None if too long ago."""
        self._parts.tell_owing()
        return self._parts.journal.entry(request_id)

    def recent(self) -> tuple[RequestId, ...]:
        """The requests still remembered, the latest last."""
        self._parts.tell_owing()
        return self._parts.journal.request_ids()

    @property
    def load_bandwidth(self) -> float | None:
        """Bytes per second of loads to the device, as measured; None while unknown."""
        return self._parts.hits.worth.bandwidth

    def stats(self) -> SchedulerStats:
        """A snapshot of everything counted so far."""
        self._parts.tell_owing()
        return self._snapshot()

    def _snapshot(self) -> SchedulerStats:
        return snapshot(self._parts, resets=self._num_resets)

    def check_integrity(self) -> None:
        """Prove the bookkeeping, the pools' included; raises IntegrityError."""
        self.pool.check_integrity()
        self._parts.lower.check_integrity()
