"""An order under way in the process of a store, and what became of each of its blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.tiers.base import Way
from kvferry.tiers.disk.messages import OrderMessage, ResultMessage
from kvferry.tiers.remote.client import Fault, NotAsked, NotThere
from kvferry.tiers.remote.packs import Parcel

NOT_BEGUN = "not begun in time"

End = NotThere | Fault | None
"""What became of one block; None: it moved, or is there."""


@dataclass(eq=False)
class Errand:
    """An order under way. Owns what became of each block so far."""

    order: OrderMessage
    names: list[str]
    keys: Sequence[bytes]
    is_cancelled: bool = False
    ends: list[End] = field(init=False)
    came: float = field(init=False)

    def __post_init__(self) -> None:
        self.came = time.monotonic()
        self.ends = [NotAsked(NOT_BEGUN)] * len(self.names)

    def end(self, parcels: Sequence[Parcel], end: End) -> None:
        """This became of all blocks of these objects."""
        for parcel in parcels:
            for at in parcel.positions:
                self.ends[at] = end

    @property
    def left(self) -> float:
        """Seconds until its deadline."""
        return self.order.deadline - time.monotonic()

    def result(self, block_bytes: int, seconds: float) -> ResultMessage:
        """What the engine is told."""
        ok = np.array([end is None for end in self.ends], dtype=bool)
        reasons = {at: end.reason for at, end in enumerate(self.ends) if end is not None}
        moved = 0 if self.order.way is Way.FIND else int(ok.sum()) * block_bytes
        return ResultMessage(self.order.id, ok, reasons, moved, seconds)
