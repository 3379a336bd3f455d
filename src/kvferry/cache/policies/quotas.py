"""Quotas: the tenant furthest above its share loses blocks first, in the order of its own policy.

Every tenant has a policy to itself, so none loses its order to another's traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from heapq import heapify, heapreplace
from itertools import accumulate

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


class QuotaShares:
    """Each tenant's part of all slots. Owns the promised parts; callers name the tenants there.

    ``shares`` has the promised part of each, None for an even one, which is ``at_most`` as given.
    All parts together are never more than the whole, or no promise could be kept.
    """

    def __init__(self, shares: Sequence[float | None], at_most: Sequence[float]) -> None:
        self._promised = np.array([share or 0.0 for share in shares])
        self._at_most = np.array(at_most)
        self._is_even = np.array([share is None for share in shares])
        self._left_over = max(0.0, 1.0 - float(self._promised.sum()))
        self.promised_to = frozenset(np.flatnonzero(~self._is_even).tolist())
        """The tenants whose part is a promise."""

    def of_all(self, there: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """By tenant, its part of the whole while these are ``there``."""
        sharers = max(1, int(np.count_nonzero(there & self._is_even)))
        even = np.minimum(self._left_over / sharers, self._at_most)
        return np.where(self._is_even, even, self._promised)

    def in_slots(self, there: npt.NDArray[np.bool_], num_slots: int) -> npt.NDArray[np.float64]:
        """The same in slots: whole ones where they are promised."""
        slots = self.of_all(there) * num_slots
        return np.where(self._is_even, slots, np.floor(slots + _ROUNDING))


def given_up(
    count: int, above: Mapping[int, float], keeps: Collection[int]
) -> list[tuple[int, int]]:
    """How many of ``count`` each tenant gives up, one at a time from the one most above its part.

    ``above`` has how far each is above it. Tenants in ``keeps`` give up nothing of their parts, so
    fewer may be given up. Tenants that give up nothing are left out; the most above comes first.
    """
    if count <= 0:
        return []
    ranked = sorted(above, key=lambda tenant: (-above[tenant], tenant))
    surplus = [above[tenant] for tenant in ranked]
    if keeps and sum(extra for extra in surplus if extra > 0) < count:
        kept = {tenant: int(max(0.0, above[tenant])) for tenant in ranked if tenant in keeps}
        others = {tenant: above[tenant] for tenant in ranked if tenant not in kept}
        found = kept | dict(given_up(count - sum(kept.values()), others, ()))
        return [(tenant, found[tenant]) for tenant in ranked if found.get(tenant)]
    return [each for each in zip(ranked, _down_to_level(count, surplus), strict=True) if each[1]]


def _down_to_level(count: int, surplus: list[float]) -> list[int]:
    """How many each gives up, the highest first, until ``count`` are: they end about level.

    Whole ones that are surely above that level go at once, and only the last few one by one.
    """
    if not surplus:
        return []
    sums = accumulate(surplus)
    tier = max((so_far - count) / n for n, so_far in enumerate(sums, 1))
    gone = [max(0, int(extra - tier - _ROUNDING)) for extra in surplus]
    heap = [(-(extra - n), at) for at, (extra, n) in enumerate(zip(surplus, gone, strict=True))]
    heapify(heap)
    for _ in range(count - sum(gone)):
        left, at = heap[0]
        gone[at] += 1
        heapreplace(heap, (left + 1, at))
    return gone


_NO_TENANT = -1


class Quotas:
    """One policy for each tenant. Owns which tenant has each slot, and how many each has.

    Tenants are numbers, 0 and up; ``shares`` has a part of all slots for each, None for an even one
    of what those leave over, which is ``at_most`` as given. The tenant most above its part, what it
    stores counted in, loses first. Blocks within a share are lost to no other tenant; those within
    an even part only where nothing else can go.
    """

    def __init__(
        self,
        make: EvictionPolicyMaker,
        residents: Residents,
        shares: Sequence[float | None],
        at_most: Sequence[float] | None = None,
    ) -> None:
        self._make = make
        self._residents = residents
        self._shares = QuotaShares(shares, [1.0] * len(shares) if at_most is None else at_most)
        first = make(residents)
        self.wants_chains = first.wants_chains
        self._inner: dict[int, EvictionPolicy] = {}
        self._hearers: list[HearsRequests] = []
        self._add(0, first)
        self._owner = np.full(residents.num_slots, _NO_TENANT, dtype=np.int16)
        self.owned = np.zeros(len(shares), dtype=np.int64)
        """By tenant, the slots that are its own, whatever becomes of them."""
        self.evicted = np.zeros(len(shares), dtype=np.int64)
        """By tenant, the blocks that made room for others."""
        self.pinned = np.zeros(len(shares), dtype=np.int64)
        """By tenant, the pinned slots; eviction counts them."""
        self._comer, self._coming = _NO_TENANT, 0
        self._num_slots = residents.num_slots
        # A policy hears by having these; ours does where theirs do.
        if isinstance(first, HearsHints):
            self.hint = self._tell_hint
        if isinstance(first, HearsRequests):
            self.asked = self._tell_asked

    # -- ownership ------------------------------------------------------------------------------

    def own(self, slots: SlotArray, tenant: int) -> None:
        """These slots were given to a tenant."""
        self._owner[slots] = tenant
        self.owned[tenant] += len(slots)
        self._comer, self._coming = _NO_TENANT, 0

    def expect(self, tenant: int, count: int, num_slots: int) -> None:
        """Room is made for so many blocks of a tenant, in a pool with so many slots as yet.

        They count as its own already, or it would store at the cost of those that keep to theirs.
        """
        self._comer, self._coming = tenant, count
        self._num_slots = num_slots

    def left(self, slots: SlotArray) -> None:
        """These slots are free."""
        owners = self._owner.take(slots)
        # The owner stays noted: the policy is told later that the block left.
        self.owned -= np.bincount(owners[owners >= 0], minlength=len(self.owned))

    def owner_of(self, slots: SlotArray) -> npt.NDArray[np.int16]:
        return self._owner.take(slots)

    def went(self, slots: SlotArray) -> None:
        """The blocks of these slots made room."""
        owners = self._owner.take(slots)
        self.evicted += np.bincount(owners[owners >= 0], minlength=len(self.evicted))

    def count_pinned(self, slots: SlotArray, sign: int) -> None:
        """These are held from now on, or (-1) no more."""
        owners = self._owner.take(slots)
        self.pinned += sign * np.bincount(owners[owners >= 0], minlength=len(self.pinned))

    def part_of(self, tenant: int) -> float:
        """Which part of all is a tenant's: its share, or an even one of what shares leave over."""
        return float(self._shares.of_all(self._there())[tenant])

    def _there(self) -> npt.NDArray[np.bool_]:
        """By tenant, whether it has blocks or is about to."""
        there = self.owned > 0
        if self._comer != _NO_TENANT:
            there[self._comer] = True
        return there

    def _above(self) -> dict[int, float]:
        """By how many each tenant that has blocks is above its part, most of them below it."""
        counts = self.owned.copy()
        if self._comer != _NO_TENANT:
            counts[self._comer] += self._coming
        above = (counts - self._shares.in_slots(self._there(), self._num_slots)).tolist()
        return {t: above[t] for t in self._inner if self.owned[t] > 0}

    # -- what every policy does -----------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        for policy, part in self._parts(slots):
            policy.insert(part)

    def use(self, slots: SlotArray) -> None:
        for policy, part in self._parts(slots):
            policy.use(part)

    def keep(self, slots: SlotArray) -> None:
        for policy, part in self._parts(slots):
            policy.keep(part)

    def put_back(self, slots: SlotArray) -> None:
        for policy, part in self._parts(slots):
            policy.put_back(part)

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        return self.room(count, lambda policy, wanted: policy.take(wanted, arriving))

    def room(self, count: int, find: Callable[[EvictionPolicy, int], SlotArray]) -> SlotArray:
        """Up to ``count`` slots, each tenant's found by its own policy.

        What is found has to go: more of them, some to be put back, would cost tenants more blocks
        than they owe.
        """
        keeps = set(self._shares.promised_to - {self._comer})

        def give(tenant: int, wanted: int) -> SlotArray:
            found = find(self._inner[tenant], wanted)
            if len(found) < wanted and self._refuses(tenant, wanted):
                keeps.update(self._inner.keys() - {self._comer})
            return found

        return self._collect(count, keeps, give)

    def _refuses(self, tenant: int, wanted: int) -> bool:
        """Whether a tenant's policy gave up too few of what could go.

        It rather keeps those than what comes. If tenants within their parts were asked instead, one
        whose blocks have a high value would take more and more from all others.
        """
        return any(map(self._residents.can_go, self._inner[tenant].peek(wanted).tolist()))

    def peek(self, count: int) -> SlotArray:
        seen = dict.fromkeys(self._inner, 0)

        def give(tenant: int, wanted: int) -> SlotArray:
            found = self._inner[tenant].peek(seen[tenant] + wanted)[seen[tenant] :]
            seen[tenant] += len(found)
            return found

        return self._collect(count, frozenset(), give)

    def _collect(
        self, count: int, keeps: Set[int], give: Callable[[int, int], SlotArray]
    ) -> SlotArray:
        """Up to ``count`` slots of tenants most above their parts; ``keeps`` as in `given_up`."""
        above = self._above()
        found: list[SlotArray] = []
        while wanted := given_up(count, above, keeps):
            for tenant, number in wanted:
                came = give(tenant, number)
                found.append(came)
                count -= len(came)
                above[tenant] -= len(came)
                if len(came) < number:  # it has no more, or refuses: the others' parts change
                    del above[tenant]
                    break
        return found[0] if len(found) == 1 else np.concatenate((NO_SLOTS, *found))

    def of(self, tenant: int) -> EvictionPolicy:
        """The policy of one tenant."""
        return self._policy(tenant)

    def peek_of(self, tenant: int, count: int) -> SlotArray:
        """The same of one tenant's."""
        return self._inner[tenant].peek(count) if tenant in self._inner else NO_SLOTS

    def holds(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        held = np.zeros(len(slots), dtype=bool)
        for policy in self._inner.values():
            held |= policy.holds(slots)
        return held

    def discard(self, slots: SlotArray) -> None:
        for policy, part in self._parts(slots):
            policy.discard(part)

    def clear(self) -> None:
        for policy in self._inner.values():
            policy.clear()

    # -- what some hear -------------------------------------------------------------------------

    def _tell_hint(self, keys: Keys, evidence: Evidence) -> None:
        for policy in self._inner.values():
            if isinstance(policy, HearsHints):
                policy.hint(keys, evidence)

    def _tell_asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        for policy in self._hearers:
            policy.asked(keys, num_tokens, slots)

    # -- the parts ------------------------------------------------------------------------------

    def _parts(self, slots: SlotArray) -> Iterator[tuple[EvictionPolicy, SlotArray]]:
        """These slots by tenant, each with that tenant's policy."""
        if not len(slots):
            return
        owners = self._owner.take(slots)
        first = int(owners[0])
        if not np.count_nonzero(owners != first):
            yield self._policy(first), slots
            return
        for tenant in np.unique(owners).tolist():
            yield self._policy(tenant), slots[owners == tenant]

    def _policy(self, tenant: int) -> EvictionPolicy:
        tenant = max(0, tenant)  # blocks from before the division have no tenant
        policy = self._inner.get(tenant)
        if policy is None:
            policy = self._add(tenant, self._make(self._residents))
        return policy

    def _add(self, tenant: int, policy: EvictionPolicy) -> EvictionPolicy:
        self._inner[tenant] = policy
        if isinstance(policy, HearsRequests):  # asked once: it costs more than some tellings
            self._hearers.append(policy)
        return policy
