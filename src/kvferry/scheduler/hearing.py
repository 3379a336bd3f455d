"""Tells eviction policies that want it of every request: what it asked for, how it was answered.

Beside an engine that serves, they are told late, many requests at once: before anything of a pool
changes or is chosen, or once so many are owed. Nobody can tell the difference, each is told with
its time and as slots were then; but a request that comes between two steps finds little of all
this in the processor's caches, and to tell one takes three times what it takes behind another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.keys import Keys
from kvferry.pool import Pool
from kvferry.scheduler.level import Level
from kvferry.scheduler.matching import Matcher
from kvferry.scheduler.why import Explanation
from kvferry.types import NO_SLOT, NO_SLOTS, SlotArray

if TYPE_CHECKING:
    from kvferry.scheduler.request import Request

MOST_OWED = 32
"""Events, so about a millisecond: the engine's step waits while they are told. The first costs as
much as the next five: nothing of all this is in the processor's caches then."""
MOST_UNTOLD = 2 * MOST_OWED
"""And where a request ends: the device waits then, while the next ones are on their way."""


class _Asked(NamedTuple):
    at: float
    request: Request
    explanation: Explanation
    num_keys: int  # of its chain, which may grow until it is told


class _Ended(NamedTuple):
    at: float
    request: Request
    tokens: int


class Hearing:
    """Owns what is to be told, and which requests have not ended. The policies are the pools'."""

    def __init__(
        self, host: Pool | None, below: Sequence[Pool], matcher: Matcher, *, is_late: bool = False
    ) -> None:
        """Of the host's pool and those of levels below it, those with such a policy."""
        self._host = host
        self._below = below
        self._matcher = matcher
        self._open: dict[Request, int] = {}
        self._owed: deque[_Asked | _Ended] = deque()
        self._failure: Exception | None = None
        self.is_late = is_late
        self.also: Callable[[float, Keys, Request, Explanation], None] | None = None
        """Who else is told, when a request is: when it asked, its keys, what it was told."""
        pools = [pool for pool in (host, *below) if pool is not None]
        self._now = pools[0].now
        if is_late:
            for pool in pools:
                pool.before_policy = self.tell

    def asked(self, request: Request, explanation: Explanation) -> None:
        """A request was looked up for the first time, and this is what it was told."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._open[request] = explanation.asked_tokens
        self._owed.append(_Asked(self._now(), request, explanation, len(request.chain)))
        if not self.is_late or len(self._owed) >= MOST_OWED:
            self.tell()

    def ended(self, request: Request) -> None:
        """A request is over, if it was not already: what its chain has grown by is its answer."""
        tokens = self._open.pop(request, None)
        if tokens is not None:
            self._owed.append(_Ended(self._now(), request, tokens))
            if not self.is_late or len(self._owed) >= MOST_UNTOLD:
                self.tell()

    def tell(self) -> None:
        """Tell all that is owed, in the order in which it was.

        A policy that fails when told late fails the next request: raised here, it would break off
        whatever a pool is amid, and leave it in pieces.
        """
        while self._owed:
            try:
                self._tell(self._owed.popleft())
            except Exception as error:
                if not self.is_late:
                    raise
                self._failure = error

    def _tell(self, news: _Asked | _Ended) -> None:
        if isinstance(news, _Asked):
            self._tell_asked(news)
        else:
            self._tell_ended(news)

    def _tell_asked(self, news: _Asked) -> None:
        at, request, explanation, num_chain = news
        tokens, hit = explanation.asked_tokens, explanation.device_tokens + explanation.host_tokens
        keys = request.chain.keys()
        num_keys = min(num_chain, tokens // self._matcher.hash_tokens)
        if num_keys < len(keys.array):
            keys = keys[:num_keys]
        if self.also is not None:
            self.also(at, keys, request, explanation)
        for g, group in enumerate(self._matcher.groups):
            slot_keys = self._matcher.all_keys(g, keys)
            if self._host is not None:
                slots = self._found(self._host, slot_keys, hit // group.block_tokens)
                self._host.asked(slot_keys, tokens, slots, at)
            for pool in self._below:
                # What it has of them is of use only where it is read.
                pool.asked(slot_keys, tokens, NO_SLOTS, at)

    @staticmethod
    def _found(host: Pool, keys: Keys, num_hit: int) -> SlotArray:
        """Where the leading blocks are, as far as the hit goes: what is behind it is not there.

        What was on the device may not be here at all.
        """
        if not num_hit or not len(keys) or host.slot_of(keys[0]) == NO_SLOT:
            return NO_SLOTS
        return host.leading(keys[:num_hit])

    def _tell_ended(self, news: _Ended) -> None:
        at, request, tokens = news
        keys = request.chain.keys()
        answer = max(0, len(keys) * self._matcher.hash_tokens - tokens)
        for g in range(len(self._matcher.groups)):
            slot_keys = self._matcher.all_keys(g, keys)
            for pool in (self._host, *self._below):
                if pool is not None:
                    pool.answered(slot_keys, answer, at)


def listening(
    host: Pool, levels: Sequence[Level], matcher: Matcher, *, is_late: bool
) -> Hearing | None:
    """Who tells the policies of these pools; None where no policy wants to be told."""
    pools = [level.pool for level in levels if level.pool is not None]
    below = [pool for pool in pools if pool.hears_requests]
    if not host.hears_requests and not below:
        return None
    return Hearing(host if host.hears_requests else None, below, matcher, is_late=is_late)
