"""Quotas: the tenant furthest above its part of a pool makes room first.

Every tenant has a policy to itself, so a busy tenant does not evict the blocks of a quiet one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies.contract import (
    Arriving,
    EvictionPolicy,
    EvictionPolicyMaker,
    Evidence,
    HearsHints,
    HearsRequests,
    Residents,
)
from kvferry.core.keys import Keys
from kvferry.types import NO_SLOTS, SlotArray

_ROUNDING = 1e-6
"""29% of 100 slots are 29, and not the 28.999... that floats make of it."""

_NO_TENANT = -1


class Quotas:
    """The eviction policy of a pool that tenants share. Owns which tenant has each slot.

    A tenant's part of the pool is its share, or an even part of what all shares leave over. While
    a tenant stores, the tenants above their parts make room, the one furthest above first; what is
    being stored is counted in. Blocks within a share are lost to no other tenant; those within an
    even part only where nothing else can go.
    """

    def __init__(
        self, make: EvictionPolicyMaker, residents: Residents, shares: Sequence[float | None]
    ) -> None:
        self._make = make
        self._residents = residents
        self._is_even = np.array([share is None for share in shares])
        self._shares = np.array([share or 0.0 for share in shares])
        first = make(residents)
        self._inner: dict[int, EvictionPolicy] = {0: first}
        self._owner = np.zeros(residents.num_slots, dtype=np.int16)
        self.owned, self.evicted, self.pinned = np.zeros((3, len(shares)), dtype=np.int64)
        """By tenant: its slots, its blocks that were evicted so far, and its pinned slots."""
        self._newcomer, self._coming = _NO_TENANT, 0
        self._num_slots = residents.num_slots
        # A policy hears by having these methods; this one has them where the tenants' have.
        if isinstance(first, HearsHints):
            self.hint = self._tell_hint
        if isinstance(first, HearsRequests):
            self.asked = self._tell_asked

    # -- ownership ------------------------------------------------------------------------------

    def own(self, slots: SlotArray, tenant: int) -> None:
        """These slots were given to a tenant."""
        self._owner[slots] = tenant
        self.owned[tenant] += len(slots)
        self._newcomer = _NO_TENANT

    def expect(self, tenant: int, count: int, num_slots: int) -> None:
        """Room is made for so many blocks of a tenant, in a pool with so many slots by now."""
        self._newcomer, self._coming = tenant, count
        self._num_slots = num_slots

    def left(self, slots: SlotArray) -> None:
        """These slots are free."""
        # The owner stays noted: the policy is told later that the block left.
        self.owned -= self._by_tenant(slots)

    def went(self, slots: SlotArray) -> None:
        """The blocks of these slots were evicted."""
        self.evicted += self._by_tenant(slots)

    def count_pinned(self, slots: SlotArray, sign: int) -> None:
        """These slots are pinned from now on, or (-1) no more."""
        self.pinned += sign * self._by_tenant(slots)

    def _by_tenant(self, slots: SlotArray) -> npt.NDArray[np.int64]:
        return np.bincount(self._owner.take(slots), minlength=len(self.owned))

    def owner_of(self, slots: SlotArray) -> npt.NDArray[np.int16]:
        return self._owner.take(slots)

    def parts(self) -> npt.NDArray[np.float64]:
        """The part of each tenant, in slots: whole slots where the settings name a share."""
        is_here = self.owned > 0
        if self._newcomer != _NO_TENANT:
            is_here[self._newcomer] = True
        num_even = max(1, int(np.count_nonzero(is_here & self._is_even)))
        even = max(0.0, 1.0 - float(self._shares.sum())) * self._num_slots / num_even
        return np.where(self._is_even, even, np.floor(self._shares * self._num_slots + _ROUNDING))

    def most_pinned(self, tenant: int, most: int) -> int:
        """How many slots a tenant may pin of the ``most`` that all tenants may pin."""
        return max(1, int(most * self.parts()[tenant] / self._num_slots))

    # -- which tenant makes room ----------------------------------------------------------------

    def room(self, count: int, find: Callable[[EvictionPolicy, int], SlotArray]) -> SlotArray:
        """Up to ``count`` slots, each tenant's found by its own policy; all of them must go."""
        refused = False

        def give(tenant: int, wanted: int) -> SlotArray:
            nonlocal refused
            found = find(self._inner[tenant], wanted)
            refused |= len(found) < wanted and self._refuses(tenant, wanted)
            return found

        above = self._above()
        found = self._collect(above, count, give)
        # If those within even parts made room for what another tenant's policy refused to make
        # room for, a tenant whose blocks have a high value would take more and more from all.
        givers = [t for t in above if t == self._newcomer or (self._is_even[t] and not refused)]
        within = {tenant: above[tenant] + self._num_slots for tenant in givers}
        return np.concatenate((found, self._collect(within, count - len(found), give)))

    def _refuses(self, tenant: int, wanted: int) -> bool:
        """Whether a tenant's policy gave up too few of the blocks that could go."""
        return any(map(self._residents.can_go, self._inner[tenant].peek(wanted).tolist()))

    def _collect(
        self, above: dict[int, float], count: int, give: Callable[[int, int], SlotArray]
    ) -> SlotArray:
        """Up to ``count`` slots of the tenants that are ``above``, the one furthest above first."""
        found = [NO_SLOTS]
        while (turn := next_to_give(above, count)) is not None:
            tenant, number = turn
            found.append(give(tenant, number))
            count -= len(found[-1])
            above[tenant] -= len(found[-1])
            if len(found[-1]) < number:
                del above[tenant]
        return np.concatenate(found)

    def _above(self) -> dict[int, float]:
        """How far each tenant with blocks is above its part."""
        above = self.owned - self.parts()
        if self._newcomer != _NO_TENANT:
            above[self._newcomer] += self._coming
        return {tenant: above.item(tenant) for tenant in self._inner if self.owned[tenant] > 0}

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        return self.room(count, lambda policy, wanted: policy.take(wanted, arriving))

    def peek(self, count: int) -> SlotArray:
        left = {tenant: policy.peek(count) for tenant, policy in self._inner.items()}

        def give(tenant: int, wanted: int) -> SlotArray:
            found, left[tenant] = np.split(left[tenant], [wanted])
            return found

        every = {tenant: extra + self._num_slots for tenant, extra in self._above().items()}
        return self._collect(every, count, give)

    # -- what every policy does -----------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        for policy, part in self._divided(slots):
            policy.insert(part)

    def use(self, slots: SlotArray) -> None:
        for policy, part in self._divided(slots):
            policy.use(part)

    def keep(self, slots: SlotArray) -> None:
        for policy, part in self._divided(slots):
            policy.keep(part)

    def put_back(self, slots: SlotArray) -> None:
        for policy, part in self._divided(slots):
            policy.put_back(part)

    def discard(self, slots: SlotArray) -> None:
        for policy, part in self._divided(slots):
            policy.discard(part)

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        return np.logical_or.reduce([policy.holds(slots) for policy in self._inner.values()])

    def clear(self) -> None:
        for policy in self._inner.values():
            policy.clear()

    def _tell_hint(self, keys: Keys, evidence: Evidence) -> None:
        for policy in self._inner.values():
            assert isinstance(policy, HearsHints)
            policy.hint(keys, evidence)

    def _tell_asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        for policy in self._inner.values():
            assert isinstance(policy, HearsRequests)
            policy.asked(keys, num_tokens, slots)

    def _divided(self, slots: SlotArray) -> Iterator[tuple[EvictionPolicy, SlotArray]]:
        """These slots by tenant, each with that tenant's policy."""
        owners = self._owner.take(slots)
        for tenant in np.unique(owners).tolist():
            if tenant not in self._inner:
                self._inner[tenant] = self._make(self._residents)
            yield self._inner[tenant], slots[owners == tenant]


def next_to_give(above: Mapping[int, float], count: int) -> tuple[int, int] | None:
    """The tenant that makes room next, and how many of ``count`` blocks it gives up before others.

    ``above`` says how far each tenant is above its part. None where all are within their parts.
    """
    ranked = sorted((extra, -tenant) for tenant, extra in above.items() if extra > _ROUNDING)
    if not ranked or count <= 0:
        return None
    most, tenant = ranked[-1]
    lead = most - ranked[-2][0] if len(ranked) > 1 else most
    # Where several are equally far above, one turn for each block would be slow.
    number = max(1, int(lead), count // (2 * len(ranked)))
    return -tenant, min(number, count, ceil(most - _ROUNDING))
