"""Loads of hits whose last blocks still come up from a level: the first go to the device meanwhile.

::

    level   ──read──> ▓▓▓▓▓▓▓▓▓░░░     pieces land in the host, one after the other
    device  ──load──> ▓▓▓▓▓▓░░░░░░     each goes on as it lands, beside the next one's read
                      first │  │   end
                       good ┘  └ sent

Device blocks are taken before all bytes are here. So a load begins as late as loses nothing: when
the rest is read in the time that copying all of it takes. What does not come up ends it early: the
blocks before that are on the device, the others are computed. So does a level that falls silent,
and all such loads together may take half of the device: a drive that hangs must not hold it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from kvferry.answers import Match, MatchState
from kvferry.config import Config
from kvferry.errors import InputError
from kvferry.index import num_leading
from kvferry.keys import Keys
from kvferry.lease import Lease
from kvferry.policy import OverlapDecision
from kvferry.scheduler.engine_shape import EngineShape
from kvferry.scheduler.flight import Flight
from kvferry.scheduler.hit import PinnedHit
from kvferry.scheduler.leaving import go_on
from kvferry.scheduler.look import Look, Missing
from kvferry.scheduler.orders import BlockTable, Ordered, checked_blocks
from kvferry.scheduler.request_state import State
from kvferry.slot_states import SlotState
from kvferry.types import SlotArray, TierName, TransferId

if TYPE_CHECKING:
    from kvferry.scheduler.parts import Parts
    from kvferry.scheduler.request import Request

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
        """The hit of a request that waits for a level, if now is the time to begin its load."""
        below, parts, size = request.below, self._parts, self._size
        if below is None or not self._is_on:
            return None
        below.foreseen = None
        if request.state is not State.WAITING or computed_tokens % size:
            return None
        coming = parts.lower.coming(below.waits)
        most = len(request.chain) * parts.matcher.hash_tokens
        most = most if max_tokens is None else min(most, max_tokens)
        blocks = range(computed_tokens // size, min(below.hoped_tokens, most) // size)
        if not blocks or coming is None:
            return None
        if coming.num_blocks > len(blocks) * self._share(coming.levels):
            return None
        if parts.clock() >= coming.heard + self._patience:
            return None  # the level hangs, as far as anybody can see
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

    def _share(self, levels: Collection[TierName]) -> float:
        """How much of a hit may be below when its load begins, by what both links have brought."""
        worth = self._parts.hits.worth
        speeds, link = [worth.bandwidth_of(name) for name in levels], worth.bandwidth
        known = [speed for speed in speeds if speed]
        return min(1.0, min(known) / link) if link and len(known) == len(speeds) else _SHARE

    def _has_room(self, num_blocks: int) -> bool:
        """Whether a load of so many blocks may be open beside those that are."""
        if self._max_blocks is None:
            return True
        return self.num_held + num_blocks <= self._max_blocks

    @property
    def num_held(self) -> int:
        """Device blocks of loads that wait for a level."""
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
