"""A request that somebody said something about: it heeds that, and passes it on to the pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.answers import Match, MatchState
from kvferry.hints import DEFAULT_PRIORITY, Hints, TokenPriority
from kvferry.holds import FOREVER
from kvferry.keys import KeyChain, Keys
from kvferry.policy import Evidence
from kvferry.scheduler.leaving import Held
from kvferry.scheduler.parts import Parts
from kvferry.scheduler.places import ChainPlaces, OnLevel, bound_words, places_of
from kvferry.scheduler.progress import NEVER, Progress
from kvferry.scheduler.request import Request
from kvferry.scheduler.request_state import OVER
from kvferry.scheduler.why import Explanation, Reason
from kvferry.types import RequestId


class CappedProgress(Progress):
    """The same, of which only the first ``most_tokens`` are ever stored."""

    __slots__ = ("_since", "most_tokens")

    def __init__(self, parts: Parts, most_tokens: int) -> None:
        self.most_tokens = most_tokens - most_tokens % parts.least_tokens
        super().__init__(parts)

    def storable(self, chain: KeyChain, num_tokens: int) -> int:
        return min(super().storable(chain, num_tokens), self.most_tokens)

    @property
    def since(self) -> int:
        """Never worth another call, once all that may be is stored."""
        return NEVER if self.tokens >= self.most_tokens else self._since

    @since.setter
    def since(self, num_tokens: int) -> None:
        self._since = num_tokens


class HintedRequest(Request):
    """Heeds bounds on what is loaded and stored; tells the pools, once it is over, the rest.

    What is stored late is told of when it lands (:meth:`stored`).
    """

    __slots__ = ("_ended_at", "_unheeded", "hints", "num_storing", "own_from", "tenant")

    hints: Hints

    def __init__(
        self,
        request_id: RequestId,
        chain: KeyChain,
        parts: Parts,
        hints: Hints,
        unheeded: str = "",
    ) -> None:
        super().__init__(request_id, chain, parts)
        self.hints = hints
        self._unheeded = [unheeded] if unheeded else []
        self.tenant = 0 if parts.tenants is None else parts.tenants.number(hints.tenant)
        self.own_from: int | None = None
        """From which token on nobody had its blocks when it came; None until it was answered."""
        self.num_storing = 0
        """Orders to store of it that have not landed."""
        self._ended_at = 0.0
        if hints.max_store_tokens is not None:
            self.progress = CappedProgress(parts, hints.max_store_tokens)
            if parts.stores.on_device is not None:
                parts.stores.on_device.opened(self)

    def match(self, *, computed_tokens: int = 0, max_tokens: int | None = None) -> Match:
        match = self._match(computed_tokens, max_tokens)
        if self.own_from is None and match.state is not MatchState.WAIT:
            self.own_from = match.num_tokens
        return match

    def _match(self, computed_tokens: int, max_tokens: int | None) -> Match:
        most = self.hints.max_load_tokens
        if most is None or self.state in OVER or computed_tokens < 0:
            return super().match(computed_tokens=computed_tokens, max_tokens=max_tokens)
        if most <= computed_tokens and not self.loading:
            return self._decline(computed_tokens, max_tokens)
        most = most if max_tokens is None else min(most, max_tokens)
        return super().match(computed_tokens=computed_tokens, max_tokens=most)

    def _decline(self, computed_tokens: int, max_tokens: int | None) -> Match:
        """It was said that nothing more is to be loaded for it."""
        if self._owed is not None:
            self.tell()
        self._let_go()
        covered = len(self.chain) * self._parts.matcher.hash_tokens
        asked = covered if max_tokens is None else min(max_tokens, covered)
        if not self.is_counted:
            self._parts.accounts.asked(self, self.chain.keys(), asked - computed_tokens)
            told = Explanation(
                self.id, asked, computed_tokens, 0, 0, Reason.TOLD_NOT_TO, computed_tokens
            )
            self._parts.accounts.told(self, told)
        self.progress.past = self.progress.since = computed_tokens
        return Match(MatchState.MISS, computed_tokens, computed_tokens)

    def end(self) -> None:
        was_over = self.state in OVER
        super().end()
        if not was_over:
            self._told()

    def leave(self, num_tokens: int) -> Held:
        was_over = self.state in OVER
        held = super().leave(num_tokens)
        if not was_over:
            self._told()
        return held

    def _told(self) -> None:
        """It is over: what was said holds from now on, or as soon as its last store has landed."""
        self._ended_at = self._parts.clock()
        if not self.num_storing:
            self._tell_pools(self.hints)

    def stored(self) -> None:
        """More of it was stored: what was said of one that is over holds for that as well."""
        if self.state in OVER:
            self._tell_pools(self.hints.after(self._parts.clock() - self._ended_at))

    def _tell_pools(self, hints: Hints) -> None:
        words = []
        if hints.shapes_what_stays and not self._is_nowhere:
            words = tell_pools(hints, self.chain.keys(), self._parts)
        self._parts.journal.wished(self.id, self.hints, [*self._unheeded, *words])

    @property
    def _is_nowhere(self) -> bool:
        """Whether its first block is not here, so that nothing of it is; False if that is unknown.

        Most turns end where nothing of them is stored yet, and to name all their blocks takes long.
        """
        parts, num_keys = self._parts, len(self.chain)
        if len(parts.sizes) > 1:
            return False
        covered = num_keys * parts.matcher.hash_tokens
        return parts.matcher.next_missing(self.chain, num_keys, 0, covered) is not None


def tell_pools(hints: Hints, keys: Keys, parts: Parts) -> list[str]:
    """Pass on what was said of a request's blocks, level by level; what was refused, in words."""
    refused: list[str] = []
    for where in places_of(keys, parts):
        softly = [words for place in where.places for words in _tell_place(hints, where, place)]
        if hints.keep_seconds is None:
            refused += softly
        else:  # which asks for more than they do
            refused += where.hold(hints.keep_seconds)[1]
        refused += where.on_their_way()
    return refused


def _tell_place(hints: Hints, where: ChainPlaces, place: OnLevel) -> list[str]:
    """Pass on all but a keep to one level; which blocks are not held for that, in words."""
    here = place.readable(len(where.keys) if hints.over else where.reached)
    lacking = 0
    if len(here.slots) and (hints.over or hints.goes_on):
        evidence = Evidence(hints.over, hints.goes_on, hints.within)
        if where.is_chained:
            first = here.at(where.num_shared) if hints.over else 0
            lacking = here.pool.hint_slots(here.slots, evidence, first=first)
        else:
            lacking = here.pool.hint(where.keys, evidence)
    if hints.priorities and where.is_chained:
        lacking = max(lacking, _rank(hints.priorities, where, place))
    return [bound_words(place.name, place.pool, lacking)] if lacking else []


def _rank(priorities: Sequence[TokenPriority], where: ChainPlaces, place: OnLevel) -> int:
    """Blocks matter so much, range by range; how many are not held that matter more than most.

    Of what was said of a block twice, the last counts.
    """
    pool, block_tokens = place.pool, where.group.block_tokens
    is_high = np.zeros(len(where.keys), dtype=bool)
    for told in priorities:
        start, stop = told.token_start // block_tokens, len(where.keys)
        if told.token_end is not None:
            stop = min(stop, -(-told.token_end // block_tokens))
        if told.priority < DEFAULT_PRIORITY:
            here = place.readable(stop)
            first = here.at(max(start, where.num_shared))
            pool.go_first(here.slots, told.priority, first=first)
            is_high[start:stop] = False
        elif told.priority > DEFAULT_PRIORITY:
            # With what comes before it: nobody could reach it without.
            here = place.readable(min(stop, where.reached))
            seconds = FOREVER if told.duration_ms is None else told.duration_ms / 1000
            if here.at(start) < len(here.slots):
                pool.hold(here.slots, seconds, told.priority)
                is_high[here.blocks] = True
    high = place.slots[is_high[place.blocks]]
    return int(np.count_nonzero(~pool.holds.held(high)))
