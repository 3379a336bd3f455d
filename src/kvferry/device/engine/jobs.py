"""Transfers as the addresses they mean, looked at before anything is copied by address."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.device.job import CopyJob, Direction
from kvferry.device.layout.base import GroupLayout
from kvferry.device.layout.ranges import LayerParts
from kvferry.errors import InputError, LayoutError
from kvferry.types import DEVICE, HOST, SlotArray, Transfer


class Jobs:
    """Knows where blocks and slots are; owns neither."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        *,
        host_base: int,
        host_pitch: int,
        num_slots: int,
        host_chunk: int | None,
    ) -> None:
        for group, layout in enumerate(layouts):
            if layout.block_bytes > host_pitch:
                raise LayoutError(
                    f"a block of group {group} has {layout.block_bytes} bytes, "
                    f"a host slot only {host_pitch}"
                )
        self.layouts = tuple(layouts)
        self.cuts = tuple(map(LayerParts.of, layouts))
        self._host = (host_base, host_pitch, host_chunk)
        self._num_slots = num_slots

    def of(self, transfer: Transfer) -> CopyJob:
        """What a transfer asks for; InputError where that is not ours to copy."""
        if (transfer.src, transfer.dst) == (DEVICE, HOST):
            direction, blocks, slots = Direction.STORE, transfer.src_slots, transfer.dst_slots
        elif (transfer.src, transfer.dst) == (HOST, DEVICE):
            direction, blocks, slots = Direction.LOAD, transfer.dst_slots, transfer.src_slots
        else:
            raise InputError(f"this engine cannot copy from {transfer.src} to {transfer.dst}")
        if not 0 <= transfer.group < len(self.layouts):
            raise InputError(f"there are {len(self.layouts)} groups, got group {transfer.group}")
        layout = self.layouts[transfer.group]
        _refuse_outside("device block", blocks, layout.num_blocks)
        _refuse_outside("host slot", slots, self._num_slots)
        in_parts = self.cuts[transfer.group] if transfer.in_parts else None
        return CopyJob(direction, layout, blocks, slots, *self._host, in_parts)

    def of_hit(self, group: int, slots: SlotArray) -> CopyJob:
        """A load as far as it is known before it is ordered: its device blocks mean nothing."""
        return CopyJob(Direction.LOAD, self.layouts[group], slots, slots, *self._host)


def _refuse_outside(what: str, slots: SlotArray, count: int) -> None:
    # As unsigned numbers the negative ones are the largest: one look finds both kinds.
    worst = int(slots.view(np.uint64).argmax())
    if not 0 <= slots[worst] < count:
        raise InputError(f"{what} {slots[worst]} is not one of 0 to {count - 1}")
