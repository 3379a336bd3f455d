"""What a slot of a pool can be, and how many of a pool's slots are what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class SlotState(IntEnum):
    """What a slot is; see the drawing at the top of ``pool.py``."""

    FREE = 0
    WRITING = 1
    CACHED = 2
    DOOMED = 3
    UNREADY = 4


@dataclass(frozen=True)
class PoolCounts:
    """How the slots of a pool are used; ``free + cached + leased + unready == total``, always.

    ``unready`` slots exist, but their memory cannot be used yet. ``held`` ones, which are among the
    leased, stay because somebody asked for that; ``refused_holds`` blocks were to be, and are not.
    """

    free: int
    cached: int
    leased: int
    total: int
    evicted: int
    unready: int = 0
    held: int = 0
    refused_holds: int = 0
