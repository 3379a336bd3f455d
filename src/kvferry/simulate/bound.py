"""The most that any policy could hit, knowing the future: Belady's rule, with the right to refuse.

A block is worth keeping by when it is used next. All blocks that are next used by the same request
are one group: which of them stay is up to their order in that request, the end goes first. So what
is kept for a request is a beginning of it, and how many blocks is all that need be known.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from kvferry.simulate.future import Future


def all_knowing(future: Future, capacity: int) -> npt.NDArray[np.int64]:
    """For each request, how many of its leading blocks were there."""
    starts, later, counts = (each.tolist() for each in future.later_uses())
    kept = [0] * future.num_requests
    hits = np.zeros(future.num_requests, dtype=np.int64)
    farthest: list[int] = []  # negated requests that blocks are kept for; some more than once
    used = 0
    for request in range(future.num_requests):
        hits[request] = kept[request]
        used -= kept[request]
        kept[request] = 0
        for at in range(starts[request], starts[request + 1]):
            if not kept[later[at]]:
                heapq.heappush(farthest, -later[at])
            kept[later[at]] += counts[at]
            used += counts[at]
        while used > capacity:
            last = -farthest[0]
            going = min(kept[last], used - capacity)
            kept[last] -= going
            used -= going
            if not kept[last]:
                heapq.heappop(farthest)
    return hits
