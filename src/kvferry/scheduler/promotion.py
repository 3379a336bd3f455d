"""What one request has asked of the tiers below the host, and waits for."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Any

from kvferry.cache import reach
from kvferry.cache.index import num_leading
from kvferry.cache.policies.load_or_compute import Decision
from kvferry.cache.slots import SlotState
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.scheduler.lookup import Lookup, Missing, PinnedHit
from kvferry.scheduler.tiering import RunBelow
from kvferry.scheduler.transfers import (
    BlockTable,
    EngineShape,
    InFlight,
    Ordered,
    checked_blocks,
)
from kvferry.types import (
    NO_SLOT,
    Key,
    Match,
    MatchState,
    SlotArray,
    TierName,
    TransferId,
)


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
        request: Any,
        look: Lookup,
        parts: Any,
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

    def _ask(self, request: Any, look: Lookup, parts: Any) -> bool:
        if self._has_asked or not parts.lower.can_be_asked:
            return False
        wanted = parts.matcher.to_ask(look)
        self.waits |= parts.lower.ask(wanted) if wanted is not None else set()
        parts.waits.add(request, self.waits)
        self._has_asked = bool(self.waits)
        self.num_asked = wanted.num_needed if wanted is not None and self._has_asked else 0
        return self._has_asked

    def _promote(self, request: Any, look: Lookup, parts: Any, room: int) -> bool:
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
            parts.book.counts.promoted_tokens += look.all_tokens - look.host_tokens
        return self._has_promoted

    @staticmethod
    def _run(parts: Any, g: int, keys: Keys, parent: Key | None) -> RunBelow:
        chained = isinstance(parts.matcher.groups[g], reach.FullAttention)
        slots = parts.pool.find(keys)
        known, below = slots != NO_SLOT, parts.lower.lookup(keys, chained)
        return RunBelow(keys, known, known & ~parts.pool.are_cached(slots), below, parent, chained)

    def drop(self, request: Any, parts: Any) -> None:
        """It waits for nothing any more, and may ask anew."""
        self.stop_waiting(request, parts)
        self.renew()

    def stop_waiting(self, request: Any, parts: Any) -> None:
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
        open ──> UNKNOWN ──match──> MATCHED ──load──> LOADING ──settle──> LOADED
                   │  ▲                │                  │                 │
                   │  └── miss, expired┘◀──── failed ─────┘                 │ run, store
                   └───────────────────── run, store ───────────────────> RUNNING
                   match: what it wants is on its way: WAITING              │
                   (whose end may be foreseen: WAITING ──load──> LOADING)   │
                                                          leave: LEFT ◀─────┤
                                       stored later, or continued: └──▶ ENDED ◀── end
    """

    UNKNOWN = "unknown"  # nothing is pinned for it, nothing is on its way
    ANSWERED = "answered"  # the same; it was told so since the last plan
    WAITING = "waiting"  # blocks it wants are coming up, or another request loads them
    MATCHED = "matched"  # a hit is pinned for it
    LOADING = "loading"  # its hit is on its way to the device, its last blocks maybe to the host
    LOADED = "loaded"  # its hit is on the device, nothing is computed on it yet
    RUNNING = "running"  # the engine computes it, in the blocks it has now
    LEFT = "left"  # it has ended; some of it is to be stored later
    ENDED = "ended"  # and leaves nothing


OVER = (State.LEFT, State.ENDED)


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

    def __init__(self, look: Lookup, table: SlotArray) -> None:
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

    def order(self, request: Any, parts: Any) -> Ordered | None:
        """Order what has come up since; None if that is nothing."""
        rest = slice(self.sent - self.first, self.last - self.first)
        slots = parts.pool.lookup(self._keys[rest])
        if not len(slots):
            return None
        stop = self.sent + len(slots)
        piece = slice(rest.start, rest.start + len(slots))
        ordered: Ordered = request.order_load(
            0,
            parts.pool.claim(slots),
            self._table[piece],
            range(self.sent, stop),
            self._keys[piece],
        )
        self.pieces[ordered.transfer] = self.sent
        self.sent, self.since = stop, parts.clock()
        return ordered

    def is_stuck(self, request: Any, parts: Any) -> bool:
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

    def __init__(self, parts: Any, shape: EngineShape, config: Config) -> None:
        reads_all = len(shape.groups) == 1 and parts.matcher.is_full
        self._is_on = shape.loads_early and reads_all and not shape.spare_tokens
        self._max_blocks = shape.bound(None, _DEVICE_SHARE)
        self._patience = config.promote_deadline * _PATIENCE
        self._parts = parts
        self._transfers = parts.transfers
        self._size = parts.sizes[0]
        self._loads: dict[Any, ComingLoad] = {}

    def __bool__(self) -> bool:
        return bool(self._loads)

    def is_open(self, request: Any) -> bool:
        """Whether more pieces of its load may still be ordered."""
        load = self._loads.get(request)
        return load is not None and load.is_open

    # -- begin ----------------------------------------------------------------------------------

    def foresee(self, request: Any, computed_tokens: int, max_tokens: int | None) -> Match | None:
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
        slots = parts.pool.lookup(asked)
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
        look = Lookup(
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

    def _is_joined(self, request: Any) -> bool:
        """Whether another request is loading blocks that this one waits for."""
        if not self._parts.hits.joins_loads:
            return False
        return any(
            load.is_open and not request.below.waits.isdisjoint(other.below.waits)
            for other, load in self._loads.items()
            if request.below is not None and other.below is not None
        )

    def begin(self, request: Any, table: BlockTable) -> tuple[Ordered, ...]:
        """Order what is up of the hit it was last told of; empty where that was lost meanwhile,
        or where others have begun that leave no room for it.
        """
        below, parts = request.below, self._parts
        assert below is not None
        hit, below.foreseen = below.foreseen, None
        if hit is None or not hit.is_of(request.chain, parts.matcher.hash_tokens):
            return ()
        look, blocks = hit.found, hit.found.blocks[0]
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
        self._transfers.count_kept(load.last - load.sent)
        request.state = State.LOADING
        request.progress.begin_at(look.host_tokens)
        request.note_found(hit)
        request.note_loaded(look.host_tokens - look.computed_tokens)
        parts.book.counts.early_loads += load.is_open
        return (ordered,)

    # -- go on and end --------------------------------------------------------------------------

    def note_landed(self, request: Any, flight: InFlight) -> bool:
        """A transfer of its load ended or is late; False if its load does not come in pieces."""
        load = self._loads.get(request)
        if load is None:
            return False
        if flight.reason:
            self._lose(load, load.pieces[flight.transfer.id], flight.reason)
        return True

    def advance(self) -> tuple[list[Ordered], list[tuple[Any, Match, str]]]:
        """Order what has come up since the last call; returns that, and the loads that ended.

        Of those: the tokens on the device, those that were promised, and why they are not there.
        """
        ordered: list[Ordered] = []
        ended: list[tuple[Any, Match, str]] = []
        late = self._parts.clock() - self._patience
        for request, load in tuple(self._loads.items()):
            if load.is_open:
                piece = load.order(request, self._parts)
                if piece is not None:
                    ordered.append(piece)
                    self._transfers.count_kept(-len(piece.blocks))
                if load.is_open and load.is_stuck(request, self._parts):
                    self._lose(load, load.sent, _GONE)
                elif load.is_open and load.since <= late:
                    self._lose(load, load.sent, _LATE)
            if not load.is_open and not request.loading:
                ended.append((request, self._end(request, load), load.reason))
        return ordered, ended

    def _lose(self, load: ComingLoad, block: int, reason: str) -> None:
        self._transfers.count_kept(-load.lose(block, reason))

    def _end(self, request: Any, load: ComingLoad) -> Match:
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

    def drop(self, request: Any) -> None:
        """It is not loaded any further: what was sent lands on its own."""
        load = self._loads.pop(request, None)
        if load is not None:
            self._lose(load, load.sent, _GONE)
