"""What a tier is: numbered places for bytes. Which place holds what is the pool's business."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import InputError
from kvferry.types import SlotArray, TierName

Rows = npt.NDArray[np.uint8]
"""Blocks as rows of bytes, one row per slot."""


class Tier(Protocol):
    """A store of ``num_slots`` blocks of ``slot_bytes`` each, below the host.

    Called from worker threads, at most one call per slot at a time (the lease sees to that).
    Any fault is a TransferError; the bytes of slots not named in the call are never changed.
    """

    name: TierName
    num_slots: int
    slot_bytes: int

    def write(self, slots: SlotArray, rows: Rows) -> None:
        """Keep ``rows[i]`` in ``slots[i]``. On an error those slots hold nothing."""

    def read(self, slots: SlotArray, rows: Rows) -> None:
        """Fill ``rows[i]`` from ``slots[i]``. Raises if any of them holds nothing."""

    def close(self) -> None:
        """Give everything back. Safe to call twice; any other use after it is a ClosedError."""


def check_rows(tier: Tier, slots: SlotArray, rows: Rows) -> None:
    """Refuse rows or slots that do not fit the tier, before any byte moves."""
    if rows.dtype != np.uint8 or rows.shape != (len(slots), tier.slot_bytes):
        raise InputError(
            f"tier {tier.name}: {len(slots)} slots of {tier.slot_bytes} bytes need uint8 rows of "
            f"shape {(len(slots), tier.slot_bytes)}, got {rows.shape} of {rows.dtype}"
        )
    if len(slots) and not (int(slots.min()) >= 0 and int(slots.max()) < tier.num_slots):
        raise InputError(
            f"tier {tier.name} has slots 0 to {tier.num_slots - 1}, asked for "
            f"{int(slots.min())} to {int(slots.max())}"
        )


def check_size(name: TierName, num_slots: int, slot_bytes: int) -> None:
    if num_slots <= 0 or slot_bytes <= 0:
        raise InputError(
            f"tier {name} needs a positive number of slots and bytes, "
            f"got {num_slots} slots of {slot_bytes} bytes"
        )
