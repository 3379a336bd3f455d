"""Who shares the pools: tenants by name and number, what each may have, what each was served.

However many come, few are told apart: those that the settings name, and a handful of others as they
come. The rest count as one, and share what one of them would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.cache.eviction import Eviction
from kvferry.cache.slots import TenantCounts
from kvferry.settings.eviction import BEFORE, EVERYBODY_ELSE, NONE, OTHER, RESERVED, TenantShare

MOST_OTHERS = 16
"""Tenants that no setting names and that are told apart all the same, at a time."""

MOST_SHOWN = 64
"""So many of them are ever counted by name: requests choose names freely, and what collects the
counts keeps every name for good. Those that come later count as other."""


class Tenants:
    """Owns the names, their numbers and their counts; the slots are the pools', by tier.

    A number without a slot in any of them may be given to another name. What an earlier life left
    on a tier belongs to none of them: all of it counts as one more tenant (``before``).
    """

    def __init__(self, shares: Sequence[TenantShare], pools: Mapping[str, Eviction]) -> None:
        default = next((each for each in shares if each.name == EVERYBODY_ELSE), TenantShare("*"))
        named = [each for each in shares if each.name != EVERYBODY_ELSE]
        rest = MOST_OTHERS + 1
        self.shares: list[float | None] = [None, *(t.share for t in named)]
        self.shares += [None] * (rest + 1)
        # A default share bounds an even part: names that are made up get no more by it.
        most = 1.0 if default.share is None else default.share
        self.at_most = [most, *[1.0] * len(named), *[most] * rest, 1.0]
        self.ceilings = [default.ceiling, *(t.ceiling for t in named)]
        self.ceilings += [*[default.ceiling] * MOST_OTHERS, 1.0, 1.0]
        self._pools = pools
        self._names: list[str] = [NONE, *(t.name for t in named), *[""] * MOST_OTHERS, OTHER]
        self._names.append(BEFORE)
        self.before = len(self._names) - 1
        """The number of what was there before this life."""
        self._other = self.before - 1
        self._numbers = {t.name: number for number, t in enumerate(named, 1)}
        self._first_other = len(named) + 1
        self._counts = [TenantCounts() for _ in self._names]
        self._used = [0] * len(self._names)
        self._num_asked = 0
        self._shown = dict.fromkeys([NONE, *self._numbers, OTHER, BEFORE])
        self._most_shown = len(self._shown) + MOST_SHOWN

    def number(self, name: str) -> int:
        """The number of a tenant; of all others together, where there is none left for it."""
        if not name:
            return 0
        self._num_asked += 1
        if name in RESERVED:  # a request's own name must not pass for one of those
            name = f"tenant-{name}"
        number = self._numbers.get(name)
        if number is None:
            number = self._give(name)
        self._used[number] = self._num_asked
        return number

    def _give(self, name: str) -> int:
        others = range(self._first_other, self._other)
        free = [n for n in others if not self._names[n]]
        free = free or [n for n in others if not self._num_slots(n)]
        if not free:
            return self._other
        number = min(free, key=lambda n: self._used[n])
        before, counts = self._names[number], self._counts[number]
        if before:  # what it was counted for stays in the sum
            del self._numbers[before]
            for what in ("queries", "asked_tokens", "hit_tokens"):
                total = getattr(self._counts[self._other], what) + getattr(counts, what)
                setattr(self._counts[self._other], what, total)
            for pool in self._pools.values():
                pool.pass_on_tenant(number, self._other)
        self._names[number], self._numbers[name] = name, number
        self._counts[number] = TenantCounts()
        if len(self._shown) < self._most_shown:
            self._shown[name] = None
        return number

    def _num_slots(self, number: int) -> int:
        return sum(pool.slots_of_tenant(number) for pool in self._pools.values())

    def counts(self, number: int) -> TenantCounts:
        return self._counts[number]

    def snapshot(self) -> dict[str, TenantCounts]:
        """By name, what was counted, and the slots each has now; of names that went, nothing."""
        empty = dict.fromkeys(self._pools, 0)
        found = {name: TenantCounts(slots=empty, evicted=empty) for name in self._shown}
        for number, (name, counts) in enumerate(zip(self._names, self._counts, strict=True)):
            if not name:
                continue
            shown = name if name in found else OTHER
            so_far = found[shown]
            found[shown] = TenantCounts(
                so_far.queries + counts.queries,
                so_far.asked_tokens + counts.asked_tokens,
                so_far.hit_tokens + counts.hit_tokens,
                {
                    tier: so_far.slots[tier] + pool.slots_of_tenant(number)
                    for tier, pool in self._pools.items()
                },
                {
                    tier: so_far.evicted[tier] + pool.evicted_of_tenant(number)
                    for tier, pool in self._pools.items()
                },
            )
        before = found[BEFORE]
        if not any((*before.slots.values(), *before.evicted.values())):
            del found[BEFORE]
        return found
