"""Promotion: copies a request's blocks from lower tiers to the host, and pipelines their loads.

::

    tier     ──read──> ▓▓▓▓▓▓▓▓▓░░░     pieces arrive in the host, one after the other
    device   ──load──> ▓▓▓▓▓▓░░░░░░     a pipelined load copies a piece while the next is read
                         good │  │   end
                              └ sent

A request that waits for a tier is matched again when all its transfers have completed. A pipelined
load begins earlier: when the rest can be read while the hit is copied. A block that is not promoted
in time ends the load and is computed. Pipelined loads may occupy half of the device's blocks.
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
"""Share of a hit that may still be on lower tiers when its load begins, if a link's speed is not
known. A drive reads about 1/15 of what a GPU's link copies in the same time."""

_PATIENCE = 1 / 5
"""Share of ``promote_deadline`` after which a pipelined load without a new piece ends. Its last
blocks were expected within the time of one copy, which is milliseconds."""

_DEVICE_SHARE = 1 / 2
"""Share of the device's blocks that all pipelined loads together may occupy."""

_GONE = "blocks that were coming up from a lower tier did not come"
_LATE = "blocks that were coming up from a lower tier did not come in time"


@dataclass(eq=False, slots=True)
class Promotion:
    """One request's lookups and promotions on lower tiers. Owns the transfers it waits for.

    Asks once and promotes once, until :meth:`renew`. A block that the tiers did not report counts
    as missing; a block that was not promoted in time is computed.
    """

    num_asked: int = 0
    """Blocks that tiers were asked for in the last question."""
    waits: set[TransferId] = field(default_factory=set)
    promised_tokens: int = 0
    """Tokens of the hit if the last ordered promotion brings all of its blocks."""
    declined: Decision | None = None
    """The decision against the last promotion, because computing was faster; else None."""
    foreseen: PinnedHit | None = None
    """The hit that :meth:`Promoter.foresee` last offered; it has no leases."""
    may_be_early: bool = True
    """Whether the load may begin before all of its blocks were promoted."""
    has_asked: bool = False
    has_promoted: bool = False

    def renew(self) -> None:
        """Allow the next match one more question and one more promotion."""
        self.has_asked = self.has_promoted = False


@dataclass(eq=False, slots=True)
class PipelinedLoad:
    """One pipelined load. Owns how far it is ordered, and how far the ordered blocks are good.

    Block positions count from the request's start. The hit is ``first`` to ``end``; blocks before
    ``sent`` are ordered; blocks from ``good`` on are lost. New pieces are ordered only while it is
    open. ``since`` is the time of the last order.
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
    """Asks lower tiers, promotes blocks, and pipelines loads with that. Owns the pipelined loads.

    Its callers are requests and prefetches, which have a ``promotion`` and a ``tenant``. The
    scheduler notifies them when a transfer they wait for has ended. Loads are pipelined for engines
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
        """Tokens whose promotion was ordered so far."""
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
        """The pipelined loads in flight, by request."""

    def fetch(self, caller: Any, found: Lookup, most_slots: int | None = None) -> bool:
        """Ask tiers for unknown blocks, or promote found ones; return whether the caller must wait.

        ``most_slots`` bounds this promotion, in addition to the bound on all promotions.
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
        """Let the caller wait for no transfer any longer; the transfers themselves continue."""
        promotion: Promotion = caller.promotion
        promotion.waits = set()
        promotion.promised_tokens = 0
        promotion.foreseen = None

    # -- pipelined loads --------------------------------------------------------------------------

    def is_open(self, request: Any) -> bool:
        """Return whether more pieces of the request's load may be ordered."""
        load = self.loads.get(request)
        return load is not None and load.is_open

    def foresee(self, request: Any, computed_tokens: int, max_tokens: int | None) -> Match | None:
        """Return the expected hit of a request, if its pipelined load should begin now; else None.

        The ``request`` waits for lower tiers and for nothing else.
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
            return None  # the request also waits for a tier's answer
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
        """Return a hit of these blocks, as if all were in the host; it has no leases."""
        keys, end = request.chain.keys(), blocks.stop * self._size
        asked, missing = self._matcher.names[0].of(keys, blocks), None
        if end + self._size <= max_tokens:
            missing = self._matcher.missing_at(0, keys, blocks.stop)
        found = Lookup(
            keys, computed_tokens, max_tokens, end, end, (None,), (blocks,), (asked,), missing
        )
        return PinnedHit(found, self._pool.generation)

    def _share(self, tiers: Collection[TierName]) -> float:
        """Return the share of a hit that may be on lower tiers when its load begins."""
        worth = self._hits.worth
        speeds, link = [worth.bandwidth_of(name) for name in tiers], worth.bandwidth
        known = [speed for speed in speeds if speed]
        return min(1.0, min(known) / link) if link and len(known) == len(speeds) else _SHARE

    def _has_room(self, num_blocks: int) -> bool:
        """Return whether a pipelined load of ``num_blocks`` fits their bound beside the others."""
        held = sum([load.end - load.first for load in self.loads.values() if load.is_open])
        return self._max_blocks is None or held + num_blocks <= self._max_blocks

    def _is_joined(self, request: Any) -> bool:
        """Return whether another request's pipelined load waits for the same promotions."""
        waits = request.promotion.waits
        return self._hits.joins_loads and any(
            load.is_open and not waits.isdisjoint(other.promotion.waits)
            for other, load in self.loads.items()
        )

    def begin(
        self, request: Any, table: BlockTable
    ) -> tuple[PinnedHit, tuple[Ordered, ...]] | None:
        """Begin the load of the hit that :meth:`foresee` offered to a request.

        Returns the hit and the orders of its first piece. None if the hit was lost meanwhile, or
        does not fit the bound on pipelined loads any more.

        Raises:
            InputError: the block table is too short.
        """
        hit, request.promotion.foreseen = request.promotion.foreseen, None
        if hit is None or not hit.is_of(request.chain, self._matcher.hash_tokens):
            return None
        (blocks,), (keys,) = hit.found.blocks, hit.found.asked
        places = hit.places(request.id, 0, table)
        if not self._has_room(len(blocks)):  # other loads have begun since the hit was offered
            return None
        first, end = blocks.start, blocks.stop
        load = PipelinedLoad(keys, places, first, end, self._clock(), sent=first, good=end)
        self._transfers.count_kept(len(blocks))
        ordered = self._order(request, load)
        if ordered is None:
            self._transfers.count_kept(-len(blocks))
            return None
        self.loads[request] = load
        request.promotion.promised_tokens = 0  # so that foresee offers no second load
        return hit, (ordered,)

    # -- advance and end ------------------------------------------------------------------------

    def note_landed(self, request: Any, flight: InFlight) -> bool:
        """Note that a piece completed or is overdue; return whether the load is pipelined."""
        load = self.loads.get(request)
        if load is not None and flight.reason:
            assert isinstance(flight.transfer, Transfer)
            at = np.flatnonzero(load.table == flight.transfer.dst_slots[0])
            self._lose(load, load.first + at.item(0), flight.reason)
        return load is not None

    def advance(self) -> tuple[list[Ordered], list[tuple[Any, Match, str]]]:
        """Order the pieces promoted since the last call; return them, and the loads that ended.

        Each ended load is its request, a match (``num_tokens`` were expected, ``computed_tokens``
        are on the device), and why blocks are missing.
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
        """Count the blocks from ``block`` on as lost, and order no more pieces of this load."""
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
        """Order no more pieces of a request's load; pieces in flight complete on their own."""
        load = self.loads.pop(request, None)
        if load is not None:
            self._lose(load, load.sent, _GONE)
