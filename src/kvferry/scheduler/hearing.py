"""Tells eviction policies that want it of every request: what it asked for, how it was answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.pool import Pool
from kvferry.scheduler.level import Level
from kvferry.scheduler.matching import Matcher
from kvferry.scheduler.why import Explanation
from kvferry.types import NO_SLOTS

if TYPE_CHECKING:
    from kvferry.scheduler.request import Request


class Hearing:
    """Owns which requests were told of and have not ended. The policies are the pools'."""

    def __init__(self, host: Pool | None, below: Sequence[Pool], matcher: Matcher) -> None:
        """Of the host's pool and those of levels below it, those with such a policy."""
        self._host = host
        self._below = below
        self._matcher = matcher
        self._open: dict[Request, int] = {}

    def asked(self, request: Request, explanation: Explanation) -> None:
        """A request was looked up for the first time, and this is what it was told."""
        tokens = self._open[request] = explanation.asked_tokens
        hit = explanation.device_tokens + explanation.host_tokens
        keys, num_keys = request.chain.keys(), tokens // self._matcher.hash_tokens
        if num_keys < len(keys):
            keys = keys[:num_keys]
        for g, group in enumerate(self._matcher.groups):
            slot_keys = self._matcher.all_keys(g, keys)
            if self._host is not None:
                # Only as far as the hit goes: to look for the rest would be in vain.
                whole = slot_keys[: hit // group.block_tokens]
                slots = self._host.leading(whole) if len(whole) else NO_SLOTS
                self._host.asked(slot_keys, tokens, slots)
            for pool in self._below:
                # What it has of them is of use only where it is read.
                pool.asked(slot_keys, tokens, NO_SLOTS)

    def ended(self, request: Request) -> None:
        """A request is over, if it was not already: what its chain has grown by is its answer."""
        tokens = self._open.pop(request, None)
        if tokens is None:
            return
        keys = request.chain.keys()
        answer = max(0, len(keys) * self._matcher.hash_tokens - tokens)
        for g in range(len(self._matcher.groups)):
            slot_keys = self._matcher.all_keys(g, keys)
            for pool in (self._host, *self._below):
                if pool is not None:
                    pool.answered(slot_keys, answer)


def listening(host: Pool, levels: Sequence[Level], matcher: Matcher) -> Hearing | None:
    """Who tells the policies of these pools; None where no policy wants to be told."""
    pools = [level.pool for level in levels if level.pool is not None]
    below = [pool for pool in pools if pool.hears_requests]
    if not host.hears_requests and not below:
        return None
    return Hearing(host if host.hears_requests else None, below, matcher)
