"""The models and sizes that the scheduler's tests serve."""

from __future__ import annotations

from kvferry.cache import reach
from kvferry.cache.reach import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from kvferry.scheduler.tier import WriteMode

GROUPS: dict[str, tuple[reach.Group, ...]] = {
    "full": (FullAttention(4),),
    "full+window": (FullAttention(4), SlidingWindow(4, window=6)),
    "large-blocks": (FullAttention(8),),
    "mixed-blocks": (FullAttention(4), SlidingWindow(8, window=9)),
    "full+state": (FullAttention(4), RecurrentState(4)),
    "full+chunks": (FullAttention(4), ChunkedLocal(4, chunk=8)),
    "chunks": (ChunkedLocal(4, chunk=8),),
    "window": (SlidingWindow(4, window=7),),
}

PROMPTS = (
    (1, 2, 3, 4, 5, 6),
    (1, 2, 3, 7, 8, 9),
    (1, 2, 10),
    (11, 12, 13, 14),
)

TIERS: dict[str, tuple[tuple[str, int, WriteMode], ...]] = {
    "none": (),
    "through": (("disk", 8, WriteMode.THROUGH),),
    "spill": (("disk", 8, WriteMode.SPILL),),
}
