"""What is done with blocks from outside, not by a request: look up, pin, unpin, prefetch, drop.

All of it by a request's keys, from the first on. Pins and keeps are bounded on every tier and
forgotten with a reset or a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from kvferry.cache import reach
from kvferry.cache.events import EventKind
from kvferry.cache.pins import FOREVER
from kvferry.core.keys import Duplicates, Keys
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.scheduler.journal import Hinted
from kvferry.scheduler.placement import ChainPlacement, placements, tell_pools
from kvferry.scheduler.promotion import Below
from kvferry.scheduler.request import Request, Requests
from kvferry.scheduler.transfers import InFlight
from kvferry.types import RequestId


class Prefetch:
    """One request's blocks, brought from the tiers below to the host. Owns what it waits for.

    Piece by piece, within the bound on promotions, until all is there that can be had.
    """

    def __init__(
        self,
        name: RequestId,
        keys: Keys,
        pin_seconds: float | None,
        parts: Requests,
        tenant: int = 0,
    ) -> None:
        """They are the ``tenant``'s, or nobody's yet: who asks for them later finds them."""
        self.id = name
        self.keys = keys
        self.pin_seconds = pin_seconds
        self.tenant = tenant
        self._parts = parts
        self.num_slots = 0
        """Host slots that were claimed for it so far."""
        self.refused: tuple[str, ...] = ()
        """What of it is not kept though it was to be, and why; once all has come."""
        self._below = Below()
        self._reached = -1

    def advance(self, most_slots: int | None = None) -> bool:
        """Order the next of it; False once there is no more to order.

        No more than so many slots are claimed for that.
        """
        parts = self._parts
        if self._below.waits:
            return True
        look = parts.matcher.lookup(self.keys, 0, len(self.keys) * parts.matcher.hash_tokens)
        if look.host_tokens > self._reached:  # what came may let more come
            self._reached = look.host_tokens
            self._below.renew()
        num_claimed = parts.pool.num_reserved
        is_coming = self._below.fetch(self, look, parts, most_slots)
        self.num_slots += parts.pool.num_reserved - num_claimed
        return is_coming

    def came(self, flight: InFlight) -> None:
        """Blocks it waits for have come up, or will not."""
        self._parts.log.append(EventKind.RESULT, request=self.id, detail=flight)
        self._below.waits.discard(flight.transfer.id)

    def drop(self) -> None:
        """It waits for nothing any more."""
        self._below.drop(self, self._parts)


# ------------------------------------------------------------------------------------------------
# What is done with blocks from outside, not by a request: look up, pin, unpin, prefetch, drop.
#
# All of it by a request's keys, from the first on. Pins and keeps are bounded on every tier and
# forgotten with a reset or a restart.

MOST_PREFETCHES = 64
_MOST_REMEMBERED = 1024
_MOST_KEYS = 1 << 20
"""Of all remembered requests together: 32 MiB."""


@dataclass(frozen=True)
class Acted:
    """What an action found and did. Blocks are counted over all groups of layers.

    ``tokens`` were named, of which ``host_tokens`` could be loaded now and ``lower_tokens`` more
    after they were brought up; ``unknown_blocks`` some tier would have to be asked for. ``blocks``
    were pinned, let go or dropped; for a prefetch ``is_under_way`` says that more is coming.
    ``held_blocks`` stay for now. ``refused`` says what was not done, and why.
    """

    tokens: int
    host_tokens: int
    lower_tokens: int
    unknown_blocks: int = 0
    blocks: int = 0
    held_blocks: int = 0
    is_under_way: bool = False
    refused: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Control:
    """Does it. Owns the prefetches under way, and the keys of the latest requests where told to."""

    def __init__(self, parts: Requests) -> None:
        self._parts = parts
        self._prefetches: list[Prefetch] = []
        self._num_prefetches = 0
        self._remembered: OrderedDict[RequestId, Keys] = OrderedDict()
        self._num_keys = 0
        self._duplicates = Duplicates()

    # -- actions --------------------------------------------------------------------------------

    def lookup(self, keys: Keys) -> Acted:
        """What of these keys is where. Changes nothing, and asks no tier."""
        self._require_chain(keys)
        return self._done(keys)

    def hint(self, keys: Keys, hints: Hints) -> Acted:
        """Somebody says something about these blocks, after their request or without one."""
        self._require_chain(keys)
        if not hints.shapes_what_stays:
            raise InputError(
                "say ended, continues, pin_seconds or priorities: what else a hint can say "
                "(do_not_store, do_not_load, tenant) goes with a request, not after it"
            )
        refused = [
            f"{name} goes with a request, not after it" for name in hints.only_with_a_request
        ]
        return self._done(keys, refused=[*refused, *self._tell_pools(hints, keys)])

    def pin(self, keys: Keys, seconds: float | None = None) -> Acted:
        """Let these blocks stay, each on the highest tier that may hold it: so long, or for good.

        ``blocks`` counts those that are held on some tier.
        """
        self._require_chain(keys)
        held, refused = 0, list[str]()
        for where in self._placements(keys):
            count, words = where.hold(FOREVER if seconds is None else seconds)
            held += count
            refused += [*words, *where.on_their_way()]
        return self._done(keys, blocks=held, refused=refused)

    def unpin(self, keys: Keys) -> Acted:
        """They may go as all others, but for those that others, which are pinned, go on from."""
        self._require_chain(keys)
        count = 0
        for where in self._placements(keys):
            for place in where.places:
                count += place.pool.eviction.unpin(place.slots)
        return self._done(keys, blocks=count)

    def prefetch(self, keys: Keys, pin_seconds: float | None = None) -> Acted:
        """Bring up to the host what lies below it, and keep it there so long once it has come."""
        self._require_chain(keys)
        if len(self._prefetches) >= MOST_PREFETCHES:
            words = f"{MOST_PREFETCHES} prefetches are under way already; try again later"
            return self._done(keys, refused=[words])
        self._num_prefetches += 1
        prefetch = Prefetch(f"prefetch-{self._num_prefetches}", keys, pin_seconds, self._parts)
        self._prefetches.append(prefetch)
        self.advance()
        refused = list(prefetch.refused)
        return self._done(keys, is_under_way=prefetch in self._prefetches, refused=refused)

    def drop(self, keys: Keys) -> Acted:
        """Forget these blocks on every tier, but for those that others go on from."""
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
        keyed = [tier.name for tier in self._parts.lower.tiers if tier.pool is None]
        refused += [f"tier {name} cannot forget single blocks" for name in keyed]
        return self._done(keys, blocks=count, refused=refused)

    # -- in passing -----------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether prefetches are under way, which want to be advanced with every plan."""
        return bool(self._prefetches)

    def advance(self) -> None:
        """Order what comes next of every prefetch, and keep what has come."""
        for prefetch in tuple(self._prefetches):
            if not prefetch.advance():
                self._prefetches.remove(prefetch)
                if prefetch.pin_seconds is not None:
                    self._keep(prefetch, prefetch.pin_seconds)

    def _keep(self, prefetch: Prefetch, seconds: float) -> None:
        """All has come that comes. Who asked may have its answer by then: the journal tells it."""
        prefetch.refused = self.pin(prefetch.keys, seconds).refused
        if prefetch.refused:
            detail = Hinted(Hints(pin_seconds=seconds), prefetch.refused)
            self._parts.log.append(EventKind.RESULT, request=prefetch.id, detail=detail)

    def reset(self) -> None:
        """What was to be fetched is gone; so is all that was pinned, with the pools."""
        for prefetch in self._prefetches:
            prefetch.drop()
        self._prefetches.clear()

    # -- requests by name -----------------------------------------------------------------------

    def remember(self, request_id: RequestId, keys: Keys) -> None:
        """So that it can be named once it has ended."""
        self._num_keys -= len(self._remembered.pop(request_id, ()))
        self._remembered[request_id] = keys
        self._num_keys += len(keys)
        while self._num_keys > _MOST_KEYS or len(self._remembered) > _MOST_REMEMBERED:
            self._num_keys -= len(self._remembered.popitem(last=False)[1])

    def request_ids(self) -> tuple[RequestId, ...]:
        """The requests that can be named, the latest last."""
        return (*self._remembered, *(request.id for request in self._parts.live))

    def keys_of(self, request_id: RequestId) -> Keys | None:
        """The keys of a request that lives or is remembered."""
        for request in reversed(tuple(self._parts.live)):
            if request.id == request_id:
                keys: Keys = request.chain.keys()
                return keys
        return self._remembered.get(request_id)

    # -- the parts ------------------------------------------------------------------------------

    def _placements(self, keys: Keys) -> Iterator[ChainPlacement]:
        parts = self._parts
        return placements(keys, parts.pool, parts.lower, parts.matcher)

    def _tell_pools(self, hints: Hints, keys: Keys) -> list[str]:
        parts = self._parts
        return tell_pools(hints, keys, parts.pool, parts.lower, parts.matcher)

    def _require_chain(self, keys: Keys) -> None:
        """A slot that is named twice would be held, or let go of, twice."""
        if self._duplicates.any_in(keys):
            raise InputError(f"a key is twice among these {len(keys)}; a request's never repeat")

    def _done(
        self,
        keys: Keys,
        *,
        blocks: int = 0,
        is_under_way: bool = False,
        refused: list[str] | None = None,
    ) -> Acted:
        parts = self._parts
        num_tokens = len(keys) * parts.matcher.hash_tokens
        look = parts.matcher.lookup(keys, 0, num_tokens)
        held = unknown = 0
        for where in self._placements(keys):
            for place in where.places:
                held += int(np.count_nonzero(place.pool.eviction.pins.pinned(place.slots)))
        if parts.lower.can_be_asked:
            for g, group in enumerate(parts.matcher.groups):
                chain = parts.matcher.all_keys(g, keys)
                is_chained = isinstance(group, reach.FullAttention)
                lacking = parts.lower.unknown(chain, is_chained) & ~parts.pool.cached(chain)
                unknown += int(np.count_nonzero(lacking))
        return Acted(
            num_tokens,
            look.host_tokens,
            look.all_tokens - look.host_tokens,
            unknown,
            blocks,
            held,
            is_under_way,
            tuple(refused or ()),
        )


# ------------------------------------------------------------------------------------------------
# Blocks brought up for requests that still wait for their turn.
#
# ::
#
#     request comes ──> waits in the engine's queue ──> its turn: match finds its blocks in the host
#        prefetch         within a share of the host
#                         └── its turn does not come in time, or it is gone: its blocks go first

AHEAD_SHARE = 8
"""Blocks of waiting requests may take one host slot in so many: they must not flush it."""

AHEAD_SECONDS = 30.0
"""What was brought up and is not asked for by then goes before anything else."""

_MOST_REQUESTS = 256
_LAST = 0  # no priority is lower


@dataclass(eq=False)
class _Early:
    """One waiting request's blocks. ``until`` is None as long as some are still to come."""

    prefetch: Prefetch
    until: float | None = None


class Ahead:
    """Fetches for those who wait, the first first. Owns what was fetched and is not used yet."""

    def __init__(self, parts: Requests, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._clock = clock
        self._most_slots = parts.pool.num_slots // AHEAD_SHARE
        self._asked: dict[Request, None] = {}  # nothing is fetched for them yet, oldest first
        self._early: dict[Request, _Early] = {}

    @property
    def is_busy(self) -> bool:
        """Whether there is something to :meth:`advance` with every plan."""
        return bool(self._asked or self._early)

    @property
    def num_slots(self) -> int:
        """Host slots that hold, or will hold, blocks nobody has asked for yet."""
        return sum(early.prefetch.num_slots for early in self._early.values())

    def ask(self, request: Request) -> None:
        """This one will be matched soon; more than can be served are not remembered."""
        is_known = request.is_counted or request in self._early
        if self._parts.lower.tiers and not is_known and len(self._asked) < _MOST_REQUESTS:
            self._asked[request] = None

    def advance(self) -> None:
        """Order what comes next, let go of what was not used in time."""
        now = self._clock()
        for request, early in tuple(self._early.items()):
            if request.is_counted:  # its turn has come: what is on its way it waits for itself
                self._end(request, early)
            elif request not in self._parts.live or (
                early.until is not None and early.until <= now
            ):
                self._end(request, early)
                self._let_go(early)
            elif early.until is None and not early.prefetch.advance(self._room()):
                early.until = now + AHEAD_SECONDS
        for request in tuple(self._asked):
            if request.is_counted or request not in self._parts.live:
                del self._asked[request]
            elif self._room() <= 0:
                break
            else:
                del self._asked[request]
                self._begin(request, now)

    def reset(self) -> None:
        """Everything is forgotten, so is what was fetched."""
        for early in self._early.values():
            early.prefetch.drop()
        self._early.clear()
        self._asked.clear()

    def _room(self) -> int:
        return self._most_slots - self.num_slots

    def _begin(self, request: Request, now: float) -> None:
        prefetch = Prefetch(request.id, request.chain.keys(), None, self._parts, request.tenant)
        early = _Early(prefetch)
        if not prefetch.advance(self._room()):
            early.until = now + AHEAD_SECONDS
        if prefetch.num_slots or early.until is None:
            self._early[request] = early

    def _end(self, request: Request, early: _Early) -> None:
        del self._early[request]
        early.prefetch.drop()

    def _let_go(self, early: _Early) -> None:
        """Nobody came for these: they go before what others wait for."""
        parts = self._parts
        for g, group in enumerate(parts.matcher.groups):
            if isinstance(group, reach.FullAttention):
                slots = parts.pool.lookup(parts.matcher.all_keys(g, early.prefetch.keys))
                came = slots[-early.prefetch.num_slots :]
                if len(came):
                    parts.pool.eviction.evict_first(came, _LAST)
