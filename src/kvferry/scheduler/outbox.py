"""Copies decided on but not yet in a plan, and the step that sends them off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.config import Config
from kvferry.lease import Lease
from kvferry.scheduler.flight import Flights
from kvferry.scheduler.transit import Transit
from kvferry.types import (
    DEVICE,
    HOST,
    Plan,
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
    request: Any


@dataclass(frozen=True, eq=False)
class StoreOrder:
    """A part of a store: what one request or one look at the free queue contributed."""

    group: int
    lease: Lease
    device_blocks: SlotArray
    request: Any = None


@dataclass(frozen=True, eq=False)
class MoveOrder:
    """A copy between host slots and a lower tier; claims slots in both."""

    transfer: Transfer
    leases: tuple[Lease, Lease]


class Outbox:
    """Holds orders until the next plan, then launches them. Owns the leases until that moment.

    Requests are others': here they only tell whose an order is.
    """

    def __init__(self, flights: Flights, transit: Transit, config: Config, num_groups: int) -> None:
        self._flights = flights
        self._transit = transit
        self._config = config
        self._num_groups = num_groups
        self._loads: list[LoadOrder] = []
        self._stores: list[StoreOrder] = []
        self._store_ids: dict[int, TransferId] = {}
        self._moves: list[MoveOrder] = []
        self._step = 0

    def __len__(self) -> int:
        return len(self._loads) + len(self._stores) + len(self._moves)

    def load(self, request: Any, group: int, lease: Lease, blocks: SlotArray) -> Transfer:
        """Order one group's blocks of a hit to the device."""
        transfer = Transfer(self._flights.new_id(), HOST, DEVICE, lease.slots, blocks, group)
        self._loads.append(LoadOrder(transfer, lease, request))
        self._transit.load(group, len(blocks))
        return transfer

    def store(
        self, group: int, lease: Lease, device_blocks: SlotArray, request: Any = None
    ) -> TransferId:
        """Order blocks into host slots. The stores of one group and step are one transfer."""
        self._stores.append(StoreOrder(group, lease, device_blocks, request))
        self._transit.store(group, len(device_blocks))
        transfer_id = self._store_ids.get(group)
        if transfer_id is None:
            transfer_id = self._store_ids[group] = self._flights.new_id()
        return transfer_id

    def move(self, src: TierName, dst: TierName, reading: Lease, writing: Lease) -> TransferId:
        """Order slots from one tier to another; the leases say which."""
        transfer = Transfer(self._flights.new_id(), src, dst, reading.slots, writing.slots)
        self._moves.append(MoveOrder(transfer, (reading, writing)))
        return transfer.id

    def cancel_loads(self, request: Any) -> list[LoadOrder]:
        """Take a request's loads back; their leases are released."""
        cancelled = [order for order in self._loads if order.request is request]
        if cancelled:
            self._loads = [order for order in self._loads if order.request is not request]
        for order in cancelled:
            order.lease.release()
            self._transit.load(order.transfer.group, -len(order.transfer))
        return cancelled

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
            self._flights.launch(load.transfer, (load.lease,), deadline, (load.request,))
            transfers.append(load.transfer)
        for move in self._moves:
            upward = move.transfer.dst == HOST
            wait = self._config.promote_deadline if upward else self._config.store_deadline
            self._flights.launch(move.transfer, move.leases, now + wait)
            transfers.append(move.transfer)
        for group, transfer_id in sorted(self._store_ids.items()):
            orders = [order for order in self._stores if order.group == group]
            transfers.append(self._launch_store(transfer_id, group, orders, now))
        self._loads, self._moves, self._stores, self._store_ids = [], [], [], {}
        return Plan(self._step, tuple(transfers))

    def _launch_store(
        self, transfer_id: TransferId, group: int, orders: list[StoreOrder], now: float
    ) -> Transfer:
        blocks, slots = orders[0].device_blocks, orders[0].lease.slots
        if len(orders) > 1:
            blocks = np.concatenate([order.device_blocks for order in orders])
            slots = np.concatenate([order.lease.slots for order in orders])
        transfer = Transfer(transfer_id, DEVICE, HOST, blocks, slots, group)
        leases = tuple([order.lease for order in orders])
        served = tuple([order.request for order in orders if order.request is not None])
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
        self._loads, self._moves, self._stores, self._store_ids = [], [], [], {}
