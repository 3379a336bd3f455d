"""Actions on blocks by their keys: look up, pin, unpin, prefetch, drop, hint.

Each action takes the keys of a request, from its first block on. Pins are bounded on every tier; a
reset or a restart removes them. Requests in the engine's waiting queue are prefetched here, too::

    request arrives ──> waits in the engine's queue ──> match finds its blocks in host memory
       prefetch           within a share of host memory
                          └── not matched in time, or ended: its blocks are evicted first
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.cache import reach
from kvferry.cache.events import EventKind
from kvferry.cache.pins import FOREVER
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.hints import Hinted, Hints
from kvferry.scheduler.lookup import Matcher
from kvferry.scheduler.placement import ChainPlacement, placements, tell_pools
from kvferry.scheduler.promotion import Promoter, Promotion
from kvferry.scheduler.tiering import LowerTiers
from kvferry.types import RequestId

MOST_PREFETCHES = 64
"""Prefetches by keys that may be under way at once."""

QUEUE_SHARE = 8
"""Prefetches for queued requests may take 1/8 of the host slots: more would evict too much."""

QUEUE_SECONDS = 30.0
"""Seconds after which blocks prefetched for a queued request are evicted first, unless matched."""

_MOST_QUEUED = 256
_LOWEST = 0
_MOST_REMEMBERED = 1024
_MOST_KEYS = 1 << 20
"""Keys remembered of all ended requests together: 32 MiB."""


@dataclass(frozen=True)
class Acted:
    """The result of one action. Blocks are counted over all groups of layers.

    ``tokens`` are those of the given keys. ``host_tokens`` of them could be loaded now, and
    ``lower_tokens`` more after a promotion. For ``unknown_blocks`` a tier must be asked first.
    ``blocks`` were pinned, unpinned or dropped by the action; ``held_blocks`` are pinned now.
    ``is_under_way``: the prefetch continues. ``refused`` says what was not done, and why.
    """

    tokens: int
    host_tokens: int
    lower_tokens: int
    unknown_blocks: int = 0
    blocks: int = 0
    held_blocks: int = 0
    is_under_way: bool = False
    refused: tuple[str, ...] = ()


@dataclass(eq=False)
class Prefetch:
    """One prefetch: blocks promoted to host memory ahead of a match. Owns its pending transfers.

    Pieces are promoted one by one, within the bound on promotions. When all are in the host, the
    blocks are pinned for ``pin_seconds``, or kept until the queued ``request`` is matched.
    ``num_slots`` host slots were claimed so far. Blocks of a queued request are given up at time
    ``until``, which is None while promotions continue. ``refused`` says why blocks are not pinned.
    """

    id: RequestId
    keys: Keys
    pin_seconds: float | None = None
    request: Any = None
    tenant: int = 0
    promotion: Promotion = field(default_factory=Promotion)
    num_slots: int = 0
    until: float | None = None
    refused: tuple[str, ...] = ()
    reached: int = -1


class Control:
    """Carries out actions on blocks. Owns the prefetches and the remembered keys of requests."""

    def __init__(
        self,
        pool: Pool,
        matcher: Matcher,
        lower: LowerTiers,
        promoter: Promoter,
        live: Collection[Any],
        clock: Callable[[], float],
    ) -> None:
        """``live`` are the scheduler's requests that have not ended."""
        self._pool = pool
        self._matcher = matcher
        self._lower = lower
        self._promoter = promoter
        self._live = live
        self._clock = clock
        self._most_slots = pool.num_slots // QUEUE_SHARE
        self._queued: dict[Any, None] = {}  # queued requests without a prefetch, oldest first
        self._prefetches: dict[Any, Prefetch] = {}  # by queued request, or by the prefetch's id
        self._num_prefetches = 0
        self._remembered: OrderedDict[RequestId, Keys] = OrderedDict()
        self._num_keys = 0

    # -- actions --------------------------------------------------------------------------------

    def lookup(self, keys: Keys) -> Acted:
        """Count the blocks of these keys in the host and on lower tiers; ask no tier."""
        self._require_chain(keys)
        return self._done(keys)

    def hint(self, keys: Keys, hints: Hints) -> Acted:
        """Apply hints to these blocks, after their request has ended or without a request."""
        self._require_chain(keys)
        if not hints.shapes_what_stays:
            raise InputError(
                "say ended, continues, pin_seconds or priorities: what else a hint can say "
                "(do_not_store, do_not_load, tenant) goes with a request, not after it"
            )
        refused = [
            f"{name} goes with a request, not after it"
            for name in ("max_store_tokens", "max_load_tokens", "tenant")
            if getattr(hints, name) not in (None, "")
        ]
        told = tell_pools(hints, keys, self._pool, self._lower, self._matcher)
        return self._done(keys, refused=[*refused, *told])

    def pin(self, keys: Keys, seconds: float | None = None) -> Acted:
        """Pin these blocks for ``seconds`` (None: until unpinned), on the highest tier that can.

        ``blocks`` counts the blocks that are pinned on some tier.
        """
        self._require_chain(keys)
        held, refused = 0, list[str]()
        for where in self._placements(keys):
            count, words = where.hold(FOREVER if seconds is None else seconds)
            held += count
            refused += [*words, *where.on_their_way()]
        return self._done(keys, blocks=held, refused=refused)

    def unpin(self, keys: Keys) -> Acted:
        """Unpin these blocks, except those that other pinned blocks follow."""
        self._require_chain(keys)
        count = 0
        for where in self._placements(keys):
            for place in where.places:
                count += place.pool.eviction.unpin(place.slots)
        return self._done(keys, blocks=count)

    def prefetch(self, keys: Keys, pin_seconds: float | None = None) -> Acted:
        """Promote these blocks to host memory, then pin them for ``pin_seconds``."""
        self._require_chain(keys)
        if sum([each.request is None for each in self._prefetches.values()]) >= MOST_PREFETCHES:
            words = f"{MOST_PREFETCHES} prefetches are under way already; try again later"
            return self._done(keys, refused=[words])
        self._num_prefetches += 1
        name = f"prefetch-{self._num_prefetches}"
        prefetch = Prefetch(name, keys, pin_seconds)
        self._prefetches[name] = prefetch
        self.advance()
        refused = list(prefetch.refused)
        return self._done(keys, is_under_way=name in self._prefetches, refused=refused)

    def drop(self, keys: Keys) -> Acted:
        """Remove these blocks from every tier, except those that other requests' blocks follow."""
        self._require_chain(keys)
        count, refused = 0, []
        for where in self._placements(keys):
            shared = where.num_shared
            for place in where.places:
                gone = place.pool.drop(place.slots[place.at(shared) :])
                count += gone
                if gone < len(place.slots):
                    rest, name = len(place.slots) - gone, place.name
                    refused.append(f"{rest} blocks stay on {name}: other requests go on from them")
        keyed = self._lower.keyed
        refused += [f"tier {tier.name} cannot forget single blocks" for tier in keyed]
        return self._done(keys, blocks=count, refused=refused)

    # -- prefetches -----------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether prefetches by keys are under way."""
        return any(each.request is None for each in self._prefetches.values())

    @property
    def prefetches(self) -> Collection[Prefetch]:
        """The prefetches under way."""
        return self._prefetches.values()

    @property
    def has_prefetches(self) -> bool:
        """Whether :meth:`advance` must be called before every plan."""
        return bool(self._prefetches or self._queued)

    def prefetch_queued(self, request: Any) -> None:
        """Prefetch for a request in the engine's queue; ignored if 256 requests wait for that."""
        is_known = request.was_asked or request in self._prefetches
        if self._lower.tiers and not is_known and len(self._queued) < _MOST_QUEUED:
            self._queued[request] = None

    @property
    def num_queued_slots(self) -> int:
        """Host slots claimed by prefetches for queued requests."""
        prefetches = self._prefetches.values()
        return sum([each.num_slots for each in prefetches if each.request is not None])

    def advance(self) -> None:
        """Order the next promotions of every prefetch. Pin, or give up, completed prefetches."""
        now = self._clock()
        for name, prefetch in tuple(self._prefetches.items()):
            if prefetch.request is not None:
                self._advance_queued(prefetch, now)
            elif not self._order(prefetch, None):
                del self._prefetches[name]
                if prefetch.pin_seconds is not None:
                    self._pin(prefetch, prefetch.pin_seconds)
        for request in tuple(self._queued):
            if request.was_asked or request not in self._live:
                del self._queued[request]
            elif self._room() <= 0:
                break
            else:
                del self._queued[request]
                keys = request.chain.keys()
                prefetch = Prefetch(request.id, keys, None, request, request.tenant)
                self._advance_queued(prefetch, now)
                if prefetch.num_slots or prefetch.until is None:
                    self._prefetches[request] = prefetch

    def _advance_queued(self, prefetch: Prefetch, now: float) -> None:
        request, until = prefetch.request, prefetch.until
        if request.was_asked:  # matched: the request itself waits for the promotions now
            self._end(prefetch)
        elif request not in self._live or (until is not None and until <= now):
            self._end(prefetch)
            self._evict_first(prefetch)
        elif until is None and not self._order(prefetch, self._room()):
            prefetch.until = now + QUEUE_SECONDS

    def _order(self, prefetch: Prefetch, most_slots: int | None) -> bool:
        """Order the next promotions, into at most ``most_slots`` slots; False if none remain."""
        promotion = prefetch.promotion
        if promotion.waits:
            return True
        num_tokens = len(prefetch.keys) * self._matcher.hash_tokens
        found = self._matcher.lookup(prefetch.keys, 0, num_tokens)
        if found.host_tokens > prefetch.reached:  # progress: another promotion may be possible
            prefetch.reached = found.host_tokens
            promotion.renew()
        num_claimed = self._pool.num_reserved
        is_coming = self._promoter.fetch(prefetch, found, most_slots)
        prefetch.num_slots += self._pool.num_reserved - num_claimed
        return is_coming

    def _room(self) -> int:
        return self._most_slots - self.num_queued_slots

    def _end(self, prefetch: Prefetch) -> None:
        self._prefetches.pop(prefetch.request, None)
        self._promoter.stop_waiting(prefetch)

    def _pin(self, prefetch: Prefetch, seconds: float) -> None:
        """Pin the promoted blocks. The caller may be gone, so the journal gets the refusals."""
        prefetch.refused = self.pin(prefetch.keys, seconds).refused
        if prefetch.refused:
            detail = Hinted(Hints(pin_seconds=seconds), list(prefetch.refused))
            self._pool.log.append(EventKind.RESULT, request=prefetch.id, detail=detail)

    def _evict_first(self, prefetch: Prefetch) -> None:
        """Let the blocks of this prefetch be evicted before others: no request matched them."""
        for g, group in enumerate(self._matcher.groups):
            if isinstance(group, reach.FullAttention):
                slots = self._pool.lookup(self._matcher.names[g].all(prefetch.keys))
                came = slots[max(0, len(slots) - prefetch.num_slots) :]
                if len(came):
                    self._pool.eviction.evict_first(came, _LOWEST)

    def reset(self) -> None:
        """Drop all prefetches; the pools remove their pins themselves."""
        for prefetch in self._prefetches.values():
            self._promoter.stop_waiting(prefetch)
        self._prefetches.clear()
        self._queued.clear()

    # -- requests by name -----------------------------------------------------------------------

    def remember(self, request_id: RequestId, keys: Keys) -> None:
        """Keep the keys of a request, so that actions can name it after it has ended."""
        self._num_keys -= len(self._remembered.pop(request_id, ()))
        self._remembered[request_id] = keys
        self._num_keys += len(keys)
        while self._num_keys > _MOST_KEYS or len(self._remembered) > _MOST_REMEMBERED:
            self._num_keys -= len(self._remembered.popitem(last=False)[1])

    def request_ids(self) -> tuple[RequestId, ...]:
        """Return the requests that :meth:`keys_of` knows: remembered ones, then live ones."""
        return (*self._remembered, *(request.id for request in self._live))

    def keys_of(self, request_id: RequestId) -> Keys | None:
        """Return the keys of a live or remembered request; None for others."""
        for request in reversed(tuple(self._live)):
            if request.id == request_id:
                keys: Keys = request.chain.keys()
                return keys
        return self._remembered.get(request_id)

    # -- parts of the actions -------------------------------------------------------------------

    def _placements(self, keys: Keys) -> Iterator[ChainPlacement]:
        return placements(keys, self._pool, self._lower, self._matcher)

    def _require_chain(self, keys: Keys) -> None:
        """Refuse repeated keys: their slot would be pinned, or unpinned, twice."""
        if keys.has_duplicates():
            raise InputError(f"a key is twice among these {len(keys)}; a request's never repeat")

    def _done(
        self,
        keys: Keys,
        *,
        blocks: int = 0,
        is_under_way: bool = False,
        refused: list[str] | None = None,
    ) -> Acted:
        matcher, lower = self._matcher, self._lower
        num_tokens = len(keys) * matcher.hash_tokens
        found = matcher.lookup(keys, 0, num_tokens)
        held = unknown = 0
        for where in self._placements(keys):
            for place in where.places:
                held += int(np.count_nonzero(place.pool.eviction.pins.pinned(place.slots)))
            if lower.can_be_asked:
                below = lower.lookup(where.keys)
                lacking = below.unknown & ~self._pool.cached(where.keys)
                unknown += int(np.count_nonzero(lacking))
        return Acted(
            num_tokens,
            found.host_tokens,
            found.all_tokens - found.host_tokens,
            unknown,
            blocks,
            held,
            is_under_way,
            tuple(refused or ()),
        )
