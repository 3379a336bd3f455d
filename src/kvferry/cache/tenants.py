"""The tenants by name: which number each has in the pools, and what each was served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.cache.policies.quotas import Quotas
from kvferry.settings.eviction import BEFORE, NONE, OTHER, OTHER_TENANTS, RESERVED, TenantShare
from kvferry.types import TierName

MOST_OTHERS = 16
"""Tenants that the settings do not name and that are told apart all the same. Each has a policy
with arrays of the pool's size, and a label in the metrics for good."""


@dataclass
class TenantCounts:
    """What one tenant was served; its slots, and its evicted blocks, by tier."""

    queries: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    slots: Mapping[str, int] = field(default_factory=dict)
    evicted: Mapping[str, int] = field(default_factory=dict)


class Tenants:
    """The tenants by name. Owns their numbers and what was counted for each.

    Those that come first are told apart, besides those that the settings name. The rest count as
    one, as do blocks from before the server started (``before``).
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
        """The number of a tenant, or of all others together where too many came before it."""
        if name in RESERVED:  # what a request calls itself must not pass for one of those
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
        """By name, what was counted, and the slots in each tier now."""
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
