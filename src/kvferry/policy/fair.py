"""Whose blocks go: the tenant's that has most above its share; which of them, a policy of its own.

Every tenant has a policy to itself, so none loses its order to another's traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.policy.eviction import (
    Arriving,
    EvictionPolicy,
    EvictionPolicyMaker,
    Evidence,
    HearsHints,
    HearsRequests,
    Residents,
)
from kvferry.types import NO_SLOTS, SlotArray

_NOBODY = -1


class Fair:
    """One policy for each tenant. Owns whose each slot is, and how many each has.

    Tenants are numbers, 0 and up; ``shares`` has a part of all slots for each, None for an even one
    among those that have blocks. The largest count for its share loses first.
    """

    def __init__(
        self,
        make: EvictionPolicyMaker,
        residents: Residents,
        shares: Sequence[float | None],
    ) -> None:
        self._make = make
        self._residents = residents
        self._shares = shares
        first = make(residents)
        self.wants_chains = first.wants_chains
        self._inner: dict[int, EvictionPolicy] = {0: first}
        self._owner = np.full(residents.num_slots, _NOBODY, dtype=np.int16)
        self.owned = np.zeros(len(shares), dtype=np.int64)
        """By tenant, the slots that are its own, whatever becomes of them."""
        self.evicted = np.zeros(len(shares), dtype=np.int64)
        """By tenant, the blocks that made room for others."""
        self.held = np.zeros(len(shares), dtype=np.int64)
        """By tenant, the slots that somebody asked to stay; the pool counts them."""
        self.only: int | None = None
        """Whose alone may go, where somebody must make room for itself."""
        self._asked: Arriving | None = None
        self._taken = np.zeros(len(shares), dtype=np.int64)  # for the room that is being made
        # A policy hears by having these; ours does where theirs do.
        if isinstance(first, HearsHints):
            self.hint = self._hint
        if isinstance(first, HearsRequests):
            self.asked, self.answered = self._tell_asked, self._tell_answered

    # -- whose ----------------------------------------------------------------------------------

    def own(self, slots: SlotArray, tenant: int) -> None:
        """These slots were given to a tenant."""
        self._owner[slots] = tenant
        self.owned[tenant] += len(slots)

    def left(self, slots: SlotArray) -> None:
        """These slots are free."""
        self._give_back(slots)
        owners = self._owner.take(slots)
        self.owned -= np.bincount(owners[owners >= 0], minlength=len(self.owned))
        self._owner[slots] = _NOBODY

    def owner_of(self, slots: SlotArray) -> npt.NDArray[np.int16]:
        return self._owner.take(slots)

    def went(self, slots: SlotArray) -> None:
        """The blocks of these slots made room."""
        owners = self._owner.take(slots)
        self.evicted += np.bincount(owners[owners >= 0], minlength=len(self.evicted))

    def count_held(self, slots: SlotArray, sign: int) -> None:
        """These are held from now on, or (-1) no more."""
        owners = self._owner.take(slots)
        self.held += sign * np.bincount(owners[owners >= 0], minlength=len(self.held))

    def part_of(self, tenant: int) -> float:
        """Which part of all is a tenant's: its share, or an even one among those with blocks."""
        share = self._shares[tenant]
        if share is not None:
            return share
        return 1.0 / max(1, int(np.count_nonzero(self.owned > 0)))

    def ranked(self) -> list[int]:
        """The tenants that have blocks, most above its share first."""
        counts = self.owned - self._taken
        there = np.flatnonzero(counts > 0).tolist()
        even = 1.0 / max(1, len(there))
        shares = [self._shares[t] for t in there]
        parts = [even if share is None else max(share, 1e-9) for share in shares]
        ratios = {t: counts[t] / part for t, part in zip(there, parts, strict=True)}
        return sorted(there, key=lambda t: (-ratios[t], t))

    # -- what every policy does -----------------------------------------------------------------

    def insert(self, slots: SlotArray) -> None:
        self._give_back(slots)
        for policy, part in self._parts(slots):
            policy.insert(part)

    def use(self, slots: SlotArray) -> None:
        self._give_back(slots)
        for policy, part in self._parts(slots):
            policy.use(part)

    def keep(self, slots: SlotArray) -> None:
        self._give_back(slots)
        for policy, part in self._parts(slots):
            policy.keep(part)

    def put_back(self, slots: SlotArray) -> None:
        self._give_back(slots)
        for policy, part in self._parts(slots):
            policy.put_back(part)

    def take(self, count: int, arriving: Arriving) -> SlotArray:
        if arriving is not self._asked:
            self._asked = arriving
            self._taken[:] = 0
        for tenant in self.ranked() if self.only is None else (self.only,):
            policy = self._inner.get(tenant)
            if policy is not None:
                most = count if self.only is not None else min(count, self._surplus(tenant))
                taken = policy.take(most, arriving)
                if len(taken):
                    self._taken[tenant] += len(taken)
                    return taken
        return NO_SLOTS

    def _surplus(self, tenant: int) -> int:
        """How many a tenant may lose before another has more above its share: at least one."""
        counts = self.owned - self._taken
        others = [t for t in np.flatnonzero(counts > 0).tolist() if t != tenant]
        if not others:
            return int(counts[tenant])
        even = 1.0 / (len(others) + 1)

        def part(t: int) -> float:
            share = self._shares[t]
            return even if share is None else max(share, 1e-9)

        next_ratio = max(counts[t] / part(t) for t in others)
        return max(1, int(counts[tenant] - next_ratio * part(tenant)))

    def _give_back(self, slots: SlotArray) -> None:
        """They were taken, perhaps, and are here again."""
        owners = self._owner.take(slots)
        back = np.bincount(owners[owners >= 0], minlength=len(self.owned))
        self._taken = np.maximum(0, self._taken - back)

    def peek(self, count: int) -> SlotArray:
        found = []
        for tenant in self.ranked():
            if count > 0 and tenant in self._inner:
                found.append(self._inner[tenant].peek(count))
                count -= len(found[-1])
        return np.concatenate((NO_SLOTS, *found))

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

    def _hint(self, slots: SlotArray, evidence: Evidence) -> None:
        for policy, part in self._parts(slots):
            if isinstance(policy, HearsHints):
                policy.hint(part, evidence)

    def _tell_asked(self, keys: Keys, num_tokens: int, slots: SlotArray) -> None:
        for policy in self._inner.values():
            if isinstance(policy, HearsRequests):
                policy.asked(keys, num_tokens, slots[policy.holds(slots)])

    def _tell_answered(self, keys: Keys, num_tokens: int) -> None:
        for policy in self._inner.values():
            if isinstance(policy, HearsRequests):
                policy.answered(keys, num_tokens)

    # -- the parts ------------------------------------------------------------------------------

    def _parts(self, slots: SlotArray) -> Iterator[tuple[EvictionPolicy, SlotArray]]:
        """These slots by whose they are, each with that tenant's policy."""
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
        tenant = max(0, tenant)  # what was here before tenants were is nobody's
        policy = self._inner.get(tenant)
        if policy is None:
            policy = self._inner[tenant] = self._make(self._residents)
        return policy
