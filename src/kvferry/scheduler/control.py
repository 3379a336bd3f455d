"""Actions on blocks by their keys: look up, pin, unpin, prefetch, drop, hint.

Each works on a request's keys, from the first on. Pins are bounded on every tier and forgotten with
a reset or a restart. Requests that wait in an engine's queue are prefetched here as well::

    request comes ──> waits in the engine's queue ──> its turn: match finds its blocks in the host
       prefetch         within a share of the host
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
"""So many prefetches by keys may be under way."""

QUEUE_SHARE = 8
"""Prefetches for queued requests may take one host slot in so many: they must not flush it."""

QUEUE_SECONDS = 30.0
"""Blocks prefetched for a queued request are evicted first, if it is not matched by then."""

_MOST_QUEUED = 256
_LOWEST = 0
_MOST_REMEMBERED = 1024
_MOST_KEYS = 1 << 20
"""Keys of all remembered requests together: 32 MiB."""


@dataclass(frozen=True)
class Acted:
    """What an action found and did. Blocks are counted over all groups of layers.

    ``tokens`` were named, of which ``host_tokens`` could be loaded now and ``lower_tokens`` more
    after a promotion. Some tier would have to be asked for ``unknown_blocks``. ``blocks`` were
    pinned, unpinned or dropped. For a prefetch ``is_under_way`` says that more is coming.
    ``held_blocks`` are pinned now. ``refused`` says what was not done, and why.
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
    """Blocks that are brought to the host for later. Owns what it waits for.

    They come piece by piece, within the bound on promotions. They are pinned for ``pin_seconds``
    once they have come, or wait until a queued ``request`` is matched. ``num_slots`` were claimed
    for it so far. At ``until`` blocks of a queued request are given up; None while some are still
    to come. ``refused`` says why some are not pinned, once all have come.
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
    """Does all that. Owns the prefetches, and the keys of the latest requests where told to."""

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
        self._queued: dict[Any, None] = {}  # requests without a prefetch yet, oldest first
        self._prefetches: dict[Any, Prefetch] = {}  # by request, or by its own name
        self._num_prefetches = 0
        self._remembered: OrderedDict[RequestId, Keys] = OrderedDict()
        self._num_keys = 0

    # -- actions --------------------------------------------------------------------------------

    def lookup(self, keys: Keys) -> Acted:
        """What of these keys is where. Changes nothing, and asks no tier."""
        self._require_chain(keys)
        return self._done(keys)

    def hint(self, keys: Keys, hints: Hints) -> Acted:
        """Apply hints to these blocks, after their request or without one."""
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
        """Pin these blocks, each on the highest tier that may hold it; None: until unpinned.

        ``blocks`` counts those that are pinned on some tier.
        """
        self._require_chain(keys)
        held, refused = 0, list[str]()
        for where in self._placements(keys):
            count, words = where.hold(FOREVER if seconds is None else seconds)
            held += count
            refused += [*words, *where.on_their_way()]
        return self._done(keys, blocks=held, refused=refused)

    def unpin(self, keys: Keys) -> Acted:
        """Unpin these blocks, except blocks that other pinned blocks follow."""
        self._require_chain(keys)
        count = 0
        for where in self._placements(keys):
            for place in where.places:
                count += place.pool.eviction.unpin(place.slots)
        return self._done(keys, blocks=count)

    def prefetch(self, keys: Keys, pin_seconds: float | None = None) -> Acted:
        """Bring these blocks up to the host, and pin them so long once they have come."""
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
        """Forget these blocks on every tier, except blocks that others follow."""
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
        """Those under way."""
        return self._prefetches.values()

    @property
    def has_prefetches(self) -> bool:
        """Whether there is something to :meth:`advance` with every plan."""
        return bool(self._prefetches or self._queued)

    def prefetch_queued(self, request: Any) -> None:
        """This request will be matched soon; requests beyond a bound are ignored."""
        is_known = request.was_asked or request in self._prefetches
        if self._lower.tiers and not is_known and len(self._queued) < _MOST_QUEUED:
            self._queued[request] = None

    @property
    def num_queued_slots(self) -> int:
        """Host slots with blocks for queued requests, of those that have come or are coming."""
        prefetches = self._prefetches.values()
        return sum([each.num_slots for each in prefetches if each.request is not None])

    def advance(self) -> None:
        """Order what comes next of every prefetch. Pin, or give up, what has come."""
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
        if request.was_asked:  # it is matched: what is coming it waits for itself
            self._end(prefetch)
        elif request not in self._live or (until is not None and until <= now):
            self._end(prefetch)
            self._evict_first(prefetch)
        elif until is None and not self._order(prefetch, self._room()):
            prefetch.until = now + QUEUE_SECONDS

    def _order(self, prefetch: Prefetch, most_slots: int | None) -> bool:
        """Order the next of it, in so many slots at most; False once there is no more to order."""
        promotion = prefetch.promotion
        if promotion.waits:
            return True
        num_tokens = len(prefetch.keys) * self._matcher.hash_tokens
        found = self._matcher.lookup(prefetch.keys, 0, num_tokens)
        if found.host_tokens > prefetch.reached:  # what came may let more come
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
        """All blocks have come that will. The caller may be gone: the journal says what failed."""
        prefetch.refused = self.pin(prefetch.keys, seconds).refused
        if prefetch.refused:
            detail = Hinted(Hints(pin_seconds=seconds), list(prefetch.refused))
            self._pool.log.append(EventKind.RESULT, request=prefetch.id, detail=detail)

    def _evict_first(self, prefetch: Prefetch) -> None:
        """No request came for these blocks: evict them before others."""
        for g, group in enumerate(self._matcher.groups):
            if isinstance(group, reach.FullAttention):
                slots = self._pool.lookup(self._matcher.names[g].all(prefetch.keys))
                came = slots[-prefetch.num_slots :]
                if len(came):
                    self._pool.eviction.evict_first(came, _LOWEST)

    def reset(self) -> None:
        """Forget the prefetches; the pools forget their pins themselves."""
        for prefetch in self._prefetches.values():
            self._promoter.stop_waiting(prefetch)
        self._prefetches.clear()
        self._queued.clear()

    # -- requests by name -----------------------------------------------------------------------

    def remember(self, request_id: RequestId, keys: Keys) -> None:
        """Let a request be named after it has ended."""
        self._num_keys -= len(self._remembered.pop(request_id, ()))
        self._remembered[request_id] = keys
        self._num_keys += len(keys)
        while self._num_keys > _MOST_KEYS or len(self._remembered) > _MOST_REMEMBERED:
            self._num_keys -= len(self._remembered.popitem(last=False)[1])

    def request_ids(self) -> tuple[RequestId, ...]:
        """The requests that can be named, the latest last."""
        return (*self._remembered, *(request.id for request in self._live))

    def keys_of(self, request_id: RequestId) -> Keys | None:
        """The keys of a request that lives or is remembered."""
        for request in reversed(tuple(self._live)):
            if request.id == request_id:
                keys: Keys = request.chain.keys()
                return keys
        return self._remembered.get(request_id)

    # -- parts of the actions -------------------------------------------------------------------

    def _placements(self, keys: Keys) -> Iterator[ChainPlacement]:
        return placements(keys, self._pool, self._lower, self._matcher)

    def _require_chain(self, keys: Keys) -> None:
        """A slot that is named twice would be pinned, or unpinned, twice."""
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
