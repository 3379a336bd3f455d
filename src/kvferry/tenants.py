"""Who shares a pool: tenants by name and number, what each may have, and what each was served.

However many come, few are told apart: those that the settings name, and a handful of others as they
come. The rest count as one, and share what one of them would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.tenant_shares import EVERYBODY_ELSE, TenantShare

MOST_OTHERS = 16
"""Tenants that no setting names and that are told apart all the same."""

NONE = "none"
OTHER = "other"


@dataclass
class TenantCounts:
    """What one tenant was counted for."""

    queries: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    slots: int = 0


class Tenants:
    """Owns the names, their numbers and their counts; the slots are the pools'.

    ``slots_of`` says how many slots a number has: one that has none may be given to another name.
    """

    def __init__(self, shares: Sequence[TenantShare], slots_of: Callable[[int], int]) -> None:
        default = next((each for each in shares if each.name == EVERYBODY_ELSE), TenantShare("*"))
        named = [each for each in shares if each.name != EVERYBODY_ELSE]
        rest = MOST_OTHERS + 1
        self.shares: list[float | None] = [None, *(t.share for t in named), *[default.share] * rest]
        ceilings = [t.ceiling for t in named]
        self.ceilings = [default.ceiling, *ceilings, *[default.ceiling] * MOST_OTHERS, 1.0]
        self._slots_of = slots_of
        self._names: list[str] = [NONE, *(t.name for t in named), *[""] * MOST_OTHERS, OTHER]
        self._numbers = {t.name: number for number, t in enumerate(named, 1)}
        self._first_other = len(named) + 1
        self._counts = [TenantCounts() for _ in self._names]
        self._used = [0] * len(self._names)
        self._num_asked = 0

    def number(self, name: str) -> int:
        """The number of a tenant; of all others together, where there is none left for it."""
        if not name:
            return 0
        self._num_asked += 1
        number = self._numbers.get(name)
        if number is None:
            number = self._give(name)
        self._used[number] = self._num_asked
        return number

    def _give(self, name: str) -> int:
        last = len(self._names) - 1
        others = range(self._first_other, last)
        free = [n for n in others if not self._names[n]]
        free = free or [n for n in others if not self._slots_of(n)]
        if not free:
            return last
        number = min(free, key=lambda n: self._used[n])
        before, counts = self._names[number], self._counts[number]
        if before:  # what it was counted for stays in the sum
            del self._numbers[before]
            for field in ("queries", "asked_tokens", "hit_tokens"):
                total = getattr(self._counts[last], field) + getattr(counts, field)
                setattr(self._counts[last], field, total)
        self._names[number], self._numbers[name] = name, number
        self._counts[number] = TenantCounts()
        return number

    def counts(self, number: int) -> TenantCounts:
        return self._counts[number]

    def snapshot(self) -> dict[str, TenantCounts]:
        """By name, what was counted, and the slots each has now."""
        found = {}
        for number, (name, counts) in enumerate(zip(self._names, self._counts, strict=True)):
            if name:
                found[name] = TenantCounts(
                    counts.queries, counts.asked_tokens, counts.hit_tokens, self._slots_of(number)
                )
        return found
