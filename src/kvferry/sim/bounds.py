"""The most hits that any policy could have: Belady's rule, with the right to refuse a block.

The value of a block depends on its next use. Blocks that the same request uses next form a group,
which loses its last blocks first. So the state is one number for each request: its kept blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.telemetry.traces import TraceRequest

Ints = npt.NDArray[np.int64]

_MOSTLY = 0.5
"""A request continues an earlier one if it has more than this share of that one's blocks."""


@dataclass(frozen=True, eq=False)
class Future:
    """The previous use of each block, in arrays of about 55 bytes for each block of the trace.

    ``starts`` has the first block of each request, and the end. ``before`` is the last earlier
    request with the same block, or -1. It never grows along a request.
    """

    starts: Ints
    before: npt.NDArray[np.int32]
    times: npt.NDArray[np.float64]

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], *, keep_partial: bool = False) -> Future:
        """Read every request once."""
        numbers, counts, times = [], [], []
        for request in requests:
            stored = len(request.numbers) if keep_partial else request.num_full
            numbers.append(request.numbers[:stored])
            counts.append(stored)
            times.append(request.at)
        starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        flat = np.concatenate([np.empty(0, dtype=np.uint64), *numbers])
        del numbers
        order = np.argsort(flat, kind="stable")
        same = flat[order[1:]] == flat[order[:-1]]
        del flat
        owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        before = np.full(len(owner), -1, dtype=np.int32)
        before[order[1:][same]] = owner[order[:-1][same]]
        return cls(starts, before, np.array(times))

    @property
    def num_requests(self) -> int:
        return len(self.times)

    def later_uses(self) -> tuple[Ints, Ints, Ints]:
        """The number of blocks of each request that a later one uses next.

        Returns:
            ``(starts, later, counts)``. The entries of request r are at ``starts[r]`` to
            ``starts[r + 1]``.
        """
        owner = np.repeat(np.arange(self.num_requests), np.diff(self.starts))
        known = np.flatnonzero(self.before >= 0)
        earlier, later = self.before[known].astype(np.int64), owner[known]
        # Along a request these lie in runs, because deeper blocks were never used later.
        edges = np.flatnonzero((np.diff(earlier) != 0) | (np.diff(later) != 0)) + 1
        firsts = np.concatenate(([0], edges)) if len(known) else edges
        counts = np.diff(np.concatenate((firsts, [len(known)])))
        earlier, later = earlier[firsts], later[firsts]
        order = np.lexsort((later, earlier))
        starts = np.searchsorted(earlier[order], np.arange(self.num_requests + 1))
        return starts, later[order], counts[order]

    def continuations(self) -> tuple[Ints, Ints]:
        """For each request, its conversation's number and the request that continues it, or -1.

        A request continues the last one with its deepest known block, if it has most of that one's
        blocks. Otherwise it begins a conversation.
        """
        conversation = np.arange(self.num_requests)
        continues = np.full(self.num_requests, -1, dtype=np.int64)
        starts = self.starts.tolist()
        for request in range(self.num_requests):
            first, end = starts[request], starts[request + 1]
            known = int(np.count_nonzero(self.before[first:end] >= 0))
            if not known:
                continue
            earlier = int(self.before[first + known - 1])
            size = starts[earlier + 1] - starts[earlier]
            if known > _MOSTLY * size:
                conversation[request] = conversation[earlier]
                if continues[earlier] < 0:
                    continues[earlier] = request
        return conversation, continues


def all_knowing(future: Future, capacity: int) -> npt.NDArray[np.int64]:
    """The number of leading blocks that each request finds."""
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
