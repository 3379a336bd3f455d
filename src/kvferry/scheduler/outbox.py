"""Copies decided on but not yet in a plan, and the step that sends them off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.config import Config
from kvferry.lease import Lease
from kvferry.scheduler.flight import Flights
from kvferry.types import (
    DEVICE,
    HOST,
    Plan,
    RequestId,
    SlotArray,
    TierName,
    Transfer,
    TransferId,
)


@dataclass(frozen=True, eq=False)
class LoadOrder:
    """A load of one group's blocks. Unlike the others it has a request that waits for it."""

    transfer: Transfer
    lease: Lease
    request_id: RequestId


@dataclass(frozen=True, eq=False)
class StoreOrder:
    """A part of a store: what one request or one look at the free queue contributed."""

    group: int
    lease: Lease
    device_blocks: SlotArray
    host_slots: SlotArray
    request_id: RequestId | None = None


@dataclass(frozen=True, eq=False)
class MoveOrder:
    """A copy between host slots and a lower tier; claims slots in both."""

    transfer: Transfer
    leases: tuple[Lease, Lease]


class Outbox:
    """Holds orders until the next plan, then launches them. Owns the leases until that moment."""

    def __init__(
        self, flights: Flights, config: Config, num_groups: int, rows_per_slot: int
    ) -> None:
        """Below the device a slot is ``rows_per_slot`` rows of memory, whichever group uses it.

        The groups share the slots, so a group with fewer device blocks per slot leaves some unused.
        """
        self._flights = flights
        self._config = config
        self._num_groups = num_groups
        self._rows_per_slot = rows_per_slot
        self._loads: list[LoadOrder] = []
        self._stores: list[StoreOrder] = []
        self._moves: list[MoveOrder] = []
        self._step = 0

    def __len__(self) -> int:
        return len(self._loads) + len(self._stores) + len(self._moves)

    def rows(self, slots: SlotArray, places: SlotArray) -> SlotArray:
        """Where these device blocks of these slots lie below the device."""
        return slots * self._rows_per_slot + places

    def load(
        self,
        request_id: RequestId,
        group: int,
        lease: Lease,
        host_slots: SlotArray,
        device_blocks: SlotArray,
    ) -> LoadOrder:
        """Order one group's blocks of a hit to the device."""
        transfer = Transfer(self._flights.new_id(), HOST, DEVICE, host_slots, device_blocks, group)
        order = LoadOrder(transfer, lease, request_id)
        self._loads.append(order)
        return order

    def store(self, order: StoreOrder) -> None:
        self._stores.append(order)

    def move(self, src: TierName, dst: TierName, reading: Lease, writing: Lease) -> TransferId:
        """Order slots from one tier to another; the leases say which."""
        every = np.arange(self._rows_per_slot)
        source = self.rows(reading.slots[:, None], every).ravel()
        target = self.rows(writing.slots[:, None], every).ravel()
        transfer = Transfer(self._flights.new_id(), src, dst, source, target)
        self._moves.append(MoveOrder(transfer, (reading, writing)))
        return transfer.id

    def cancel_loads(self, request_id: RequestId) -> list[LoadOrder]:
        """Take a request's loads back; their leases are released."""
        cancelled = [order for order in self._loads if order.request_id == request_id]
        self._loads = [order for order in self._loads if order.request_id != request_id]
        for order in cancelled:
            order.lease.release()
        return cancelled

    def num_blocks_to_device(self) -> int:
        """Device blocks that loads wait to fill, sent off or not."""
        return sum(len(order.transfer) for order in self._loads) + sum(
            len(transfer) for transfer in self._flights.transfers() if transfer.dst == DEVICE
        )

    def num_blocks_from_device(self) -> int:
        """Device blocks that stores hold, sent off or not."""
        return sum(len(order.device_blocks) for order in self._stores) + sum(
            len(transfer) for transfer in self._flights.transfers() if transfer.src == DEVICE
        )

    def bytes_to_device(self, block_bytes: Sequence[int]) -> int:
        """Bytes that loads still bring, sent off or not."""
        queued = (order.transfer for order in self._loads)
        flying = (t for t in self._flights.transfers() if t.dst == DEVICE)
        return sum(len(t) * block_bytes[t.group] for t in (*queued, *flying))

    def bytes_in_flight(self, block_bytes: Sequence[int]) -> int:
        """Bytes on their way between device and host, either way, sent off or not."""
        queued = sum(len(order.device_blocks) * block_bytes[order.group] for order in self._stores)
        flying = (t for t in self._flights.transfers() if t.src == DEVICE)
        stores = queued + sum(len(t) * block_bytes[t.group] for t in flying)
        return stores + self.bytes_to_device(block_bytes)

    def launch(self, now: float) -> Plan:
        """Everything ordered since the last call as one plan: loads, then moves, then stores.

        The stores of one group travel together: one copy of many blocks beats many of a few.
        """
        self._step += 1
        if not self._loads and not self._moves and not self._stores:
            return Plan(self._step)
        transfers = []
        for load in self._loads:
            deadline = now + self._config.load_deadline
            self._flights.launch(load.transfer, (load.lease,), deadline)
            transfers.append(load.transfer)
        for move in self._moves:
            upward = move.transfer.dst == HOST
            wait = self._config.promote_deadline if upward else self._config.store_deadline
            self._flights.launch(move.transfer, move.leases, now + wait)
            transfers.append(move.transfer)
        for group in range(self._num_groups):
            orders = [order for order in self._stores if order.group == group]
            if orders:
                transfers.append(self._launch_store(group, orders, now))
        self._loads, self._moves, self._stores = [], [], []
        return Plan(self._step, tuple(transfers))

    def _launch_store(self, group: int, orders: list[StoreOrder], now: float) -> Transfer:
        transfer = Transfer(
            self._flights.new_id(),
            DEVICE,
            HOST,
            np.concatenate([order.device_blocks for order in orders]),
            np.concatenate([order.host_slots for order in orders]),
            group,
        )
        leases = tuple(order.lease for order in orders)
        served = tuple(order.request_id for order in orders if order.request_id is not None)
        self._flights.launch(transfer, leases, now + self._config.store_deadline, served)
        return transfer

    def discard(self) -> None:
        """Drop everything not sent off, as if never ordered."""
        for load in self._loads:
            load.lease.release()
        for move in self._moves:
            reading, writing = move.leases
            reading.release()
            writing.abort()
        for store in self._stores:
            store.lease.abort()
        self._loads, self._moves, self._stores = [], [], []
