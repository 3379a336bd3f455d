"""The scheduler half: match, plan, settle. Decides which blocks move; never touches a byte.

::

    match -> pinned hit -> load  \\
                                  plan => workers => settle
    store, offer --------------- /

The engine speaks in tokens and hands over block tables; which slots move follows from the groups.
A request id may be used again once the request is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from kvferry import reach
from kvferry.answers import DeviceBlocks, Match, MatchState, Settled
from kvferry.config import Config
from kvferry.errors import ClosedError, InputError
from kvferry.keys import KeyChain, Keys
from kvferry.pool import Pool
from kvferry.scheduler.flight import Flight, Flights
from kvferry.scheduler.hits import Hits
from kvferry.scheduler.journal import Entry, Journal
from kvferry.scheduler.landings import Landings
from kvferry.scheduler.level import Level
from kvferry.scheduler.levels import LowerLevels
from kvferry.scheduler.lookups import Lookups
from kvferry.scheduler.matching import Matcher, Missing
from kvferry.scheduler.outbox import Outbox
from kvferry.scheduler.request import Loading, RequestRecord
from kvferry.scheduler.requests import Requests
from kvferry.scheduler.snapshot import snapshot
from kvferry.scheduler.storing import BlockTable, Storing
from kvferry.scheduler.why import Explanation
from kvferry.stats import SchedulerStats
from kvferry.types import (
    DEVICE,
    HOST,
    Health,
    Plan,
    Rank,
    Receipt,
    RequestId,
)


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
        levels: Sequence[Level] = (),
        joins_loads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve an engine whose layers form ``groups``, from the host slots in ``pool``.

        ``hash_block_tokens`` is what one key of a request's chain covers (default: the smallest
        slot). ``num_device_blocks`` lets the bounds on loads and stores follow the device's size,
        ``block_bytes`` (of one device block, per group) lets bytes in flight and load times be
        known. ``levels`` lie below the host. ``joins_loads`` says that the engine shares device
        blocks between requests: a block that one request loads then serves the others once it has
        landed, so a second request that wants it waits and loads nothing.
        """
        _require_sizes(groups, num_ranks, block_bytes)
        config = config if config is not None else Config()
        hash_tokens = hash_block_tokens or min(group.slot_tokens for group in groups)
        self.pool = pool
        self.groups = tuple(groups)
        self._config = config
        self._clock = clock
        self._block_bytes = tuple(block_bytes) or (0,) * len(self.groups)
        self._ready = [pool.num_ready] * num_ranks
        self._flights = Flights(num_ranks)
        rows_per_slot = max(group.blocks_per_slot for group in self.groups)
        self._outbox = Outbox(self._flights, config, len(self.groups), rows_per_slot)
        self._lower = LowerLevels(pool, levels, self._outbox, clock)
        self._matcher = Matcher(self.groups, pool, self._lower, hash_tokens)
        both = (self._matcher, pool, self._outbox, config)
        self._storing = Storing(
            *both,
            max_blocks=_bound(config.max_storing_blocks, num_device_blocks, 4),
            block_bytes=self._block_bytes,
        )
        self._hits = Hits(
            *both,
            max_blocks=_bound(config.max_loading_blocks, num_device_blocks, 2),
            block_bytes=self._block_bytes,
            joins_loads=joins_loads,
            clock=clock,
        )
        self._journal = Journal()
        self._requests = Requests(self.groups, self._journal)
        admission = self._storing.admission
        self._lookups = Lookups(
            self._matcher, pool, self._hits, self._lower, self._requests, self._journal, admission
        )
        self._landings = Landings(
            self.groups,
            pool,
            self._flights,
            self._hits,
            self._lower,
            self._requests,
            self._journal,
            stores_in_order=not self._storing.is_lazy,
        )
        self._closed = False

    # -- match ----------------------------------------------------------------------------------

    def begin(self, request_id: RequestId) -> bool:
        """Know a request that may never be matched: a reset is about its blocks, too.

        False if one of this name is known already.
        """
        self._require_open()
        is_new = self._requests.get(request_id) is None
        self._requests.record(request_id)
        return is_new

    def match(
        self,
        request_id: RequestId,
        keys: Keys,
        *,
        computed_tokens: int = 0,
        max_tokens: int | None = None,
        spare_tokens: int = 0,
    ) -> Match:
        """How many tokens of this request can be had without computing them; pins their slots.

        ``keys`` is the request's chain; the engine itself has the first ``computed_tokens``.
        ``max_tokens`` caps the answer (a request must compute at least one token itself), and a hit
        leaves its last ``spare_tokens`` to compute in any case. Asking again while nothing changed
        is cheap. A pinned hit is let go by ``load``, ``finish``, ``preempt``, or its deadline.
        """
        self._require_open()
        return self._lookups.match(
            request_id,
            keys,
            computed_tokens=computed_tokens,
            max_tokens=self._covered(keys, max_tokens),
            spare_tokens=spare_tokens,
        )

    def next_missing(
        self, chain: KeyChain, *, computed_tokens: int = 0, max_tokens: int | None = None
    ) -> Missing | None:
        """A slot for want of which :meth:`match` would find nothing; None where it might.

        Asks for one key, remembers nothing and needs no request: for an engine whose step cannot
        wait. Say later, with :meth:`note_miss`, that this was the answer.
        """
        self._require_open()
        max_tokens = self._covered(chain, max_tokens)
        return self._matcher.next_missing(chain, computed_tokens, max_tokens)

    def note_miss(
        self,
        request_id: RequestId,
        keys: Keys,
        missing: Missing,
        *,
        computed_tokens: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        """A request was answered by :meth:`next_missing`: it counts as looked up, and is explained.

        The reason is that of now: a block may have been stored and evicted since.
        """
        self._require_open()
        self._lookups.note_miss(
            request_id,
            keys,
            missing,
            computed_tokens=computed_tokens,
            max_tokens=self._covered(keys, max_tokens),
        )

    def _covered(self, chain: KeyChain, max_tokens: int | None) -> int:
        """As many tokens as were asked for and have keys."""
        covered = len(chain) * self._matcher.hash_tokens
        return covered if max_tokens is None else min(max_tokens, covered)

    # -- load and store ---------------------------------------------------------------------------

    def load(self, request_id: RequestId, tables: Sequence[BlockTable]) -> tuple[DeviceBlocks, ...]:
        """Order the pinned hit of a request into its device blocks; it goes with the next plan.

        ``tables[g]`` is the request's whole block table of group g, long enough for the hit.
        Returns the device blocks written: hold each until ``settle`` releases it. Empty if the
        hit was lost meanwhile (a reset, its deadline): the tokens must be computed then. Where a
        window or a chunk leaves a hit unread, the table says ``NO_BLOCK`` until it is computed.
        """
        self._require_open()
        self._require_tables(tables)
        record = self._requests.record(request_id)
        hit = record.hit
        if hit is None or hit.match.state is not MatchState.HIT:
            return ()
        transfers = [order.transfer for order in self._hits.load(request_id, hit, tables)]
        record.hit = None
        record.asked = False
        record.promoted = False
        if not transfers:  # a hit that reads nothing has no landing to wait for
            return ()
        record.loading = Loading(hit.match, {transfer.id for transfer in transfers})
        self._requests.wait(request_id, record.loading.waiting)
        self._lookups.counts.hit_tokens += hit.match.to_load
        return tuple(DeviceBlocks(transfer.group, transfer.dst_slots) for transfer in transfers)

    def store(
        self,
        request_id: RequestId,
        keys: Keys,
        tables: Sequence[BlockTable],
        num_tokens: int,
    ) -> tuple[DeviceBlocks, ...]:
        """Order what is new of the first ``num_tokens`` of a request into the pool.

        Call it once the compute of these tokens is queued on the device, a last time just before
        ``finish``. Whole slots only; what is stored already, on its way, or finds no room is left
        out. Returns the device blocks read: hold each until ``settle`` releases it. With lazy
        stores it orders nothing; see :meth:`offer`.
        """
        self._require_open()
        self._require_tables(tables)
        record = self._requests.record(request_id)
        if record.outdated or self._storing.is_lazy:
            return ()
        num_tokens = min(num_tokens, len(keys) * self._matcher.hash_tokens)
        return self._storing.computed(request_id, record, keys, tables, num_tokens)

    def skip_stored(self, request_id: RequestId, keys: Keys, num_tokens: int) -> int:
        """Pass over these leading tokens, if they are kept; then it is as ``stored_tokens``.

        For a request that returns with so many: :meth:`store` would find the same, but looks at
        each block and needs its block tables for it.
        """
        self._require_open()
        record = self._requests.record(request_id)
        if not record.outdated and not self._storing.is_lazy:
            num_tokens = min(num_tokens, len(keys) * self._matcher.hash_tokens)
            self._storing.skip_known(record, keys, num_tokens)
        return self.stored_tokens(request_id)

    def go_on(self, request_id: RequestId, ended_id: RequestId) -> None:
        """A request goes on where another ended, and stores what that one has left to be stored.

        What the other stored counts as its own; the other is finished.
        """
        self._require_open()
        ended = self._requests.get(ended_id)
        if ended is not None:
            record = self._requests.record(request_id)
            record.stored = list(ended.stored)
            record.outdated |= ended.outdated
            self.finish(ended_id)

    def stored_tokens(self, request_id: RequestId) -> int:
        """Leading tokens that :meth:`store` is done with; while there are more, call it again.

        Bounds may have made it leave the rest for later.
        """
        record = self._requests.get(request_id)
        if record is None:
            return 0
        return min(
            num_slots * group.slot_tokens
            for num_slots, group in zip(record.stored, self.groups, strict=True)
        )

    @property
    def stores_wait(self) -> bool:
        """Whether as much is being stored as may be at a time: :meth:`store` would leave more."""
        return self._storing.is_full

    @property
    def offer_depth(self) -> int:
        """How many blocks from the head of its free queue the engine should offer now."""
        return self._storing.depth

    def offer(self, group: int, keys: Keys, blocks: BlockTable) -> tuple[DeviceBlocks, ...]:
        """With lazy stores: these device blocks are the next to be dropped, soonest first.

        ``keys[i]`` is the chain key at the end of ``blocks[i]``. Returns those that are being
        stored: hold each until ``settle`` releases it.
        """
        self._require_open()
        return self._storing.offered(group, keys, blocks)

    def note_allocated(self, num_blocks: int) -> None:
        """The engine took this many device blocks in this step; lazy stores look ahead by it."""
        self._storing.demand(num_blocks)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed this many prompt tokens in this time; load-or-compute learns it."""
        self._hits.worth.note_prefill(num_tokens, seconds)

    def note_ready(self, rank: Rank, num_slots: int) -> None:
        """The first ``num_slots`` host slots of a rank can be used.

        A slot is given out once every rank has said so: its bytes are spread over all of them.
        """
        if not 0 <= rank < len(self._ready):
            raise InputError(f"rank {rank} has slots ready; ranks are 0 to {len(self._ready) - 1}")
        self._ready[rank] = max(self._ready[rank], num_slots)
        self.pool.grow(min(*self._ready, self.pool.num_slots))

    def note_health(self, health: Health) -> None:
        """A level went away on a rank, or came back: it is used while it can be on every rank.

        Who waits for one that is away waits no longer than to the next ``settle``.
        """
        self._lower.note_health(health)

    # -- plan and settle --------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Everything ordered since the last plan, loads first; hand it to every rank's worker."""
        self._require_open()
        self._lower.spill()
        return self._outbox.launch(self._clock())

    def settle(self, receipts: Iterable[Receipt] = ()) -> Settled:
        """Take the ranks' receipts and look at the deadlines; says what changed for the engine."""
        self._require_open()
        num_bytes, seconds = self._flights.counts.moved(HOST, DEVICE)
        landed = self._flights.settle(receipts)
        now_bytes, now_seconds = self._flights.counts.moved(HOST, DEVICE)
        self._hits.worth.note_load(now_bytes - num_bytes, now_seconds - seconds)
        return self._settled(landed)

    def lose_rank(self, rank: Rank, reason: str) -> Settled:
        """A rank is gone for good and touches no memory: what waits for it fails now."""
        self._require_open()
        return self._settled(self._flights.lose_rank(rank, reason))

    def _settled(self, landed: Sequence[Flight]) -> Settled:
        settled = self._landings.report(landed, self._clock())
        self._lookups.counts.expired_hits += len(settled.expired)
        return settled

    # -- a request's ends -------------------------------------------------------------------------

    def finish(self, request_id: RequestId) -> None:
        """The request is over (done or aborted). Its stores go on; its hit and loads do not count.

        Unknown requests are fine: engines end requests that never came to us.
        """
        record = self._requests.remove(request_id)
        if record is not None:
            self._let_go(request_id, record)

    abort = finish

    def preempt(self, request_id: RequestId) -> None:
        """The engine took the request's device blocks away; it may be matched again later."""
        record = self._requests.get(request_id)
        if record is not None:
            self._let_go(request_id, record)
            record.renew()

    def _let_go(self, request_id: RequestId, record: RequestRecord) -> None:
        record.let_go()
        for order in self._outbox.cancel_loads(request_id):
            self._landings.cancel(order)
        self._requests.stop_waiting(request_id, record)

    def reset(self) -> None:
        """Forget every block on every level, at once. Transfers in flight end harmlessly.

        A request whose load is under way keeps what it was promised, as it keeps the blocks it
        already has on the device; but nothing of it is stored until it has been preempted, for
        those blocks may stem from weights that are no more. The engine must forget its own prefix
        cache too: what it still finds there, or offers, is taken for new.
        """
        self._require_open()
        for record in self._requests.records():
            record.let_go()
            record.outdated = True
        self.pool.reset()
        self._lower.reset()
        self._matcher.epoch += 1

    def close(self) -> None:
        """End every request, flight and lease. Close the workers first. Safe to call twice."""
        if not self._closed:
            for request_id in self._requests.ids():
                self.finish(request_id)
            self._outbox.discard()
            self._flights.abandon("closed")
            self._lookups.close()
            self._closed = True

    # -- looking ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """How often everything was forgotten."""
        return self._matcher.epoch

    @property
    def num_in_flight(self) -> int:
        """Transfers handed out whose receipts are not all here yet."""
        return len(self._flights)

    @property
    def num_awaited(self) -> int:
        """Those of them whose time is not up."""
        return self._flights.num_awaited

    @property
    def has_released(self) -> bool:
        """Whether the next ``settle`` gives device blocks back, receipts or not."""
        return self._landings.has_released

    @property
    def num_queued(self) -> int:
        """Copies ordered but not yet in a plan."""
        return len(self._outbox)

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request got no more than it did, as of its last look-up; None if too long ago."""
        entry = self._journal.entry(request_id)
        return entry.explanation if entry is not None else None

    def journal(self, request_id: RequestId) -> Entry | None:
        """What is remembered of a request, its transfers too; None if too long ago."""
        return self._journal.entry(request_id)

    def recent(self) -> tuple[RequestId, ...]:
        """The requests still remembered, the latest last."""
        return self._journal.request_ids()

    def stats(self) -> SchedulerStats:
        """A snapshot of everything counted so far."""
        return snapshot(
            self.pool,
            self._lower,
            self._flights,
            self._outbox,
            self._storing,
            self._hits,
            self._lookups.counts,
            block_bytes=self._block_bytes,
            resets=self.epoch,
        )

    def check_integrity(self) -> None:
        """Prove the bookkeeping, the pools' included; raises IntegrityError."""
        self.pool.check_integrity()
        self._lower.check_integrity()

    def _require_tables(self, tables: Sequence[BlockTable]) -> None:
        if len(tables) != len(self.groups):
            raise InputError(
                f"got {len(tables)} block tables for {len(self.groups)} groups; give one per group"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the scheduler is closed")


def _require_sizes(
    groups: Sequence[reach.Group], num_ranks: int, block_bytes: Sequence[int]
) -> None:
    if num_ranks < 1:
        raise InputError(f"num_ranks must be at least 1, got {num_ranks}")
    if not groups:
        raise InputError("no groups given; a model has at least one")
    if block_bytes and len(block_bytes) != len(groups):
        raise InputError(f"got {len(block_bytes)} block sizes for {len(groups)} groups")


def _bound(given: int | None, num_device_blocks: int | None, share: int) -> int | None:
    """A bound as given, or this share of the device's blocks; None where neither is known."""
    if given is not None or num_device_blocks is None:
        return given
    return max(1, num_device_blocks // share)
