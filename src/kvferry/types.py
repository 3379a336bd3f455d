"""The plain words scheduler and worker share: transfers, plans, receipts.

In a real server the two halves are different processes, so everything here is frozen, picklable
and made of plain ids. The worker never learns what a request is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError

Key = NewType("Key", bytes)
"""Content identity of one block: ``KEY_BYTES`` bytes."""

KEY_BYTES = 32

RequestId = str
TransferId = NewType("TransferId", int)
Rank = NewType("Rank", int)
FIRST_RANK = Rank(0)

TierName = NewType("TierName", str)
DEVICE = TierName("device")
HOST = TierName("host")

SlotArray = npt.NDArray[np.int64]
"""Slot numbers, one per block. On the device a slot is the engine's block id."""

NO_SLOT = -1
"""In arrays of slots: there is none."""


def as_slots(slots: Sequence[int] | npt.NDArray[np.integer]) -> SlotArray:
    """Slot numbers as a read-only int64 vector of their own; refuses negatives and non-vectors."""
    array = np.array(slots, dtype=np.int64)
    if array.ndim != 1:
        raise InputError(f"slots must be a vector of integers, got an array of shape {array.shape}")
    if array.size and int(array.min()) < 0:
        raise InputError(f"slots must not be negative, got {int(array.min())}")
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False)
class Transfer:
    """One order to copy blocks: ``src_slots[i]`` of tier ``src`` to ``dst_slots[i]`` of ``dst``.

    ``group`` names the layers whose blocks these are (it selects the device layout).
    """

    id: TransferId
    src: TierName
    dst: TierName
    src_slots: SlotArray
    dst_slots: SlotArray
    group: int = 0

    def __post_init__(self) -> None:
        if len(self.src_slots) != len(self.dst_slots):
            raise InputError(
                f"transfer {self.id}: {len(self.src_slots)} source slots for "
                f"{len(self.dst_slots)} destination slots; they must pair up"
            )
        if not len(self.src_slots):
            raise InputError(f"transfer {self.id} names no slots; an empty transfer is never sent")

    def __len__(self) -> int:
        return len(self.src_slots)


@dataclass(frozen=True)
class Plan:
    """One step's transfers for every rank, in the order to submit them (loads before stores)."""

    step: int
    transfers: tuple[Transfer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.transfers)


class Outcome(Enum):
    """How a transfer ended on one rank."""

    OK = "ok"
    FAILED = "failed"


@dataclass(frozen=True)
class Receipt:
    """What became of one transfer on one rank.

    ``path`` is the way it was copied, chosen while the model ran (``beside_model``) or not, and for
    host slots that lay in ``num_runs`` pieces.
    """

    transfer_id: TransferId
    rank: Rank
    outcome: Outcome
    reason: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    path: str = ""
    beside_model: bool = False
    num_runs: int = 1
