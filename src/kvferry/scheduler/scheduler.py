"""The scheduler half: requests, plans, settling. Decides which blocks move; never touches a byte.

::

    open ──> Request: match -> load  \\
                             store    plan => workers => settle
             offer ----------------- /

The engine speaks in tokens and hands over block tables; which blocks move follows from the groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from kvferry import reach
from kvferry.answers import DeviceBlocks
from kvferry.config import Config
from kvferry.errors import ClosedError, InputError
from kvferry.hints import Hints
from kvferry.identity import new_epoch
from kvferry.keys import KeyChain, Keys
from kvferry.pool import Pool
from kvferry.scheduler.ahead import Ahead
from kvferry.scheduler.assembly import assemble
from kvferry.scheduler.control import Control
from kvferry.scheduler.engine_shape import EngineShape
from kvferry.scheduler.hinted import HintedRequest
from kvferry.scheduler.journal import Entry
from kvferry.scheduler.leaving import store_left
from kvferry.scheduler.level import Level
from kvferry.scheduler.orders import BlockTable, EngineBlocks, Ordered
from kvferry.scheduler.request import Request
from kvferry.scheduler.rests import Rests
from kvferry.scheduler.settled import Settled
from kvferry.scheduler.settling import Settling
from kvferry.scheduler.snapshot import Onlooker, snapshot
from kvferry.scheduler.why import Explanation
from kvferry.stats import SchedulerStats
from kvferry.types import NO_SLOT, Health, Plan, Rank, Receipt, RequestId

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
        levels: Sequence[Level] = (),
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
        stored: drafts of them may still be refused. ``levels`` lie below the host. ``joins_loads``
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
        self._parts = parts = assemble(pool, shape, levels, self._config, engine, clock)
        self.pool = pool
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
        self.write_out = parts.lower.write_out
        """What goes to the disk while the engine has nothing to do."""
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
        if hints is None:
            request = Request(request_id, chain, self._parts)
        else:
            request = HintedRequest(request_id, chain, self._parts, hints, unheeded)
        self._parts.live[request] = None
        return request

    def prefetch(self, request: Request) -> None:
        """This request waits in the engine's queue: bring up what levels have of it, meanwhile.

        Within a share of the host, and no sooner than the next plan. What came up and is not asked
        for in time goes before anything else.
        """
        self._ahead.ask(request)

    def num_loadable(self, keys: Keys, first: int, end: int) -> int:
        """How many blocks of the first group, from this one on, are in the host now."""
        return self.pool.match(self._parts.matcher.slot_keys(0, keys, range(first, end)))

    def knows(self, keys: Keys, block: int) -> bool:
        """Whether this block of the first group is in the host, or on its way there."""
        key = self._parts.matcher.key_before(0, keys, block + 1)
        return key is not None and self.pool.slot_of(key) != NO_SLOT

    def make_spare(self, keys: Keys) -> None:
        """Room for another store as large as that of these keys; see :meth:`Pool.make_spare`."""
        self.pool.make_spare(self._parts.matcher.all_keys(0, keys))

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
        """A level went away on a rank, or came back: it is used while it can be on every rank.

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
        if self._parts.lower.levels:
            if self.control.is_busy:
                self.control.advance()
            if self._ahead.is_busy:
                self._ahead.advance()
            self._parts.lower.spill()
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
        """Forget every block on every level, at once. Transfers in flight end harmlessly.

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
