"""One transfer as the addresses to copy, and the engine that a device offers to copy them."""

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
    """Which way the bytes go, seen from the device."""

    STORE = "store"  # device -> host
    LOAD = "load"  # host -> device

    # There is one of each, so its address will do; an Enum's own hash is a call into Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class CopyJob:
    """Block ``device_blocks[i]`` from or to host slot ``host_slots[i]``, all segments.

    Host slot ``h`` is the ``layout.block_bytes`` bytes at ``host_base + h * host_pitch``. Host
    memory is registered with the driver in chunks of ``host_chunk`` bytes counted from
    ``host_base`` (None: one chunk). The driver refuses one copy across two chunks, so neighbour
    slots may be joined into one copy only within a chunk.

    With ``in_parts`` the job is done part by part, each a job of its own (:meth:`parts`).
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
        """The jobs to do one after the other: the job itself, where it has no parts."""
        if self.in_parts is None:
            return (self,)
        base = self.host_base
        return [
            replace(self, layout=part.layout, host_base=base + part.start, in_parts=None)
            for part in self.in_parts.parts
        ]


class JobFactory:
    """Turns transfers into jobs, checked before anything is copied by address."""

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
        """The addresses of a transfer; InputError where they are not ours to copy."""
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
        """A job of one block for each group, direction and part: what copies can be prepared by."""
        one = np.zeros(1, dtype=np.int64)
        for group in range(len(self.layouts)):
            for ends in ((DEVICE, HOST), (HOST, DEVICE)):
                yield self.of(Transfer(TransferId(0), *ends, one, one, group))
            load = Transfer(TransferId(0), HOST, DEVICE, one, one, group, in_parts=True)
            yield from self.of(load).parts()


def _require_within(what: str, slots: SlotArray, count: int) -> None:
    # As unsigned numbers the negative ones are the largest: one test finds both kinds.
    if np.maximum.reduce(slots.view(np.uint64)) >= count:
        worst = slots[slots.view(np.uint64).argmax()]
        raise InputError(f"{what} {worst} is not one of 0 to {count - 1}")


class CopyEngine(Protocol):
    """Copies blocks between paged device memory and host slots, asynchronously.

    Owns its streams, events and staging memory; leaves slots, keys and requests to the scheduler.
    Stores and loads come after everything queued on the compute stream when they were submitted.
    """

    def submit(self, transfer: Transfer) -> None:
        """Queue one transfer and return at once. A fault is a failed receipt, never a raise."""

    def poll(self) -> list[Receipt]:
        """Receipts of transfers that ended since the last call; never blocks."""

    def wait_for_end(self, seconds: float) -> None:
        """Return when a transfer has ended that ``poll`` has not returned, or after ``seconds``.

        From any thread, and without the interpreter meanwhile; it may return early.
        """

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed); returns the receipts."""

    def order_compute_after_loads(self) -> None:
        """Make compute queued from now on wait for every load submitted so far."""

    def num_landed(self, transfer_id: TransferId) -> int | None:
        """How many parts of a load ``in_parts`` have landed; None while it may still fail.

        Also None once ``poll`` has returned its receipt. In between only the loss of the device can
        keep the other parts from landing.
        """

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        """Make compute queued from now on wait for that part of these loads, and those before.

        Ignores loads that are over; where a load has fewer parts, the last one counts.
        """

    def close(self) -> None:
        """Drain, then give back streams, events and memory. Safe to call twice."""
