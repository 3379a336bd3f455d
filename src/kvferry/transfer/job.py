"""Copy jobs (transfers as addresses), and the contract of the engines that copy them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np

from kvferry.errors import InputError, LayoutError
from kvferry.transfer.layout import GroupLayout, LayerParts
from kvferry.types import DEVICE, HOST, Receipt, SlotArray, Transfer, TransferId


class Direction(Enum):
    """Direction of a copy, seen from the device."""

    STORE = "store"  # device -> host
    LOAD = "load"  # host -> device

    # Hashing by address suffices for singletons; an Enum's own hash is a call into Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class CopyJob:
    """A copy of device blocks ``device_blocks[i]`` to or from host slots ``host_slots[i]``.

    Host slot ``h`` is the ``layout.block_bytes`` bytes at ``host_base + h * host_pitch``. Host
    memory is registered with the driver in chunks of ``host_chunk`` bytes counted from
    ``host_base`` (None: one chunk). The driver refuses one copy across two chunks, so neighbouring
    slots may be joined into one copy only within a chunk.

    A job ``in_parts`` is copied part by part, each part as a job of its own (:meth:`parts`).
    """

    direction: Direction
    layout: GroupLayout
    device_blocks: SlotArray
    host_slots: SlotArray
    host_base: int
    host_pitch: int
    host_chunk: int | None = None
    in_parts: LayerParts | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.device_blocks) * self.layout.block_bytes

    def parts(self) -> Sequence[CopyJob]:
        """Return the jobs of the parts, in order, or the job itself if it has no parts."""
        if self.in_parts is None:
            return (self,)
        base = self.host_base
        return [
            replace(self, layout=part.layout, host_base=base + part.start, in_parts=None)
            for part in self.in_parts.parts
        ]


class JobFactory:
    """Turns transfers into copy jobs; checks all slot numbers before they become addresses."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        *,
        host_base: int,
        host_pitch: int,
        num_slots: int,
        host_chunk: int | None = None,
    ) -> None:
        for group, layout in enumerate(layouts):
            if layout.block_bytes > host_pitch:
                raise LayoutError(
                    f"a block of group {group} has {layout.block_bytes} bytes, "
                    f"a host slot only {host_pitch}"
                )
        self.layouts = tuple(layouts)
        self._parts = tuple(map(LayerParts.of, layouts))
        self._host = (host_base, host_pitch, host_chunk)
        self._num_slots = num_slots

    def of(self, transfer: Transfer) -> CopyJob:
        """Return a transfer's job; InputError for blocks, slots or routes that do not exist."""
        if (transfer.src, transfer.dst) == (DEVICE, HOST):
            direction, blocks, slots = Direction.STORE, transfer.src_slots, transfer.dst_slots
        elif (transfer.src, transfer.dst) == (HOST, DEVICE):
            direction, blocks, slots = Direction.LOAD, transfer.dst_slots, transfer.src_slots
        else:
            raise InputError(f"this engine cannot copy from {transfer.src} to {transfer.dst}")
        if not 0 <= transfer.group < len(self.layouts):
            raise InputError(f"there are {len(self.layouts)} groups, got group {transfer.group}")
        if len(blocks) != len(slots) or not len(slots):
            raise InputError(
                f"transfer {transfer.id}: {len(blocks)} device blocks for {len(slots)} host slots; "
                "they must pair up"
            )
        layout = self.layouts[transfer.group]
        _require_within("device block", blocks, layout.num_blocks)
        _require_within("host slot", slots, self._num_slots)
        parts = self._parts[transfer.group] if transfer.in_parts else None
        return CopyJob(direction, layout, blocks, slots, *self._host, parts)

    def samples(self) -> Iterator[CopyJob]:
        """Yield a one-block job for each group, direction and part, for ``Path.prepare``."""
        one = np.zeros(1, dtype=np.int64)
        for group in range(len(self.layouts)):
            for ends in ((DEVICE, HOST), (HOST, DEVICE)):
                yield self.of(Transfer(TransferId(0), *ends, one, one, group))
            load = Transfer(TransferId(0), HOST, DEVICE, one, one, group, in_parts=True)
            yield from self.of(load).parts()


def _require_within(what: str, slots: SlotArray, count: int) -> None:
    # As unsigned numbers, negative ones are the largest, so one comparison finds both kinds.
    if np.maximum.reduce(slots.view(np.uint64)) >= count:
        worst = slots[slots.view(np.uint64).argmax()]
        raise InputError(f"{what} {worst} is not one of 0 to {count - 1}")


class CopyEngine(Protocol):
    """Copies blocks between paged device memory and host slots, asynchronously.

    Owns its streams, events and staging memory; leaves slots, keys and requests to the scheduler.
    A store or load waits for all work queued on the compute stream when it was submitted.
    """

    def submit(self, transfer: Transfer) -> None:
        """Queue one transfer and return at once. A fault becomes a failed receipt."""

    def poll(self) -> list[Receipt]:
        """Return the receipts of transfers that ended since the last call; never blocks."""

    def wait_for_end(self, seconds: float) -> None:
        """Wait until ``poll`` has a receipt, or for ``seconds``; may return early.

        Any thread may call it. It does not hold the interpreter lock while it waits.
        """

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed); return the receipts."""

    def order_compute_after_loads(self) -> None:
        """Make compute queued from now on wait for every load submitted so far."""

    def num_landed(self, transfer_id: TransferId) -> int | None:
        """Return how many parts of a load ``in_parts`` have arrived; None while it may still fail.

        Also None once ``poll`` has returned the load's receipt. In between, only the loss of the
        device can keep the other parts from arriving.
        """

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        """Make compute queued from now on wait for parts 0 to ``number`` of these loads.

        Ignores loads that have ended. If a load has fewer parts, compute waits for its last one.
        """

    def close(self) -> None:
        """Drain, then release streams, events and memory. Safe to call twice."""
