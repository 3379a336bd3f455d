"""Promotion: a request's blocks brought up from lower tiers to the host, and on to the device.

::

    tier     ──read──> ▓▓▓▓▓▓▓▓▓░░░     pieces land in the host, one after the other
    device   ──load──> ▓▓▓▓▓▓░░░░░░     a pipelined load takes each on, beside the next one's read
                         good │  │   end
                              └ sent

A request that waits for a tier is matched again when all it waits for has landed. A pipelined load
begins earlier: when the rest is read in the time that copying the whole hit takes. What does not
come up in time ends it, and is computed. All such loads may take half of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.cache.policies.load_or_compute import Decision
from kvferry.cache.pool import Pool
from kvferry.cache.slots import SlotState, num_leading
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.scheduler.lookup import Hits, Lookup, Matcher, PinnedHit
from kvferry.scheduler.tiering import LowerTiers
from kvferry.scheduler.transfers import BlockTable, EngineShape, InFlight, Ordered, Transfers
from kvferry.types import Match, MatchState, SlotArray, TierName, Transfer, TransferId

_SHARE = 1 / 8
"""How much of a hit may still be below when its load begins, while a speed is not known: over a
GPU's link a drive reads one part in about 15 of what is copied in the same time."""

_PATIENCE = 1 / 5
"""A load that was begun early and gets nothing more for so much of ``promote_deadline`` ends: its
last blocks were expected within the time of one copy, which is milliseconds."""

_DEVICE_SHARE = 1 / 2
"""How much of the device all pipelined loads together may take."""

_GONE = "blocks that were coming up from a lower tier did not come"
_LATE = "blocks that were coming up from a lower tier did not come in time"


@dataclass(eq=False, slots=True)
class Promotion:
    """What one request has asked of lower tiers. Owns what it still waits for.

    It asks once, and promotes once, for each match that finds something else. A block that was not
    known to be below by then is not there; a block that did not come up by then is computed.
    """

    num_asked: int = 0
    """Blocks that tiers were asked for, when they last were."""
    waits: set[TransferId] = field(default_factory=set)
    promised_tokens: int = 0
    """How many tokens its hit has if all comes up that was ordered last."""
    declined: Decision | None = None
    """Why what lay below was not brought up last time: computing it was faster."""
    foreseen: PinnedHit | None = None
    """The hit it was last promised; nothing of it is claimed."""
    may_be_early: bool = True
    """Whether its load may begin before all of its blocks have come up."""
    has_asked: bool = False
    has_promoted: bool = False

    def renew(self) -> None:
        """The next match may ask and promote again."""
        self.has_asked = self.has_promoted = False


@dataclass(eq=False, slots=True)
class PipelinedLoad:
    """One pipelined load. Owns how far it is ordered, and how far what was ordered is good.

    Blocks are counted from the request's start. ``first`` to ``end`` were promised, those up to
    ``sent`` are ordered, those from ``good`` on are lost. More is ordered only while it is open.
    ``since`` is when the last of them was ordered.
    """

    keys: Keys
    table: SlotArray
    first: int
    end: int
    since: float
    sent: int
    good: int
    is_open: bool = True
    reason: str = ""


class Promoter:
    """Asks lower tiers, brings up blocks, and pipelines loads with that. Owns the pipelined loads.

    Its callers are requests and prefetches, which have a ``promotion`` and a ``tenant``. The
    scheduler tells them when a transfer they wait for has ended. Loads are pipelined for engines
    with one group whose hits read every block.
    """

    def __init__(
        self,
        pool: Pool,
        matcher: Matcher,
        lower: LowerTiers,
        hits: Hits,
        transfers: Transfers,
        shape: EngineShape,
        config: Config,
        clock: Callable[[], float],
    ) -> None:
        self.promoted_tokens = 0
        """Loads that began while some of their blocks were still coming up."""
        self._pool = pool
        self._matcher = matcher
        self._lower = lower
        self._hits = hits
        self._transfers = transfers
        self._clock = clock
        is_plain = len(shape.groups) == 1 and matcher.is_full and not shape.spare_tokens
        self._foresees = shape.loads_early and is_plain
        self._max_blocks = shape.bound(None, _DEVICE_SHARE)
        self._patience = config.promote_deadline * _PATIENCE
        self._size, self._block_bytes = shape.sizes[0], shape.block_bytes[0]
        self.loads: dict[Any, PipelinedLoad] = {}
        """The pipelined loads under way, by request."""

    def fetch(self, caller: Any, found: Lookup, most_slots: int | None = None) -> bool:
        """Ask for what is not known, or bring up what is below; whether the caller should wait.

        ``most_slots`` bounds what is brought up, besides the bound on all promotions.
        """
        promotion: Promotion = caller.promotion
        promotion.promised_tokens = 0
        if not promotion.has_asked and self._lower.keyed and self._lower.can_be_asked:
            wanted = self._matcher.to_ask(found)
            if wanted is not None:
                promotion.waits |= self._lower.ask(wanted)
            if promotion.waits:
                promotion.has_asked = True
                promotion.num_asked = len(wanted) if wanted is not None else 0
                return True
            promotion.num_asked = 0
        if found.all_tokens <= found.host_tokens or promotion.has_promoted:
            return False
        room = self._lower.room
        most = room if most_slots is None else min(room, most_slots)
        found = self._matcher.within(found, most)
        runs = self._matcher.to_promote(found)
        num_tokens = found.all_tokens - found.host_tokens
        promotion.declined = None
        if runs:
            decision = self._lower.worth_promoting(runs, num_tokens)
            if not decision.load:
                promotion.declined = decision
                return False
        promotion.waits |= self._lower.promote(runs, room, tenant=caller.tenant)
        promotion.has_promoted = bool(promotion.waits)
        if promotion.has_promoted:
            promotion.promised_tokens = found.all_tokens
            self.promoted_tokens += num_tokens
        return promotion.has_promoted

    def stop_waiting(self, caller: Any) -> None:
        """The caller waits for nothing any more."""
        promotion: Promotion = caller.promotion
        promotion.waits = set()
        promotion.promised_tokens = 0
        promotion.foreseen = None

    # -- pipelined loads --------------------------------------------------------------------------

    def is_open(self, request: Any) -> bool:
        """Whether more pieces of its load may still be ordered."""
        load = self.loads.get(request)
        return load is not None and load.is_open

    def foresee(self, request: Any, computed_tokens: int, max_tokens: int | None) -> Match | None:
        """The hit of a request that waits for a tier, if now is the time to begin its load.

        ``request`` is one that waits for a tier and for nothing else.
        """
        promotion: Promotion = request.promotion
        promotion.foreseen = None
        if not (self._foresees and promotion.may_be_early):
            return None
        most = len(request.chain) * self._matcher.hash_tokens
        most = most if max_tokens is None else min(most, max_tokens)
        blocks, moves = self._promised(request, computed_tokens, most), self._lower.moves
        coming = [moves[each] for each in promotion.waits if each in moves and moves[each].upward]
        if not coming or len(coming) < len(promotion.waits):
            return None  # it waits for an answer, too
        names = {move.tier.name for move in coming}
        if sum([len(move.keys) for move in coming]) > len(blocks) * self._share(names):
            return None
        if self._clock() >= self._lower.heard(names) + self._patience:
            return None  # the tier seems to hang
        asked = self._matcher.names[0].of(request.chain.keys(), blocks)
        slots = self._pool.lookup(asked)
        if not len(slots) or self._is_joined(request):
            return None
        words = np.concatenate([move.keys.array[:, 0] for move in coming])
        count = num_leading(self._pool.cached(asked) | np.isin(asked.array[:, 0], words))
        if not (self._has_room(count) and self._hits.may_begin(slots, count)):
            return None
        decision = self._hits.worth.decide(
            count * self._size, count * self._block_bytes, self._transfers.bytes_to_device
        )
        if not decision.load:
            return None
        hit = promotion.foreseen = self._hit(request, computed_tokens, most, blocks[:count])
        hit.decision = decision
        return Match(MatchState.HIT, hit.found.host_tokens, computed_tokens)

    def _promised(self, request: Any, computed_tokens: int, most_tokens: int) -> range:
        if computed_tokens % self._size:
            return range(0)
        tokens = min(request.promotion.promised_tokens, most_tokens)
        return range(computed_tokens // self._size, tokens // self._size)

    def _hit(self, request: Any, computed_tokens: int, max_tokens: int, blocks: range) -> PinnedHit:
        """The hit of these blocks, as if they were in the host; it claims nothing."""
        keys, end = request.chain.keys(), blocks.stop * self._size
        asked, missing = self._matcher.names[0].of(keys, blocks), None
        if end + self._size <= max_tokens:
            missing = self._matcher.missing_at(0, keys, blocks.stop)
        found = Lookup(
            keys, computed_tokens, max_tokens, end, end, (None,), (blocks,), (asked,), missing
        )
        return PinnedHit(found, self._pool.generation)

    def _share(self, tiers: Collection[TierName]) -> float:
        """How much of a hit may be below when its load begins, by the speeds of both links."""
        worth = self._hits.worth
        speeds, link = [worth.bandwidth_of(name) for name in tiers], worth.bandwidth
        known = [speed for speed in speeds if speed]
        return min(1.0, min(known) / link) if link and len(known) == len(speeds) else _SHARE

    def _has_room(self, num_blocks: int) -> bool:
        """Whether a load of so many blocks may wait for a tier beside the others."""
        held = sum([load.end - load.first for load in self.loads.values() if load.is_open])
        return self._max_blocks is None or held + num_blocks <= self._max_blocks

    def _is_joined(self, request: Any) -> bool:
        """Whether another request is loading blocks that this one waits for."""
        waits = request.promotion.waits
        return self._hits.joins_loads and any(
            load.is_open and not waits.isdisjoint(other.promotion.waits)
            for other, load in self.loads.items()
        )

    def begin(
        self, request: Any, table: BlockTable
    ) -> tuple[PinnedHit, tuple[Ordered, ...]] | None:
        """Begin the load of the hit that :meth:`foresee` promised to a request.

        Returns the hit and what was ordered of it; None where the hit was lost meanwhile, or where
        no room is left for it.

        Raises:
            InputError: the block table is too short.
        """
        hit, request.promotion.foreseen = request.promotion.foreseen, None
        if hit is None or not hit.is_of(request.chain, self._matcher.hash_tokens):
            return None
        (blocks,), (keys,) = hit.found.blocks, hit.found.asked
        places = hit.places(request.id, 0, table)
        if not self._has_room(len(blocks)):  # other loads have begun since it was promised
            return None
        first, end = blocks.start, blocks.stop
        load = PipelinedLoad(keys, places, first, end, self._clock(), sent=first, good=end)
        self._transfers.count_kept(len(blocks))
        ordered = self._order(request, load)
        if ordered is None:
            self._transfers.count_kept(-len(blocks))
            return None
        self.loads[request] = load
        request.promotion.promised_tokens = 0  # a second load of it has nothing to bring
        return hit, (ordered,)

    # -- go on and end --------------------------------------------------------------------------

    def note_landed(self, request: Any, flight: InFlight) -> bool:
        """A transfer of its load ended or is overdue; False if its load is not pipelined."""
        load = self.loads.get(request)
        if load is not None and flight.reason:
            assert isinstance(flight.transfer, Transfer)
            at = np.flatnonzero(load.table == flight.transfer.dst_slots[0])
            self._lose(load, load.first + at.item(0), flight.reason)
        return load is not None

    def advance(self) -> tuple[list[Ordered], list[tuple[Any, Match, str]]]:
        """Order what has come up since the last call; returns that, and the loads that ended.

        Of each of those: the tokens on the device, those that were promised, and why some are not
        on the device.
        """
        ordered: list[Ordered] = []
        ended: list[tuple[Any, Match, str]] = []
        now = self._clock()
        for request, load in tuple(self.loads.items()):
            if load.is_open:
                piece = self._order(request, load)
                if piece is not None:
                    ordered.append(piece)
                if load.is_open and self._is_stuck(request, load):
                    self._lose(load, load.sent, _GONE)
                elif load.is_open and load.since + self._patience <= now:
                    self._lose(load, load.sent, _LATE)
            if not load.is_open and not request.loading:
                ended.append((request, self._end(request, load), load.reason))
        return ordered, ended

    def _order(self, request: Any, load: PipelinedLoad) -> Ordered | None:
        rest = slice(load.sent - load.first, None)
        slots = self._pool.lookup(load.keys[rest])
        if not len(slots):
            return None
        piece = slice(rest.start, rest.start + len(slots))
        lease = self._pool.claim(slots)
        transfer_id = self._transfers.load(request, 0, lease, load.table[piece])
        self._transfers.count_kept(-len(slots))
        self._hits.began(lease.slots)
        request.loading.add(transfer_id)
        places = range(load.sent, load.sent + len(slots))
        load.sent, load.since = places.stop, self._clock()
        load.is_open = load.sent < load.end
        return Ordered(0, load.table[piece], transfer_id, places, load.keys[piece], request)

    def _is_stuck(self, request: Any, load: PipelinedLoad) -> bool:
        if not request.promotion.waits:
            return True
        key = load.keys[load.sent - load.first]
        return self._pool.state_of(key) is SlotState.FREE

    def _lose(self, load: PipelinedLoad, block: int, reason: str) -> None:
        """From this block on it is lost, and nothing more of it will be ordered."""
        load.good = min(load.good, block)
        load.reason = load.reason or reason
        if load.is_open:
            self._transfers.count_kept(load.sent - load.end)
            load.is_open = False

    def _end(self, request: Any, load: PipelinedLoad) -> Match:
        del self.loads[request]
        self.stop_waiting(request)
        if not load.reason:
            request.promotion.renew()
        return Match(MatchState.HIT, load.end * self._size, load.good * self._size)

    def drop(self, request: Any) -> None:
        """Load no more of it: what was sent lands on its own."""
        load = self.loads.pop(request, None)
        if load is not None:
            self._lose(load, load.sent, _GONE)
