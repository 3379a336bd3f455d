"""Tenants by name: the number of each in the pools, and the tokens and hits counted for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.cache.policies.quotas import Quotas
from kvferry.settings.eviction import BEFORE, NONE, OTHER, OTHER_TENANTS, RESERVED, TenantShare
from kvferry.types import TierName

MOST_OTHERS = 16
"""Tenants counted separately although the settings do not name them. Bounded because each has a
policy with arrays of the pool's size, and keeps a label in the metrics."""


@dataclass
class TenantCounts:
    """One tenant's requests and tokens so far; its slots now and evicted blocks so far, by tier."""

    queries: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    slots: Mapping[str, int] = field(default_factory=dict)
    evicted: Mapping[str, int] = field(default_factory=dict)


class Tenants:
    """Maps tenants' names to numbers. Owns these and each tenant's counts.

    The settings' tenants and the first ``MOST_OTHERS`` others have a number each; the rest share
    one. Blocks from before the server started belong to one tenant of their own (``before``).
    """

    def __init__(self, shares: Sequence[TenantShare]) -> None:
        named = [each for each in shares if each.name != OTHER_TENANTS]
        names = (NONE, OTHER, BEFORE, *(each.name for each in named))
        self._numbers = {name: number for number, name in enumerate(names)}
        self._most = len(names) + MOST_OTHERS
        self.shares = [None] * 3 + [each.share for each in named] + [None] * MOST_OTHERS
        self.before = self._numbers[BEFORE]
        self._counts = [TenantCounts() for _ in self.shares]

    def number(self, name: str) -> int:
        """Return a tenant's number; the common number of the rest if too many came before it."""
        if name in RESERVED:  # a request must not pass for one of kvferry's own tenants
            name = f"tenant-{name}"
        name = name or NONE
        if name not in self._numbers:
            if len(self._numbers) == self._most:
                return self._numbers[OTHER]
            self._numbers[name] = len(self._numbers)
        return self._numbers[name]

    def counts(self, number: int) -> TenantCounts:
        return self._counts[number]

    def snapshot(self, quotas: Mapping[TierName, Quotas]) -> dict[str, TenantCounts]:
        """Return each tenant's counts by name, with its slots in each tier now."""
        found = {}
        for name, number in self._numbers.items():
            counts = self._counts[number]
            slots = {str(tier): int(each.owned[number]) for tier, each in quotas.items()}
            evicted = {str(tier): int(each.evicted[number]) for tier, each in quotas.items()}
            if name != BEFORE or any((*slots.values(), *evicted.values())):
                found[name] = TenantCounts(
                    counts.queries, counts.asked_tokens, counts.hit_tokens, slots, evicted
                )
        return found
