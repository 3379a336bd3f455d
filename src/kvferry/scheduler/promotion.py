"""What one request has asked of the tiers below the host, and waits for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from kvferry.cache import reach
from kvferry.cache.index import num_leading
from kvferry.cache.leases import Lease, SlotState
from kvferry.cache.policies.load_or_compute import Decision, OverlapDecision
from kvferry.config import Config
from kvferry.core.keys import KeyChain, Keys
from kvferry.errors import InputError
from kvferry.scheduler.deferred_stores import Rest, Rests
from kvferry.scheduler.hits import PinnedHit
from kvferry.scheduler.lookup import Look, Missing
from kvferry.scheduler.tiering import RunBelow
from kvferry.scheduler.transfers import (
    BlockTable,
    EngineShape,
    Flight,
    Ordered,
    checked_blocks,
    held_blocks,
)
from kvferry.types import (
    NO_SLOT,
    DeviceBlocks,
    Key,
    Match,
    MatchState,
    RequestId,
    SlotArray,
    TierName,
    TransferId,
)

if TYPE_CHECKING:
    from kvferry.scheduler.control import Prefetch
    from kvferry.scheduler.hits import PinnedHit
    from kvferry.scheduler.parts import Parts
    from kvferry.scheduler.request import Request


class Below:
    """Questions and promotions of one request. Owns which of them it still waits for.

    Once per look: what was not known to be below by then is not there, and what did not come up by
    then is computed.
    """

    __slots__ = (
        "_has_asked",
        "_has_promoted",
        "declined",
        "foreseen",
        "hoped_tokens",
        "num_asked",
        "waits",
    )

    def __init__(self) -> None:
        self.num_asked = 0
        """Blocks that tiers were asked for, at the last look that asked."""
        self.waits: set[TransferId] = set()
        self.hoped_tokens = 0
        """How many tokens its hit has if all comes up that was ordered at the last look."""
        self.declined: Decision | None = None
        """Why what lay below was not brought up at the last look: computing it was faster."""
        self.foreseen: PinnedHit | None = None
        """What it was last told it will have; nothing of it is claimed."""
        self._has_asked = False
        self._has_promoted = False

    def fetch(
        self,
        request: Request | Prefetch,
        look: Look,
        parts: Parts,
        most_slots: int | None = None,
    ) -> bool:
        """Ask for what is not known, or bring up what is; True if the request should wait.

        ``most_slots`` bounds what is brought up, beside the bound on all promotions.
        """
        if self._ask(request, look, parts):
            return True
        room = parts.lower.room
        return self._promote(
            request, look, parts, room if most_slots is None else min(room, most_slots)
        )

    def _ask(self, request: Request | Prefetch, look: Look, parts: Parts) -> bool:
        if self._has_asked or not parts.lower.can_be_asked:
            return False
        wanted = parts.matcher.to_ask(look)
        self.waits |= parts.lower.ask(wanted) if wanted is not None else set()
        parts.waits.add(request, self.waits)
        self._has_asked = bool(self.waits)
        self.num_asked = wanted.num_needed if wanted is not None and self._has_asked else 0
        return self._has_asked

    def _promote(self, request: Request | Prefetch, look: Look, parts: Parts, room: int) -> bool:
        if look.all_tokens <= look.host_tokens or self._has_promoted:
            return False
        look = parts.matcher.within(look, room)
        wanted = list(parts.matcher.to_promote(look))
        self.declined = None
        if wanted:
            num_tokens = look.all_tokens - look.host_tokens
            runs = [self._run(parts, *each) for each in wanted]
            decision = parts.lower.worth_promoting(runs, num_tokens, parts.hits.worth)
            if not decision.load:
                self.declined = decision
                return False
            for run in runs:
                self.waits |= parts.lower.promote(run, tenant=request.tenant)
        parts.waits.add(request, self.waits)
        self._has_promoted = bool(self.waits)
        self.hoped_tokens = look.all_tokens if self._has_promoted else 0
        if self._has_promoted:
            parts.accounts.counts.promoted_tokens += look.all_tokens - look.host_tokens
        return self._has_promoted

    @staticmethod
    def _run(parts: Parts, g: int, keys: Keys, parent: Key | None) -> RunBelow:
        chained = isinstance(parts.matcher.groups[g], reach.FullAttention)
        slots = parts.pool.find(keys)
        known, below = slots != NO_SLOT, parts.lower.lookup(keys, chained)
        return RunBelow(keys, known, known & ~parts.pool.are_cached(slots), below, parent, chained)

    def drop(self, request: Request | Prefetch, parts: Parts) -> None:
        """It waits for nothing any more, and may ask anew."""
        self.stop_waiting(request, parts)
        self.renew()

    def stop_waiting(self, request: Request | Prefetch, parts: Parts) -> None:
        """It waits for nothing any more."""
        parts.waits.remove(request, self.waits)
        self.waits = set()
        self.hoped_tokens = 0
        self.foreseen = None

    def renew(self) -> None:
        """The next look may ask and bring up again."""
        self._has_asked = self._has_promoted = False


# ------------------------------------------------------------------------------------------------
# Where a request can stand, and what leads from one state to the next.


class State(Enum):
    """Where a request stands.

    ::

                        ┌────────── preempt ───────────┐
                        ▼                              │
        open ──> UNKNOWN ──match──> MATCHED ──load──> LOADING ──settled──> LOADED
                   │  ▲                │                  │                  │
                   │  └── miss, expired┘◀──── failed ─────┘                  │ run, store
                   │ match, answered at once                                 ▼
                   └──────> ANSWERED ────────────── run, store ──────────> RUNNING
                   match: what it wants is on its way: WAITING               │
                   (whose end may be foreseen: WAITING ──load──> LOADING)    │
                                                           leave: LEFT ◀─────┤
                                           stored late, or gone on with: └──▶ ENDED ◀── end
    """

    UNKNOWN = "unknown"  # nothing is pinned for it, nothing is on its way
    ANSWERED = "answered"  # it was told that nothing is here; not counted yet
    WAITING = "waiting"  # blocks it wants are coming up, or another request loads them
    MATCHED = "matched"  # a hit is pinned for it
    LOADING = "loading"  # its hit is on its way to the device, its last blocks maybe to the host
    LOADED = "loaded"  # its hit is on the device, nothing is computed on it yet
    RUNNING = "running"  # the engine computes it, in the blocks it has now
    LEFT = "left"  # it has ended; some of it is to be stored late
    ENDED = "ended"  # and leaves nothing


OVER = (State.LEFT, State.ENDED)


def over(request_id: RequestId, verb: str) -> InputError:
    """What to raise where one that is over is to do something."""
    return InputError(f"request {request_id!r} has ended and cannot be {verb}; open a new one")


def negative(request_id: RequestId, computed_tokens: int, max_tokens: int | None) -> InputError:
    """What to raise where a question has fewer tokens than none."""
    return InputError(
        f"request {request_id!r}: computed_tokens and max_tokens must not be negative, got "
        f"{computed_tokens} and {max_tokens}"
    )


# ------------------------------------------------------------------------------------------------
# How a request that ends leaves what it has not stored, and how that is stored later.

Held = tuple[DeviceBlocks, ...] | tuple[Ordered, ...]
"""Device blocks to hold until they are released."""


def leave(request: Request, num_tokens: int, parts: Parts, rests: Rests) -> Held | None:
    """See to what a request with so many tokens computed has not stored; None if that is nothing.

    A short rest waits for the next turn, others are held; where blocks are given up while a request
    runs there is no waiting at all, and what is left is stored at once.
    """
    progress, chain = request.progress, request.chain
    storable = progress.storable(chain, num_tokens)
    num_new = storable - max(progress.tokens, progress.past)
    if not rests.stores_late:
        from_token = progress.unstored_from(chain, storable)
        if from_token is None:
            return None
        tables = rests.engine.tables(request, storable, from_token)
        return progress.store(request, chain, tables, storable)
    is_short = parts.least_tokens <= num_new < rests.store_step
    if is_short and rests.can_wait and not (progress.is_outdated or parts.stores.is_lazy):
        twin = rests.wait(request, storable, chain[storable // parts.matcher.hash_tokens - 1])
        if twin is not None:
            twin.request.end_left()
        return ()
    from_token = progress.unstored_from(chain, storable)
    if from_token is None:
        return None
    tables = rests.engine.tables(request, storable, from_token)
    held = held_blocks(tables, parts.sizes, from_token)
    key = chain[storable // parts.matcher.hash_tokens - 1]
    rests.hold(request, storable, key, tables, held)
    return held


def take_back_loads(request: Request, parts: Parts) -> None:
    """Its loads do not count any more; those that no rank has heard of are not sent."""
    for order in parts.outbox.cancel_loads(request):
        parts.hits.ended(order.lease)
        transfer = order.transfer
        parts.released.append(DeviceBlocks(transfer.group, transfer.dst_slots))
    request.loading.clear()


def go_on(request: Request, computed_tokens: int, parts: Parts) -> None:
    """Where a request goes on with what another left, it stores both, when it stores.

    Not one that may not store so much: what the other left would never be stored then.
    """
    rests, num_keys = parts.rests, computed_tokens // parts.matcher.hash_tokens
    if computed_tokens > request.progress.most_tokens:
        return
    if rests is not None and num_keys and not request.progress.tokens:
        rest = rests.take_continued(request.chain, num_keys)
        if rest is not None:
            request.progress.go_on(rest.request.progress)
            rest.request.end_left()


def store_left(parts: Parts, rests: Rests, *, is_idle: bool) -> list[Ordered]:
    """Order what is due of what ended requests left; all of it if nothing else runs."""
    ordered: list[Ordered] = []
    due = rests.take_due(is_idle=is_idle)
    for number, rest in enumerate(due):
        ordered += _store(rest, parts, rests)
        lacks = rest.request.progress.tokens + parts.least_tokens <= rest.num_tokens
        if lacks and parts.stores.is_full:
            rests.put_back(due[number:])
            break
        parts.released.extend(rest.held)
        rest.request.end_left()
    return ordered


def _store(rest: Rest, parts: Parts, rests: Rests) -> tuple[Ordered, ...]:
    request: Request = rest.request
    progress, chain, tables = request.progress, request.chain, rest.tables
    if tables is None:
        from_token = progress.unstored_from(chain, rest.num_tokens)
        if from_token is None:
            return ()
        tables = rests.engine.remains(request, rest.num_tokens, from_token)
    return progress.store(request, chain, tables, rest.num_tokens)


# ------------------------------------------------------------------------------------------------
# Loads of hits whose last blocks still come up from a tier: the first go to the device meanwhile.
#
# ::
#
#     tier   ──read──> ▓▓▓▓▓▓▓▓▓░░░     pieces land in the host, one after the other
#     device  ──load──> ▓▓▓▓▓▓░░░░░░     each goes on as it lands, beside the next one's read
#                       first │  │   end
#                        good ┘  └ sent
#
# Device blocks are taken before all bytes are here. So a load begins as late as loses nothing: when
# the rest is read in the time that copying all of it takes. What does not come up ends it early:
# the
# blocks before that are on the device, the others are computed. So does a tier that falls silent,
# and all such loads together may take half of the device: a drive that hangs must not hold it.

_SHARE = 1 / 8
"""So much of a hit may still be below when its load begins, where a speed is not known yet: on a
GPU's link a drive reads one part in some 15 of what is copied in the same time."""

_PATIENCE = 1 / 5
"""A load that gets nothing more for so much of ``promote_deadline`` goes on without: its last
blocks were to be there in the time of one copy, which is milliseconds."""

_DEVICE_SHARE = 1 / 2
"""So much of the device all of these loads together may take."""

_GONE = "blocks that were coming up did not"
_LATE = "blocks that were coming up did not in time"


class ComingLoad:
    """One load in pieces. Owns how far it is ordered and how far what was ordered is good.

    Blocks are counted from the request's start: ``first`` to ``end`` were promised, those up to
    ``sent`` are ordered, no more than ``last`` ever will be, and those from ``good`` on are lost.
    ``since`` is when the last of them was ordered.
    """

    __slots__ = (
        "_keys",
        "_table",
        "end",
        "first",
        "good",
        "last",
        "pieces",
        "reason",
        "sent",
        "since",
    )

    def __init__(self, look: Look, table: SlotArray) -> None:
        self.first, self.end = look.blocks[0].start, look.blocks[0].stop
        self.sent = self.first
        self.since = 0.0
        self.last = self.good = self.end
        self.reason = ""
        self.pieces: dict[TransferId, int] = {}  # where each begins
        self._keys = look.asked[0]
        self._table = table

    @property
    def is_open(self) -> bool:
        """Whether more of it may still be ordered."""
        return self.sent < self.last

    def order(self, request: Request, parts: Parts) -> Ordered | None:
        """Order what has come up since; None if that is nothing."""
        rest = slice(self.sent - self.first, self.last - self.first)
        slots = parts.pool.leading(self._keys[rest])
        if not len(slots):
            return None
        stop = self.sent + len(slots)
        piece = slice(rest.start, rest.start + len(slots))
        ordered = order_load(
            request,
            parts,
            (0, parts.pool.claim(slots), self._table[piece]),
            range(self.sent, stop),
            self._keys[piece],
        )
        self.pieces[ordered.transfer] = self.sent
        self.sent, self.since = stop, parts.clock()
        return ordered

    def is_stuck(self, request: Request, parts: Parts) -> bool:
        """Whether the next block will not come up any more."""
        if not request.waits_below:
            return True
        key = self._keys[self.sent - self.first]
        return parts.pool.state_of(key) is SlotState.FREE

    def lose(self, block: int, reason: str) -> int:
        """From this block on it is lost; returns how many blocks will not be ordered any more."""
        self.good = min(self.good, block)
        self.reason = self.reason or reason
        count, self.last = self.last - self.sent, self.sent
        return count


class ComingLoads:
    """Owns the loads in pieces, by request, and the device blocks that they count as taken.

    For an engine with one group whose hits read every block; others get a load as one.
    """

    def __init__(self, parts: Parts, shape: EngineShape, config: Config) -> None:
        reads_all = len(shape.groups) == 1 and parts.matcher.is_full
        self._is_on = shape.loads_early and reads_all and not shape.spare_tokens
        self._max_blocks = shape.bound(None, _DEVICE_SHARE)
        self._patience = config.promote_deadline * _PATIENCE
        self._parts = parts
        self._transit = parts.transit
        self._size = parts.sizes[0]
        self._loads: dict[Request, ComingLoad] = {}

    def __bool__(self) -> bool:
        return bool(self._loads)

    def is_open(self, request: Request) -> bool:
        """Whether more pieces of its load may still be ordered."""
        load = self._loads.get(request)
        return load is not None and load.is_open

    # -- begin ----------------------------------------------------------------------------------

    def foresee(
        self, request: Request, computed_tokens: int, max_tokens: int | None
    ) -> Match | None:
        """The hit of a request that waits for a tier, if now is the time to begin its load."""
        below, parts, size = request.below, self._parts, self._size
        if below is None or not self._is_on:
            return None
        below.foreseen = None
        if request.state is not State.WAITING or computed_tokens % size:
            return None
        coming = parts.lower.inbound(below.waits)
        most = len(request.chain) * parts.matcher.hash_tokens
        most = most if max_tokens is None else min(most, max_tokens)
        blocks = range(computed_tokens // size, min(below.hoped_tokens, most) // size)
        if not blocks or coming is None:
            return None
        if coming.num_blocks > len(blocks) * self._share(coming.tiers):
            return None
        if parts.clock() >= coming.heard + self._patience:
            return None  # the tier hangs, as far as anybody can see
        keys = request.chain.keys()
        asked = parts.matcher.slot_keys(0, keys, blocks)
        slots = parts.pool.leading(asked)
        if not len(slots) or self._is_joined(request):
            return None
        count = num_leading(parts.pool.cached(asked) | coming.brings(asked))
        if not (self._has_room(count) and parts.hits.may_begin(slots, count)):
            return None
        blocks, asked = blocks[:count], asked[:count]
        decision = parts.hits.worth_loading(len(blocks) * size, 0, count)
        if not decision.load:
            return None
        tokens, missing = blocks.stop * size, None
        if tokens + size <= most:
            (key,) = parts.matcher.slot_keys(0, keys, range(blocks.stop, blocks.stop + 1))
            is_coming = parts.pool.state_of(key) is not SlotState.FREE
            missing = Missing(0, tokens, key, is_coming)
        look = Look(
            keys, computed_tokens, most, tokens, tokens, (None,), (blocks,), (asked,), missing
        )
        below.foreseen = hit = PinnedHit(look, parts.pool.generation, 0, 0.0)
        hit.decision = decision
        return Match(MatchState.HIT, tokens, computed_tokens)

    def _share(self, tiers: Collection[TierName]) -> float:
        """How much of a hit may be below when its load begins, by what both links have brought."""
        worth = self._parts.hits.worth
        speeds, link = [worth.bandwidth_of(name) for name in tiers], worth.bandwidth
        known = [speed for speed in speeds if speed]
        return min(1.0, min(known) / link) if link and len(known) == len(speeds) else _SHARE

    def _has_room(self, num_blocks: int) -> bool:
        """Whether a load of so many blocks may be open beside those that are."""
        if self._max_blocks is None:
            return True
        return self.num_held + num_blocks <= self._max_blocks

    @property
    def num_held(self) -> int:
        """Device blocks of loads that wait for a tier."""
        return sum(load.end - load.first for load in self._loads.values() if load.is_open)

    def _is_joined(self, request: Request) -> bool:
        """Whether another request is loading blocks that this one waits for."""
        if not self._parts.hits.joins_loads:
            return False
        return any(
            load.is_open and not request.below.waits.isdisjoint(other.below.waits)
            for other, load in self._loads.items()
            if request.below is not None and other.below is not None
        )

    def begin(self, request: Request, table: BlockTable) -> tuple[Ordered, ...]:
        """Order what is up of the hit it was last told of; empty where that was lost meanwhile,
        or where others have begun that leave no room for it.
        """
        below, parts = request.below, self._parts
        assert below is not None
        hit, below.foreseen = below.foreseen, None
        if hit is None or not hit.is_of(request.chain, parts.matcher.hash_tokens):
            return ()
        look, blocks = hit.look, hit.look.blocks[0]
        if len(table) < blocks.stop:
            raise InputError(
                f"request {request.id!r}: group 0's block table has {len(table)} blocks, the hit "
                f"of {look.host_tokens} tokens needs {blocks.stop}"
            )
        if not self._has_room(len(blocks)):  # others have begun since it was told of
            return ()
        load = ComingLoad(look, checked_blocks(0, table, blocks, least=0))
        ordered = load.order(request, parts)
        if ordered is None:
            return ()
        self._loads[request] = load
        self._transit.keep(load.last - load.sent)
        request.state = State.LOADING
        request.progress.past = request.progress.since = look.host_tokens
        parts.accounts.found(request, hit)
        parts.accounts.loaded(request, look.host_tokens - look.computed_tokens, None)
        parts.accounts.counts.early_loads += load.is_open
        if parts.rests is not None:
            go_on(request, look.computed_tokens, parts)
        return (ordered,)

    # -- go on and end --------------------------------------------------------------------------

    def note_landed(self, request: Request, flight: Flight) -> bool:
        """A transfer of its load ended or is late; False if its load does not come in pieces."""
        load = self._loads.get(request)
        if load is None:
            return False
        if flight.reason:
            self._lose(load, load.pieces[flight.transfer.id], flight.reason)
        return True

    def advance(self) -> tuple[list[Ordered], list[tuple[Request, Match, str]]]:
        """Order what has come up since the last call; returns that, and the loads that ended.

        Of those: the tokens on the device, those that were promised, and why they are not there.
        """
        ordered: list[Ordered] = []
        ended: list[tuple[Request, Match, str]] = []
        late = self._parts.clock() - self._patience
        for request, load in tuple(self._loads.items()):
            if load.is_open:
                piece = load.order(request, self._parts)
                if piece is not None:
                    ordered.append(piece)
                    self._transit.keep(-len(piece.blocks))
                if load.is_open and load.is_stuck(request, self._parts):
                    self._lose(load, load.sent, _GONE)
                elif load.is_open and load.since <= late:
                    self._lose(load, load.sent, _LATE)
            if not load.is_open and not request.loading:
                ended.append((request, self._end(request, load), load.reason))
        return ordered, ended

    def _lose(self, load: ComingLoad, block: int, reason: str) -> None:
        self._transit.keep(-load.lose(block, reason))

    def _end(self, request: Request, load: ComingLoad) -> Match:
        del self._loads[request]
        assert request.below is not None
        request.below.stop_waiting(request, self._parts)
        if not load.reason:
            request.below.renew()
        promised = Match(MatchState.HIT, load.end * self._size, load.good * self._size)
        if load.reason:
            request.progress.past = promised.computed_tokens
        if request.state is State.LOADING:
            request.state = State.UNKNOWN if load.reason else State.LOADED
        return promised

    def drop(self, request: Request) -> None:
        """It is not loaded any further: what was sent lands on its own."""
        load = self._loads.pop(request, None)
        if load is not None:
            self._lose(load, load.sent, _GONE)


def order_load(
    request: Request,
    parts: Parts,
    piece: tuple[int, Lease, SlotArray],
    places: range,
    keys: Keys,
    overlap: OverlapDecision | None = None,
) -> Ordered:
    """Order blocks to the device: ``piece`` is their group, what is read, and where to."""
    group, lease, blocks = piece
    transfer_id = parts.outbox.load(request, group, lease, blocks, overlap)
    parts.hits.began(lease)
    request.loading.add(transfer_id)
    return Ordered(group, blocks, transfer_id, places, keys, request)


# ------------------------------------------------------------------------------------------------
# How far one request is stored, and when it is next worth storing more of it.

NEVER = 1 << 60
"""Tokens: more than any request has."""


class Progress:
    """What of one request needs no more storing. Owns that count; the blocks are the engine's.

    ``past`` tokens it had, on the device or with us, when it came. ``since``: from there on count
    the tokens that make storing worth a call (``Rests.step``). One that ``is_outdated`` has device
    blocks from before a reset: nothing of them is stored.
    """

    most_tokens = NEVER  # may be stored; see CappedProgress
    __slots__ = ("_parts", "_stored", "is_outdated", "past", "since", "tokens")

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._stored = [0] * len(parts.sizes)  # blocks, by group
        self.tokens = 0
        """Leading tokens that are done with, in every group."""
        self.past = 0
        self.since = 0
        self.is_outdated = False

    def renew(self) -> None:
        """It starts from nothing: what a reset said about its blocks no longer counts."""
        self.since = 0
        if self.is_outdated:
            self.is_outdated = False
            self._stored = [0] * len(self._stored)
            self.tokens = 0

    def go_on(self, other: Progress) -> None:
        """It goes on where another request ended, and stores what that one has left."""
        self._stored = list(other._stored)
        self.tokens = other.tokens
        self.past = other.past
        self.is_outdated |= other.is_outdated
        self.since = self.tokens or self.past

    def storable(self, chain: KeyChain, num_tokens: int) -> int:
        """As many of these tokens as have keys and will not be taken back."""
        parts = self._parts
        return min(num_tokens, len(chain) * parts.matcher.hash_tokens) - parts.spare_tokens

    def is_worth_storing(self, num_tokens: int) -> bool:
        """Whether enough of so many computed tokens is new for a store to be worth its cost."""
        parts, rests = self._parts, self._parts.rests
        step = parts.least_tokens if rests is None else rests.step
        return num_tokens >= self.since + step + parts.spare_tokens

    def unstored_from(self, chain: KeyChain, num_tokens: int) -> int | None:
        """From which token on something of so many storable tokens is to be stored, if it is."""
        parts = self._parts
        if self.is_outdated or parts.stores.is_lazy:
            return None
        if self.past and not self.tokens:
            self._skip_past(chain, num_tokens)
        return self.tokens if num_tokens >= self.tokens + parts.least_tokens else None

    def store(
        self, request: object, chain: KeyChain, tables: Sequence[BlockTable], num_tokens: int
    ) -> tuple[Ordered, ...]:
        """Order what is new of the first ``num_tokens``, which are storable."""
        if self.is_outdated or self._parts.stores.is_lazy:
            return ()
        if self.past and not self.tokens:
            self._skip_past(chain, num_tokens)
        ordered = self._parts.stores.computed(
            request, self._stored, chain.keys(), tables, num_tokens
        )
        self._note()
        return ordered

    def _skip_past(self, chain: KeyChain, num_tokens: int) -> None:
        """What was loaded, or never left, needs no look at its blocks."""
        past = min(self.past, num_tokens)
        self._parts.stores.skip_known(self._stored, chain.keys(), past)
        self._note()

    def _note(self) -> None:
        sizes = self._parts.sizes
        self.tokens = self._stored[0] * sizes[0]
        for count, size in zip(self._stored, sizes, strict=True):
            self.tokens = min(self.tokens, count * size)
        self.since = self.tokens
