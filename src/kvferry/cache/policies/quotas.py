"""Quotas: the tenant furthest above its part of a pool gives up blocks first.

Every tenant has its own eviction policy, so a busy tenant does not evict a quiet one's blocks.
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
"""Slots added before rounding down: 29% of 100 slots is 29, not the 28.999... of floats."""

_NO_TENANT = -1


class Quotas:
    """The eviction policy of a pool that tenants share. Owns the tenant of each slot.

    A tenant's part of the pool is its share, or an even part of what all shares leave over. While
    a tenant stores, tenants above their parts give up blocks, the one furthest above first; blocks
    being stored count too. Another tenant's store never evicts blocks within a share, and evicts
    blocks within an even part only if nothing else can be evicted.
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
        """Per tenant: slots it owns, its blocks evicted so far, and its pinned slots."""
        self._newcomer, self._coming = _NO_TENANT, 0
        self._num_slots = residents.num_slots
        # The pool tests for these methods; define them only if the tenants' policies have them.
        if isinstance(first, HearsHints):
            self.hint = self._tell_hint
        if isinstance(first, HearsRequests):
            self.asked = self._tell_asked

    # -- ownership ------------------------------------------------------------------------------

    def own(self, slots: SlotArray, tenant: int) -> None:
        """Note that these slots were given to a tenant."""
        self._owner[slots] = tenant
        self.owned[tenant] += len(slots)
        self._newcomer = _NO_TENANT

    def expect(self, tenant: int, count: int, num_slots: int) -> None:
        """Prepare to make room for ``count`` blocks of a tenant, in a pool of ``num_slots``."""
        self._newcomer, self._coming = tenant, count
        self._num_slots = num_slots

    def left(self, slots: SlotArray) -> None:
        """Note that these slots are free."""
        # The owner stays recorded: the policy learns later that the block left.
        self.owned -= self._by_tenant(slots)

    def went(self, slots: SlotArray) -> None:
        """Count the blocks of these slots as evicted."""
        self.evicted += self._by_tenant(slots)

    def count_pinned(self, slots: SlotArray, sign: int) -> None:
        """Add these slots to their tenants' pinned slots (``sign`` 1), or subtract them (-1)."""
        self.pinned += sign * self._by_tenant(slots)

    def _by_tenant(self, slots: SlotArray) -> npt.NDArray[np.int64]:
        return np.bincount(self._owner.take(slots), minlength=len(self.owned))

    def owner_of(self, slots: SlotArray) -> npt.NDArray[np.int16]:
        return self._owner.take(slots)

    def parts(self) -> npt.NDArray[np.float64]:
        """Return each tenant's part in slots; a part from a share is rounded down."""
        is_here = self.owned > 0
        if self._newcomer != _NO_TENANT:
            is_here[self._newcomer] = True
        num_even = max(1, int(np.count_nonzero(is_here & self._is_even)))
        even = max(0.0, 1.0 - float(self._shares.sum())) * self._num_slots / num_even
        return np.where(self._is_even, even, np.floor(self._shares * self._num_slots + _ROUNDING))

    def most_pinned(self, tenant: int, most: int) -> int:
        """Return how many slots a tenant may pin of the ``most`` that all tenants may pin."""
        return max(1, int(most * self.parts()[tenant] / self._num_slots))

    # -- which tenant makes room ----------------------------------------------------------------

    def room(self, count: int, find: Callable[[EvictionPolicy, int], SlotArray]) -> SlotArray:
        """Return up to ``count`` slots to evict; ``find`` gets them from each tenant's policy."""
        refused = False

        def give(tenant: int, wanted: int) -> SlotArray:
            nonlocal refused
            found = find(self._inner[tenant], wanted)
            refused |= len(found) < wanted and self._refuses(tenant, wanted)
            return found

        above = self._above()
        found = self._collect(above, count, give)
        # A policy refuses newcomers of less value than its blocks. If tenants within even parts
        # gave up blocks instead, a tenant with valuable blocks would take more and more from all.
        givers = [t for t in above if t == self._newcomer or (self._is_even[t] and not refused)]
        within = {tenant: above[tenant] + self._num_slots for tenant in givers}
        return np.concatenate((found, self._collect(within, count - len(found), give)))

    def _refuses(self, tenant: int, wanted: int) -> bool:
        """Whether a tenant's policy holds back blocks that could be evicted."""
        return any(map(self._residents.can_go, self._inner[tenant].peek(wanted).tolist()))

    def _collect(
        self, above: dict[int, float], count: int, give: Callable[[int, int], SlotArray]
    ) -> SlotArray:
        """Return up to ``count`` slots of the tenants in ``above``, the furthest above first."""
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
        """Return, for each tenant with blocks, by how many slots it is above its part."""
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
        """Yield the slots of each tenant among these, with that tenant's policy."""
        owners = self._owner.take(slots)
        for tenant in np.unique(owners).tolist():
            if tenant not in self._inner:
                self._inner[tenant] = self._make(self._residents)
            yield self._inner[tenant], slots[owners == tenant]


def next_to_give(above: Mapping[int, float], count: int) -> tuple[int, int] | None:
    """Return the tenant that makes room next, and how many of ``count`` blocks it gives up now.

    ``above`` says how many slots each tenant is above its part. None if all are within their parts.
    """
    ranked = sorted((extra, -tenant) for tenant, extra in above.items() if extra > _ROUNDING)
    if not ranked or count <= 0:
        return None
    most, tenant = ranked[-1]
    lead = most - ranked[-2][0] if len(ranked) > 1 else most
    # Where several tenants are equally far above, giving up one block at a time would be slow.
    number = max(1, int(lead), count // (2 * len(ranked)))
    return -tenant, min(number, count, ceil(most - _ROUNDING))
