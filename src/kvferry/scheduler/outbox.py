"""What was ordered and is not yet in a plan, and the step that sends it off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.config import Config
from kvferry.keys import Keys
from kvferry.lease import Lease, Purpose
from kvferry.scheduler.flight import Flights
from kvferry.types import (
    DEVICE,
    HOST,
    Plan,
    Question,
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
    """A copy between host slots and a lower tier; claims slots in both, where both have slots."""

    transfer: Transfer
    leases: tuple[Lease, ...]


@dataclass(frozen=True, eq=False)
class End:
    """One end of a copy below the device: the tier, its slots (if it has any), and their claim."""

    tier: TierName
    slots: SlotArray
    leases: tuple[Lease, ...] = ()

    @classmethod
    def of(cls, tier: TierName, lease: Lease) -> End:
        return cls(tier, lease.slots, (lease,))


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
        self._questions: dict[TierName, tuple[TransferId, list[Keys]]] = {}
        self._forget: tuple[TierName, ...] = ()
        self._step = 0

    def __len__(self) -> int:
        orders = len(self._loads) + len(self._stores) + len(self._moves)
        return orders + len(self._questions) + len(self._forget)

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

    def move(self, src: End, dst: End, keys: Keys) -> TransferId:
        """Order blocks from one tier to another."""
        config = self._config
        within = config.promote_deadline if dst.tier == HOST else config.store_deadline
        transfer = Transfer(
            self._flights.new_id(),
            src.tier,
            dst.tier,
            src.slots,
            dst.slots,
            keys=keys.array,
            within=within,
        )
        self._moves.append(MoveOrder(transfer, src.leases + dst.leases))
        return transfer.id

    def ask(self, level: TierName, keys: Keys) -> TransferId:
        """Ask a level which of these keys it has; a level is asked one question a step."""
        if level not in self._questions:
            self._questions[level] = (self._flights.new_id(), [])
        question_id, asked = self._questions[level]
        asked.append(keys)
        return question_id

    def forget(self, levels: tuple[TierName, ...]) -> list[TransferId]:
        """These levels forget everything, before what is ordered from now on.

        What waits to be sent down would come after that, and be there for ever: it is dropped, and
        its ids are returned.
        """
        self._forget = levels
        down = [move for move in self._moves if move.transfer.src == HOST]
        self._moves = [move for move in self._moves if move.transfer.src != HOST]
        _drop(down)
        return [move.transfer.id for move in down]

    def give_up(self, level: TierName, reason: str) -> None:
        """A level is away: see ``Flights.give_up``."""
        self._flights.give_up(level, reason)

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
        """Everything ordered since the last call as one plan: loads, moves, then stores.

        The stores of one group travel together: one copy of many blocks beats many of a few.
        """
        self._step += 1
        if not len(self):
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
        questions = tuple(self._launch_question(level, now) for level in self._questions)
        forget, self._forget = self._forget, ()
        self._loads, self._moves, self._stores, self._questions = [], [], [], {}
        return Plan(self._step, tuple(transfers), questions, forget)

    def _launch_question(self, level: TierName, now: float) -> Question:
        question_id, asked = self._questions[level]
        keys = np.concatenate([keys.array for keys in asked])
        within = self._config.ask_deadline
        question = Question(question_id, level, keys, within)
        self._flights.launch(question, (), now + within)
        return question

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
        _drop(self._moves)
        for store in self._stores:
            store.lease.abort()
        self._loads, self._moves, self._stores = [], [], []
        self._questions, self._forget = {}, ()


def _drop(moves: Sequence[MoveOrder]) -> None:
    """No rank has heard of these: nothing was touched."""
    for move in moves:
        for lease in move.leases:
            lease.abort() if lease.purpose is Purpose.WRITE else lease.release()
