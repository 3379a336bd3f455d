"""Which part of a pool is whose, and who gives up how many: most above its part goes first.

::

    promised    what a setting names for a tenant, whether or not it has blocks
    even        what all the promised leave over, divided among the others that have blocks
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

_ROUNDING = 1e-6
"""29% of 100 slots are 29, and not the 28.999... that floats make of it."""


class TenantParts:
    """Each tenant's part of all slots. Owns the promised ones; who is there it is told.

    ``shares`` has the promised part of each, None for an even one, which is ``at_most`` as given.
    All parts together are never more than the whole, however many come: else nobody's is kept.
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
    """Who gives up how many of ``count``, one at a time from whoever is most above its part then.

    ``above`` says of each by how many it is; those that ``keeps`` names give up nothing of their
    parts, so fewer may be given up. Whoever gives up nothing is left out; most above comes first.
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

    Whole ones that are surely above the level go at once, and only the last few one by one.
    """
    if not surplus:
        return []
    sums = accumulate(surplus)
    level = max((so_far - count) / n for n, so_far in enumerate(sums, 1))
    gone = [max(0, int(extra - level - _ROUNDING)) for extra in surplus]
    heap = [(-(extra - n), at) for at, (extra, n) in enumerate(zip(surplus, gone, strict=True))]
    heapify(heap)
    for _ in range(count - sum(gone)):
        left, at = heap[0]
        gone[at] += 1
        heapreplace(heap, (left + 1, at))
    return gone
