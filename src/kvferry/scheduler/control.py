"""What is done with blocks from outside, not by a request: look up, pin, unpin, prefetch, drop.

All of it by a request's keys, from the first on. Pins and keeps are bounded on every level and
forgotten with a reset or a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass

import numpy as np

from kvferry import reach
from kvferry.duplicates import Duplicates
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.holds import FOREVER
from kvferry.keys import Keys
from kvferry.scheduler.hinted import tell_pools
from kvferry.scheduler.parts import Parts
from kvferry.scheduler.places import places_of
from kvferry.scheduler.prefetch import Prefetch
from kvferry.types import RequestId

MOST_PREFETCHES = 64
_MOST_REMEMBERED = 1024
_MOST_KEYS = 1 << 20
"""Of all remembered requests together: 32 MiB."""


@dataclass(frozen=True)
class Acted:
    """What an action found and did. Blocks are counted over all groups of layers.

    ``tokens`` were named, of which ``host_tokens`` could be loaded now and ``lower_tokens`` more
    after they were brought up; ``unknown_blocks`` some level would have to be asked for. ``blocks``
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

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._prefetches: list[Prefetch] = []
        self._num_prefetches = 0
        self._remembered: OrderedDict[RequestId, Keys] = OrderedDict()
        self._num_keys = 0
        self._duplicates = Duplicates()

    # -- actions --------------------------------------------------------------------------------

    def lookup(self, keys: Keys) -> Acted:
        """What of these keys is where. Changes nothing, and asks no level."""
        self._require_chain(keys)
        return self._done(keys)

    def hint(self, keys: Keys, hints: Hints) -> Acted:
        """Somebody says something about these blocks, after their request or without one."""
        self._require_chain(keys)
        if not hints.shapes_what_stays:
            raise InputError(
                "say over, goes_on, keep_seconds or priorities: what else a hint can say "
                "(do_not_store, do_not_load, tenant) goes with a request, not after it"
            )
        refused = [
            f"{name} goes with a request, not after it" for name in hints.only_with_a_request
        ]
        return self._done(keys, refused=[*refused, *tell_pools(hints, keys, self._parts)])

    def pin(self, keys: Keys, seconds: float | None = None) -> Acted:
        """Let these blocks stay, each on the highest level that may hold it: so long, or for good.

        ``blocks`` counts those that are held on some level.
        """
        self._require_chain(keys)
        held, refused = 0, list[str]()
        for where in places_of(keys, self._parts):
            count, words = where.hold(FOREVER if seconds is None else seconds)
            held += count
            refused += [*words, *where.on_their_way()]
        return self._done(keys, blocks=held, refused=refused)

    def unpin(self, keys: Keys) -> Acted:
        """They may go as all others, but for those that others, which are pinned, go on from."""
        self._require_chain(keys)
        count = 0
        for where in places_of(keys, self._parts):
            for place in where.places:
                count += place.pool.let_go(place.slots)
        return self._done(keys, blocks=count)

    def prefetch(self, keys: Keys, keep_seconds: float | None = None) -> Acted:
        """Bring up to the host what lies below it, and keep it there so long once it has come."""
        self._require_chain(keys)
        if len(self._prefetches) >= MOST_PREFETCHES:
            words = f"{MOST_PREFETCHES} prefetches are under way already; try again later"
            return self._done(keys, refused=[words])
        self._num_prefetches += 1
        prefetch = Prefetch(f"prefetch-{self._num_prefetches}", keys, keep_seconds, self._parts)
        self._prefetches.append(prefetch)
        self.advance()
        refused = list(prefetch.refused)
        return self._done(keys, is_under_way=prefetch in self._prefetches, refused=refused)

    def drop(self, keys: Keys) -> Acted:
        """Forget these blocks on every level, but for those that others go on from."""
        self._require_chain(keys)
        count, refused = 0, []
        for where in places_of(keys, self._parts):
            shared = where.num_shared
            for place in where.places:
                gone = place.pool.drop(place.slots[place.at(shared) :])
                count += gone
                if gone < len(place.slots):
                    rest, name = len(place.slots) - gone, place.name
                    refused.append(f"{rest} blocks stay on {name}: other requests go on from them")
        keyed = [level.name for level in self._parts.lower.levels if level.pool is None]
        refused += [f"level {name} cannot forget single blocks" for name in keyed]
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
                if prefetch.keep_seconds is not None:
                    self._keep(prefetch, prefetch.keep_seconds)

    def _keep(self, prefetch: Prefetch, seconds: float) -> None:
        """All has come that comes. Who asked may have its answer by then: the journal tells it."""
        prefetch.refused = self.pin(prefetch.keys, seconds).refused
        if prefetch.refused:
            said = Hints(keep_seconds=seconds)
            self._parts.journal.wished(prefetch.id, said, prefetch.refused)

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
        look = parts.matcher.look(keys, 0, num_tokens)
        held = unknown = 0
        for where in places_of(keys, parts):
            for place in where.places:
                held += int(np.count_nonzero(place.pool.holds.held(place.slots)))
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
