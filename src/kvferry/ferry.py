"""A ferry: both halves in one process, for an engine that calls us directly."""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.cache.policies.contract import policy_named
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention, Group
from kvferry.config import Config
from kvferry.core.identity import Extra, Namespace, chain, scope
from kvferry.core.keys import Keys
from kvferry.core.lifecycle import Closing, OneThread, close_if_dropped, pause, weakly
from kvferry.core.quantities import Integers, integer, integers
from kvferry.errors import ClosedError, DeadlineError, InputError
from kvferry.ferry_metrics import FerryLooks
from kvferry.hints import Hints, read_seconds
from kvferry.rank import RankMemory
from kvferry.scheduler.control import Acted
from kvferry.scheduler.packed_tier import lower_tier
from kvferry.scheduler.promotion import State
from kvferry.scheduler.request import Request
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import WriteMode
from kvferry.scheduler.transfers import NO_BLOCK, Ordered
from kvferry.telemetry.mailbox import Inbox
from kvferry.tickets import Awaited, Done, Hit, PendingHits, Ticket, Tickets, not_a_hit, pending
from kvferry.transfer.layout import GroupLayout
from kvferry.types import DEVICE, FIRST_RANK, HOST, Key, MatchState, SlotArray, TransferId
from kvferry.worker import Worker

if TYPE_CHECKING:
    from kvferry.telemetry.endpoint import Endpoint


Said = Hints | Mapping[str, Any] | None
"""What is known of a request, as callers give it."""


def read_hints(said: Said) -> Hints | None:
    """In our form; None where nothing was said."""
    return said if said is None or isinstance(said, Hints) else Hints.read(said)


class FerryControl:
    """Actions by a request's keys. Owns nothing: the ferry does.

    Each says how much it found and did, and what it did not do, and why (:class:`Acted`).
    """

    _owner: OneThread
    _scheduler: Scheduler

    def _send_plan(self) -> None:
        raise NotImplementedError

    def lookup(self, keys: Keys) -> Acted:
        """What of these blocks is where, without claiming or moving any."""
        self._owner.require()
        return self._scheduler.control.lookup(_checked(keys))

    def hint(self, keys: Keys, hints: Hints | Mapping[str, Any]) -> Acted:
        """Say something about blocks that are here: that a conversation is over, or goes on."""
        self._owner.require()
        said = read_hints(hints)
        if said is None:
            raise InputError("hints must be given; see kvferry.hints.Hints")
        return self._scheduler.control.hint(_checked(keys), said)

    def pin(self, keys: Keys, seconds: float | str | None = None) -> Acted:
        """Let these blocks stay so long, or until they are unpinned, reset or closed.

        At most ``Config.pin_share`` of each tier is held, the beginning of a request first.
        """
        self._owner.require()
        return self._scheduler.control.pin(_checked(keys), _seconds(seconds))

    def unpin(self, keys: Keys) -> Acted:
        """Let these blocks go as all others: pins, keeps and priorities of them are forgotten."""
        self._owner.require()
        return self._scheduler.control.unpin(_checked(keys))

    def prefetch(self, keys: Keys, *, keep: float | str | None = None) -> Acted:
        """Bring these blocks up to host memory before they are asked for, and keep them so long.

        They come with :meth:`Ferry.poll`.
        """
        self._owner.require()
        done = self._scheduler.control.prefetch(_checked(keys), _seconds(keep))
        self._send_plan()
        return done

    def drop(self, keys: Keys) -> Acted:
        """Forget these blocks on every tier, but for those that other requests go on from."""
        self._owner.require()
        return self._scheduler.control.drop(_checked(keys))


def _checked(keys: Keys) -> Keys:
    if not isinstance(keys, Keys):
        raise InputError(f"keys must come from ferry.keys, got {type(keys).__name__}")
    return keys


def _seconds(seconds: float | str | None) -> float | None:
    return None if seconds is None else read_seconds("seconds", seconds)


# ------------------------------------------------------------------------------------------------
# How much of a large store goes ahead, while room is made for the rest of it.
#
# ::
#
#     one piece     |look up, evict, take slots      |▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓|
#     ahead         |look up, take|▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓|
#                                 |evict, take slots   |
#
# A pool that is full keeps a few slots free, side by side. What fits them needs no decision
# about who
# goes, and is copied while that is made. With no such slots, or none to be made, there is one
# piece.

LEAST_BYTES, MOST_BYTES = 8 << 20, 48 << 20
"""A copy of the least takes about as long as ordering one more; of the most, longer than anybody
takes to find room, and more would only scatter what is kept free for others."""
_LEAST_TIMES = 12
"""As large as the least a store must be: with two pieces its slots are scattered further, which
look-ups and loads pay for. At 64 MB they paid as much as was gained, at 268 a tenth of it."""
_MOST_RUNS = 1
"""Of free slots: with more, a conversation would be scattered further whenever it is stored."""


class FirstPiece:
    """Owns only its bounds; the slots are the pool's, of one group's blocks of ``block_bytes``."""

    def __init__(
        self,
        scheduler: Scheduler,
        block_bytes: int,
        *,
        least: int = LEAST_BYTES,
        most: int = MOST_BYTES,
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._least = -(-least // block_bytes)
        self._most = most // block_bytes

    def num_blocks(self, keys: Keys, first: int) -> int:
        """How many of the blocks from ``first`` on go ahead of the others; 0 where all go as one.

        So it is where there is room for all of them, or where the first is kept already: what is
        new begins later then, and looking for it twice takes longer than is gained.
        """
        pool, num_new = self._pool, len(keys.array) - first
        if num_new < _LEAST_TIMES * self._least or num_new <= pool.num_free or pool.is_divided:
            return 0
        count = min(num_new // 2, self._most, pool.num_free_together(_MOST_RUNS))
        if count < self._least or self._scheduler.knows(keys, first):
            return 0
        # Of the whole store, before a byte of it moves: each piece alone could not see it.
        pool.require_distinct(keys)
        return count


# ------------------------------------------------------------------------------------------------
# Why a store kept fewer blocks than it was given.


def why_left_out(
    scheduler: Scheduler,
    config: Config,
    keys: Keys,
    *,
    first: int,
    num_ordered: int,
    block_bytes: int,
    most: int | None = None,
) -> str:
    """Why of the blocks just given, those of ``keys`` from ``first`` on, only these are copied.

    Empty if the others are kept already, unless that is all of them. ``most`` is how many blocks a
    hint lets be kept, where one does.
    """
    given = len(keys) - first
    if num_ordered == given:
        return ""
    known = scheduler.pool.known(keys.masked(scope(scheduler.epoch, 0)))
    if known[first:].all():
        return "" if num_ordered else "kept already"
    gap = int(np.argmin(known))
    if most is not None and most <= max(gap, first):
        return _told_not_to(max(gap, first), len(keys), most)
    if gap < first:
        return (
            f"block {gap} is not kept, so the blocks from {first} on could never be found; "
            "store from there on"
        )
    where = _blocks(gap, len(keys))
    if block_bytes > config.max_bytes_in_flight:
        return f"{where}: one has {block_bytes} bytes, more than max_bytes_in_flight"
    if scheduler.stores_wait:
        return f"{where}: as much is on its way as may be (max_bytes_in_flight); store them later"
    if config.store_threshold > 1:
        return (
            f"{where}: not asked for often enough yet (store_threshold = {config.store_threshold})"
        )
    pool = scheduler.pool
    if len(keys) > pool.num_slots:
        return f"{where}: the host memory holds no more than {pool.num_slots} blocks"
    if pool.counts.cached and config.tenants:
        return (
            f"{where}: host memory is full, and others keep to their shares (tenants), its policy "
            f"({config.policy}) would rather keep what is there, or what is being copied depends "
            "on it"
        )
    if pool.counts.cached:
        return (
            f"{where}: host memory is full, and its policy ({config.policy}) would rather keep "
            "what is there, or what is being copied depends on it"
        )
    return (
        f"{where}: no slot can be freed now, for all {pool.num_ready} that are ready are being "
        "copied or pinned by hits"
    )


def _blocks(first: int, stop: int) -> str:
    return f"blocks {first} to {stop - 1}" if first < stop - 1 else f"block {first}"


def _told_not_to(first: int, stop: int, most: int) -> str:
    where = _blocks(first, stop)
    if not most:
        return f"{where}: a hint says that nothing is to be kept (do_not_store, max_store_tokens)"
    return f"{where}: a hint lets nothing be kept from block {most} on (max_store_tokens)"


# ------------------------------------------------------------------------------------------------
# Block tables as callers of a ferry give them: checked, and whole.

Tables = Integers | Sequence[Integers]
"""Device blocks: a vector of them, or with several groups a block table for each."""


def whole_tables(layouts: Sequence[GroupLayout], given: Tables, *, before: int) -> list[SlotArray]:
    """Whole block tables, by group; one alone is given without the blocks ``before``."""
    if len(layouts) == 1:
        blocks = _block_tables_checked(layouts[0], given, least=0)  # type: ignore[arg-type]  # a vector
        return [np.concatenate((np.full(before, NO_BLOCK), blocks)) if before else blocks]
    if not isinstance(given, Sequence) or len(given) != len(layouts):
        raise InputError(f"there are {len(layouts)} groups: give a block table for each of them")
    return [
        _block_tables_checked(layout, table, least=NO_BLOCK)  # type: ignore[arg-type]
        for layout, table in zip(layouts, given, strict=True)
    ]


def _block_tables_checked(layout: GroupLayout, blocks: Integers, *, least: int) -> SlotArray:
    numbers, most = integers(blocks, "device blocks"), layout.num_blocks
    # Counted from the least one, as unsigned numbers, what is too small is too large.
    counted = numbers if not least else numbers - least
    if len(numbers) and int(np.maximum.reduce(counted.view(np.uint64))) >= most - least:
        wrong = int(numbers[(numbers < least) | (numbers >= most)][0])
        raise InputError(
            f"device block {wrong} does not exist: the tensors have blocks 0 to {most - 1}"
        )
    return numbers


class Distinct:
    """Finds out whether blocks are named twice. Owns a place for each; one thread at a time."""

    def __init__(self, layouts: Sequence[GroupLayout]) -> None:
        # One more than there are blocks: that is where NO_BLOCK leads.
        self._place = np.empty(max(layout.num_blocks for layout in layouts) + 1, dtype=np.int64)

    def are(self, blocks: SlotArray) -> bool:
        """Whether each of these, which exist or are ``NO_BLOCK``, is another one."""
        at = np.arange(len(blocks))
        self._place[blocks] = at  # of one that is named twice the last place stays
        return bool((self._place.take(blocks) == at).all())


# ------------------------------------------------------------------------------------------------
# Keeping blocks: what a ferry's ``store`` checks, orders and sends off, in one piece or two.

_ferry_storing_names = itertools.count()
"""For all ferries of the process, as those of hits are."""


class FerryStoring(ABC):
    """The way in. Leaves tickets, requests and copies to the ferry."""

    namespace: Namespace
    _owner: OneThread
    _layouts: tuple[GroupLayout, ...]
    _config: Config
    _rank: RankMemory
    _scheduler: Scheduler
    _tickets: Tickets
    _written_later: AbstractContextManager[None]
    _first_piece: FirstPiece | None

    @abstractmethod
    def _note_ready(self) -> None: ...

    @abstractmethod
    def _send_off(self) -> None: ...

    def store(
        self, keys: Keys, device_blocks: Tables, *, first: int = 0, hints: Said = None
    ) -> Ticket:
        """Keep ``device_blocks``, which hold the blocks of ``keys`` from number ``first`` on.

        What is kept already is not copied again, and what finds no room is left out; ``Done`` says
        how many blocks were copied, and why not all. Blocks that follow one that is not kept could
        never be found, so they are left out too. Do not overwrite the device blocks until it ended.
        With several groups these are whole block tables, one for each group; ``NO_BLOCK`` where the
        engine keeps no block (any more). ``hints``, as for :meth:`match`, say how long all blocks
        of this request should stay.
        """
        self._owner.require()
        if not isinstance(keys, Keys):
            raise InputError(f"keys must come from ferry.keys, got {type(keys).__name__}")
        first = first if type(first) is int else integer(first, "first")
        num_keys = len(keys)
        before = min(max(0, first), num_keys)
        tables = whole_tables(self._layouts, device_blocks, before=before)
        if first != before or (len(tables) == 1 and len(tables[0]) != num_keys):
            raise InputError(
                f"{len(tables[0]) - before} device blocks from block {first} on do not fit "
                f"{num_keys} keys; there must be one key per block, from the first block on"
            )
        self._rank.note_step()
        self._note_ready()  # else what has grown since the last poll would find no room
        ticket = self._tickets.give()
        request = self._scheduler.open(f"store-{next(_names)}", keys, read_hints(hints))
        try:
            with self._written_later:
                ahead = self._send_ahead(request, tables, keys, first)
                self._send_rest(request, tables, keys, first, ticket, ahead)
            if self._first_piece is not None:
                self._scheduler.make_spare(keys)
        except BaseException:
            # Its caller has no ticket to wait for, and may write to those blocks: whatever is, or
            # was to be, copied of them must never be found.
            self._tickets.drop(ticket)
            self._scheduler.disown(request)
            raise
        finally:
            request.end()
        return ticket

    def _send_ahead(
        self, request: Request, tables: Sequence[SlotArray], keys: Keys, first: int
    ) -> tuple[Ordered, ...]:
        """Send off what needs no room to be made, of a store that does."""
        piece = self._first_piece
        count = piece.num_blocks(keys, first) if piece is not None else 0
        if not count:
            return ()
        ordered = request.store(tables, (first + count) * self.namespace.block_tokens)
        self._send_off()
        self._scheduler.pool.later.catch_up()  # the rest follows these, so they must be known
        return ordered

    def _send_rest(
        self,
        request: Request,
        tables: Sequence[SlotArray],
        keys: Keys,
        first: int,
        ticket: Ticket,
        ahead: tuple[Ordered, ...],
    ) -> None:
        num_keys, note = len(keys), ""
        ordered = ahead + request.store(tables, num_keys * self.namespace.block_tokens)
        if len(tables) == 1:
            num_ordered = sum(len(order.blocks) for order in ordered)
            if num_ordered < num_keys - first:
                note = self._why_left_out(request, keys, first, num_ordered)
        self._tickets.send(ticket, ordered, note)
        self._send_off()

    def _why_left_out(self, request: Request, keys: Keys, first: int, num_ordered: int) -> str:
        hints, most = request.hints, None
        if hints is not None and hints.max_store_tokens is not None:
            most = hints.max_store_tokens // self.namespace.block_tokens
        self._scheduler.pool.later.catch_up()  # it is asked what it knows of these keys
        return why_left_out(
            self._scheduler,
            self._config,
            keys,
            first=first,
            num_ordered=num_ordered,
            block_bytes=self._layouts[0].block_bytes,
            most=most,
        )


# ------------------------------------------------------------------------------------------------
# Waiting for what a ferry does: for one end, for any, for a hit, or in an event loop.

_LOOK_SECONDS = 0.02
"""So often a ferry is served though no copy has ended: its growth, and who asks it."""
_LEVEL_SECONDS = 5e-4
"""The same where tiers bring something up, which nobody tells us."""


class FerryWaiting(ABC):
    """The ways to wait. Leaves tickets, hits and copies to the ferry."""

    _tickets: Tickets
    _rank: RankMemory
    _has_tiers: bool
    _awaited: Awaited

    @abstractmethod
    def again(self, hit: Hit) -> Hit: ...

    @abstractmethod
    def _advance(self) -> None: ...

    def poll(self, timeout: float = 0.0) -> list[Done]:
        """What ended since the last call; with a ``timeout``, waits so long for the first end.

        What nobody asks for is kept, up to the newest 65,536 ends.
        """
        began = time.monotonic()
        while True:
            self._advance()
            ended = self._tickets.take_all()
            waited = time.monotonic() - began
            if ended or waited >= timeout:
                return ended
            self._rest(waited, timeout)

    def wait(self, ticket: Ticket | int, timeout: float | None = None) -> Done:
        """Wait for one ticket; what else ends meanwhile stays for :meth:`poll`.

        In an event loop ``await`` the ticket instead: the loop goes on meanwhile.
        """
        began = time.monotonic()
        while True:
            self._advance()
            if (done := self._tickets.take(ticket)) is not None:
                return done
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                raise DeadlineError(f"ticket {ticket} did not end within {timeout} seconds")
            self._rest(waited, timeout)

    def await_hit(self, hit: Hit, timeout: float | None = None) -> Hit:
        """Poll until a hit is not pending any more; after ``timeout`` it may still be.

        What else ends meanwhile stays for :meth:`poll`.
        """
        began = time.monotonic()
        while (hit := self.again(hit)).is_pending:
            self._advance()
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                return self.again(hit)
            self._rest(waited, timeout)
        return hit

    async def ended(self, ticket: Ticket | int) -> Done:
        """What ``await ticket`` does: how a ticket ends, without holding the event loop.

        The loop must run in the thread the ferry belongs to. Any number of tasks may wait. One that
        is cancelled leaves the copy alone, and how it ended to whoever asks next.
        """
        return await self._awaited.wait(Ticket(integer(ticket, "ticket")))

    def _rest(self, waited: float, timeout: float | None) -> None:
        """Until something may have ended, or somebody else must be served."""
        most = _LEVEL_SECONDS if self._has_tiers else _LOOK_SECONDS
        left = most if timeout is None else timeout - waited
        self._rank.engine.await_news(min(most, left))


# ------------------------------------------------------------------------------------------------
# The scheduler half of a ferry, over one rank's memory and the tiers below it.


def scheduler_over(
    rank: RankMemory,
    layouts: Sequence[GroupLayout],
    groups: Sequence[Group],
    namespace: Namespace,
    config: Config,
) -> Scheduler:
    """The scheduler half over one rank's memory and the tiers below it."""
    return Scheduler(
        Pool(
            rank.host.num_slots,
            policy_named(config.policy),
            num_ready=rank.ready_slots,
            together=True,
        ),
        groups,
        config=config,
        hash_block_tokens=namespace.block_tokens,
        block_bytes=[layout.block_bytes for layout in layouts],
        tiers=[
            lower_tier(
                name,
                tier.num_places,
                WriteMode(config.tier_write),
                policy_named(config.tier_policy),
                recovered=[tier.recovered()],
                most_in_one=tier.most_in_one,
            )
            for name, tier in rank.tiers.items()
        ],
        joins_loads=False,
    )


# ------------------------------------------------------------------------------------------------
# What a ferry that closes still writes: blocks that only host memory holds, to the disk.

log = logging.getLogger(__name__)


def write_out(
    scheduler: Scheduler, advance: Callable[[], None], send: Callable[[], None], seconds: float
) -> None:
    """Go on with ``advance`` and ``send`` until all of it is written, or for so many seconds.

    Also what is being stored now; nobody waits for what is read. Whatever goes wrong, whoever
    closes goes on with that; an interrupt ends it, and is passed on.
    """
    began = time.monotonic()
    end = began + seconds
    try:
        while scheduler.write_out.can_be and (now := time.monotonic()) < end:
            advance()
            scheduler.write_out.advance()
            send()
            if not scheduler.write_out.is_under_way:
                return
            pause(now - began)
    except Exception:
        log.exception("what only host memory holds could not be written out")


# ------------------------------------------------------------------------------------------------
# Loads of hits whose blocks still come up from a tier: the first go on while the last are read.
#
# ::
#
#     tier   ──read──> ▓▓▓▓▓▓░░░░░░     pieces land in the host, one after the other
#     device  ──load──> ▓▓▓▓░░░░░░░░     each goes on as it lands, beside the next one's read
#
# What does not come up ends the load early: the blocks before it are there, the others are
# computed.

_early_loads_names = itertools.count()


@dataclass(eq=False)
class _EarlyPiece:
    """Blocks on their way to the device. ``reason`` says why they did not get there."""

    num_blocks: int
    waiting: set[TransferId]
    reason: str = ""


@dataclass(eq=False)
class _EarlyLoad:
    """One hit. ``request`` waits for what comes up; ``sent`` blocks of ``end`` are on their way."""

    request: Request
    keys: Keys
    table: SlotArray
    ticket: Ticket
    first: int
    sent: int
    end: int
    pieces: list[_EarlyPiece] = field(default_factory=list)


class EarlyLoads:
    """Owns loads of pending hits until they end, and the requests that wait for their blocks.

    Every piece is a request of its own, so a piece that fails, or finds its blocks gone, harms no
    other. For models whose hits read every block, of one group.
    """

    def __init__(self, scheduler: Scheduler, tickets: Tickets, block_tokens: int) -> None:
        self._scheduler = scheduler
        self._tickets = tickets
        self._tokens = block_tokens
        self._loads: list[_EarlyLoad] = []
        self._moving: dict[TransferId, _EarlyPiece] = {}

    def __bool__(self) -> bool:
        return bool(self._loads)

    def begin(self, request: Request, table: SlotArray, first: int, num_coming: int) -> Ticket:
        """Fill the places of a block table after the ``first`` ones, as their blocks come.

        Nothing is ordered before :meth:`advance`. Refuses a table that does not fit what is coming;
        nothing is lost then.
        """
        blocks = np.sort(table[first:])
        if len(blocks) != num_coming or not isinstance(self._scheduler.groups[0], FullAttention):
            raise InputError(
                f"{num_coming} blocks of this hit are coming up, got {len(blocks)} device blocks; "
                "ask again (Ferry.again), or load none of it"
            )
        if np.count_nonzero(blocks[1:] == blocks[:-1]):
            raise InputError("two blocks of a hit cannot be loaded into one device block")
        ticket = self._tickets.give()
        self._tickets.begin(ticket)
        keys = request.chain.keys()
        self._loads.append(_EarlyLoad(request, keys, table, ticket, first, first, len(table)))
        return ticket

    def land(self, transfer_id: TransferId, reason: str) -> None:
        """A transfer has ended; those of others are not ours."""
        piece = self._moving.pop(transfer_id, None)
        if piece is not None:
            piece.waiting.discard(transfer_id)
            piece.reason = piece.reason or reason

    def advance(self) -> bool:
        """Order what has come up since, end what is over; whether there is a plan to send."""
        has_ordered = False
        for load in tuple(self._loads):
            has_ended = not load.request.waits_below  # before we look, or the last may be missed
            has_ordered |= self._order(load)
            if (has_ended or load.sent == load.end) and not any(p.waiting for p in load.pieces):
                self._end(load)
        return has_ordered

    def _order(self, load: _EarlyLoad) -> bool:
        if load.sent == load.end or any(piece.reason for piece in load.pieces):
            return False
        count = self._scheduler.num_loadable(load.keys, load.sent, load.end)
        if not count:
            return False
        stop = load.sent + count
        piece = self._scheduler.open(f"early-{next(_names)}", load.keys[:stop])
        piece.is_counted = piece.is_explained = True  # the hit was, as a whole
        match = piece.match(computed_tokens=load.sent * self._tokens)
        ordered: Sequence[Ordered] = ()
        if match.state is MatchState.HIT:
            stop = match.num_tokens // self._tokens
            ordered = piece.load([load.table[:stop]])
        if not ordered:
            piece.end()
            return False
        moving = _EarlyPiece(stop - load.sent, {part.transfer for part in ordered})
        self._moving |= dict.fromkeys(moving.waiting, moving)
        load.pieces.append(moving)
        load.sent = stop
        return True

    def _end(self, load: _EarlyLoad) -> None:
        self._loads.remove(load)
        load.request.end()
        came = list(itertools.takewhile(lambda piece: not piece.reason, load.pieces))
        num_blocks = sum(piece.num_blocks for piece in came)
        reason = next((piece.reason for piece in load.pieces if piece.reason), "")
        wanted = len(load.table) - load.first
        if num_blocks < wanted and not reason:
            reason = f"{wanted - num_blocks} of {wanted} blocks did not come up from below"
        self._tickets.finish(Done(load.ticket, num_blocks, reason, ok=num_blocks == wanted))


# ------------------------------------------------------------------------------------------------
# A ferry: both halves in one process, for an engine that calls us directly.

_names = itertools.count()
"""For all ferries of the process, so that what is explained of one names no hit of another."""
_LONG_BYTES = 32 << 20
"""Fewer are copied before a policy has heard of one request: some 0.4 ms beside a fast link."""


class Ferry(FerryLooks, FerryControl, FerryStoring, FerryWaiting, Closing):
    """Blocks of one engine, kept in host memory. Owns both halves and the memory; ends in close.

    It belongs to the first thread that uses it, until that thread ends or calls :meth:`hand_over`;
    another one, or a forked child, is refused (:meth:`keys` and :meth:`host_stats` are for all).
    Nothing here waits, except :meth:`wait`, :meth:`poll` with a timeout, :meth:`await_hit` and
    :meth:`close`; tickets can be awaited (``await ferry.load(...)``). One that is
    dropped without ``close`` is closed in the background, with a ResourceWarning.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        groups: Sequence[Group],
        namespace: Namespace,
        config: Config,
        rank: RankMemory,
        *,
        keep_alive: object = None,
    ) -> None:
        """``keep_alive`` is memory that is copied by address: held until no copy runs."""
        self.namespace = namespace
        self._layouts = tuple(layouts)
        self._distinct = Distinct(self._layouts)
        self._config = config
        self._keep_alive = keep_alive
        self._rank = rank
        self._worker = Worker(
            {(DEVICE, HOST): rank.engine, (HOST, DEVICE): rank.engine}, tiers=rank.tiers
        )
        self._scheduler = scheduler_over(rank, layouts, groups, namespace, config)
        self._scheduler.watch_requests()
        self._scheduler.pool.told_later.is_on = True
        self._has_tiers = bool(rank.tiers)
        # With tiers a plan looks at the pool, and of several groups each store at the one before.
        later = not rank.tiers and len(groups) == 1
        self._written_later: AbstractContextManager[None] = (
            self._scheduler.pool.later if later else nullcontext()
        )
        self._first_piece = FirstPiece(self._scheduler, layouts[0].block_bytes) if later else None
        self._pending = PendingHits(config.match_deadline)
        self._tickets = Tickets()
        self._awaited = Awaited(
            self._tickets,
            weakly(self, Ferry._advance, ClosedError("this ferry was dropped")),
            rank.engine.await_news,
            has_tiers=self._has_tiers,
        )
        self._tickets.awaited_by(self._awaited.wait)
        self._early = EarlyLoads(self._scheduler, self._tickets, namespace.block_tokens)
        self._inbox = Inbox()
        self._endpoint: Endpoint | None = None
        self._owner = OneThread("this ferry")
        self._is_growing = True
        self._parts = ExitStack()  # closed in turn, each though one before it raises
        for part in (rank, self._scheduler, self._worker):
            self._parts.callback(part.close)
        self._parts.callback(self._awaited.close)
        self._dropped = close_if_dropped(
            self, "a kvferry.Ferry", self._parts.close, keep_alive=keep_alive
        )
        if config.metrics_port is not None:
            with ExitStack() as undo:
                undo.callback(self.close)
                self.serve_metrics(config.metrics_port, config.metrics_host)
                self.hand_over()  # whoever attached need not be who uses it
                undo.pop_all()

    # -- blocks ---------------------------------------------------------------------------------

    def keys(
        self,
        tokens: Integers,
        *,
        parent: Key | None = None,
        salt: str = "",
        extra: Extra = "",
    ) -> Keys:
        """One key per full block of ``tokens``; each covers every token before it too.

        With ``parent``, the key before these tokens, the chain goes on from there. What decides the
        blocks besides the tokens must be said, or a request is served another's KV: ``extra`` is
        the content that tokens only stand for (a digest of the images) or what was added to the
        model (an adapter), ``salt`` names who may share (a tenant). Each is given once, where it
        begins; see :func:`kvferry.chain`.
        """
        return chain(self.namespace, tokens, parent, salt=salt, extra=extra)

    def match(self, keys: Keys, *, on_device: int = 0, hints: Said = None) -> Hit:
        """How many of a request's blocks, after the ``on_device`` first ones, can be loaded now.

        None while more than ``Config.max_bytes_in_flight`` are on their way already, or where
        computing them is expected to be faster (see :meth:`note_prefill`). Blocks are counted by
        their keys, ``block_tokens`` tokens each. With tiers below host memory a hit may be pending
        (:attr:`Hit.is_pending`): see :meth:`again`. ``hints`` are a :class:`Hints`, or a mapping
        that :meth:`Hints.read` takes; they hold for what is loaded of this request.
        """
        self._owner.require()
        if not isinstance(keys, Keys):
            raise InputError(f"keys must come from ferry.keys, got {type(keys).__name__}")
        on_device = on_device if type(on_device) is int else integer(on_device, "on_device")
        if not 0 <= on_device <= len(keys):
            raise InputError(f"{on_device} blocks on the device do not fit {len(keys)} keys")
        self._scheduler.pool.told_later.require_well()
        request = self._scheduler.open(f"hit-{next(_names)}", keys, read_hints(hints))
        tokens = self.namespace.block_tokens
        match = request.match(computed_tokens=on_device * tokens)
        if match.state is not MatchState.HIT:
            if request.waits_below:
                self._pending.keep(request)
                return pending(request, on_device, tokens)
            request.end()
        return Hit(request, (match.num_tokens - match.computed_tokens) // tokens, on_device)

    def again(self, hit: Hit) -> Hit:
        """What has become of a pending hit; one that is not pending is the answer itself.

        What a tier was asked for, and what it brings up, comes with :meth:`poll`. By
        ``Config.lookup_deadline`` and ``Config.promote_deadline`` at the latest a hit is pending no
        longer: with all of its blocks, with some, or with none.
        """
        self._owner.require()
        if not isinstance(hit, Hit):
            raise not_a_hit(hit)
        return self._pending.again(hit, self._scheduler, self.namespace.block_tokens)

    def load(self, hit: Hit, device_blocks: Tables) -> Ticket:
        """Bring a hit's blocks to ``device_blocks``, one for each.

        With several groups these are block tables, one for each group: the request's whole table,
        in which the places that ``hit.needed`` names are filled. Compute queued on the ``compute``
        stream after this call comes after the load, also while that is still being queued; where
        the load fails, it has read what was there before.

        A pending hit is let go, given no blocks. Given ``hit.coming`` (of one group, with full
        attention), they are filled as they come up, with :meth:`poll`: queue compute once the
        ticket has ended, which says how many of the first are there.
        """
        self._owner.require()
        if not isinstance(hit, Hit):
            raise not_a_hit(hit)
        tables = whole_tables(self._layouts, device_blocks, before=hit.on_device)
        if hit.is_pending and len(tables) == 1 and len(tables[0]) > hit.on_device:
            ticket = self._early.begin(hit.request, tables[0], hit.on_device, hit.coming)
            self._pending.drop(hit.request)
            self._load_early()
            return ticket
        if len(tables) == 1 and len(tables[0]) != hit.on_device + len(hit):
            raise InputError(
                f"a hit of {len(hit)} blocks needs as many device blocks, "
                f"got {len(tables[0]) - hit.on_device}"
            )
        for table, needed in zip(tables, hit.request.needed_blocks, strict=True):
            if not self._distinct.are(table[needed.start : needed.stop]):
                raise InputError("two blocks of a hit cannot be loaded into one device block")
        self._rank.note_step()
        ticket = self._tickets.give()
        ordered = hit.request.load(tables) if hit.request in self._scheduler else ()
        if ordered:
            self._tickets.send(ticket, ordered)
            self._send_off(compute_waits=True)
        elif len(hit):
            self.release(hit)
            reason = "the hit is gone: it was released, loaded, or too old"
            self._tickets.end(Done(ticket, 0, reason, ok=False))
        else:
            self.release(hit)
            self._tickets.end(Done(ticket, 0))
        return ticket

    def release(self, hit: Hit) -> None:
        """Let a hit go that will not be loaded."""
        self._owner.require()
        if not isinstance(hit, Hit):
            raise not_a_hit(hit)
        if hit.request in self._scheduler and hit.request.state is not State.LOADING:
            self._pending.drop(hit.request)
            hit.request.end()

    def _send_off(self, *, compute_waits: bool = False) -> None:
        """Send off what was just ordered, begun by this thread."""
        plan = self._scheduler.plan(counts=False)
        if plan.transfers or plan:
            with self._rank.engine.begun_here(compute_waits=compute_waits):
                self._worker.execute(plan)
            if self._is_growing:
                self._rank.note_plan(plan)

    def _load_early(self) -> None:
        """Send on what has come up of hits that are loaded as they come, ahead of later compute."""
        if self._early.advance():
            self._rank.note_step()
            self._send_plan()
            self._rank.engine.order_compute_after_loads()

    def _send_plan(self) -> None:
        """Send off what was ordered for nobody's ticket."""
        plan = self._scheduler.plan()
        if plan:
            self._worker.execute(plan)
            if self._is_growing:
                self._rank.note_plan(plan)

    # -- what ended -----------------------------------------------------------------------------

    def _advance(self) -> None:
        """Learn what ended, and answer who asks from other threads."""
        self._owner.require()
        self._note_ready()
        self._inbox.answer()
        if self._has_tiers:
            for change in self._worker.health():
                self._scheduler.note_health(change)
        settled = self._scheduler.settle(self._worker.poll())
        for request in settled.loaded + settled.expired:
            request.end()
        for failure in settled.failed:
            failure.request.end()
        # A load that is overdue has failed, but its copy may still write: only landing ends it.
        for landing in settled.landed:
            self._tickets.land(landing.transfer_id, landing.reason)
            if self._early:
                self._early.land(landing.transfer_id, landing.reason)
        if self._has_tiers:
            self._serve_tiers(has_news=bool(settled.landed))
        if not settled.landed:  # while copies run, there is time for it
            self._catch_up()

    def _catch_up(self) -> None:
        """Count what was answered; tell the policy what it is owed, where nobody waits for that."""
        if self._scheduler.owing:
            self._scheduler.count_answered(are_whole=True)
        num_bytes = self._scheduler.bytes_in_flight
        if not num_bytes or num_bytes >= _LONG_BYTES:
            self._scheduler.pool.told_later.catch_up()

    def _note_ready(self) -> None:
        """Host memory that has grown since serves from now on."""
        if self._is_growing:
            num_ready = self._rank.ready_slots
            self._scheduler.note_ready(FIRST_RANK, num_ready)
            self._is_growing = num_ready < self._rank.host.num_slots

    def _serve_tiers(self, *, has_news: bool) -> None:
        """Send on what goes up and down. What landed may have to go down, or be asked for next."""
        self._pending.expire()
        if self._early:
            self._load_early()
        if has_news or self._scheduler.num_queued:
            self._send_plan()

    # -- the rest -------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Let another thread have this ferry: the next one that uses it."""
        self._owner.hand_over()

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed this many prompt tokens in this time.

        Once told, and once it has seen a load, ``match`` offers a hit only where loading it is
        expected to be faster than computing it (``Config.load_policy``).
        """
        self._owner.require()
        self._scheduler.note_prefill(num_tokens, seconds)

    def reset(self) -> bool:
        """Forget every block kept, at once; hits not loaded yet are gone too.

        Returns whether what is on disk stays forgotten whatever happens next, for which it waits
        ``Config.disk_deadline`` seconds at most. A drive that is away forgets when it is back.
        """
        self._owner.require()
        self._scheduler.reset()
        for request in self._scheduler.requests:
            if request.state is not State.LOADING:
                self._pending.drop(request)
                request.end()
        if self._has_tiers:
            self._send_plan()  # a tier may outlive us: it must hear of this
        end = time.monotonic() + self._config.disk_deadline
        tiers = self._rank.tiers.values()
        return all(tier.wait_forgotten(max(0.0, end - time.monotonic())) for tier in tiers)

    def close(self) -> None:
        """Finish the copies in flight and give the memory back. Safe to call twice.

        What only host memory holds goes to disk first, for ``Config.tier_flush`` seconds at
        most; an interrupt ends that. In a forked child it does nothing: all of it is the parent's.
        """
        if self._owner.is_closed or self._owner.is_forked:
            return
        self._owner.require()
        try:
            seconds = self._config.tier_flush
            write_out(self._scheduler, self._advance, self._send_plan, seconds)
        finally:
            self._owner.close()
            self._dropped.detach()
            self._parts.close()
