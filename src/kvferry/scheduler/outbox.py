"""What was ordered and is not yet in a plan, and the step that sends it off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.config import Config
from kvferry.keys import Keys
from kvferry.lease import Lease, Purpose
from kvferry.policy import OverlapDecision
from kvferry.scheduler.flight import Flights
from kvferry.scheduler.following import run_numbers
from kvferry.scheduler.transit import Transit
from kvferry.types import (
    DEVICE,
    HOST,
    Plan,
    Question,
    RunNumbers,
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
        self._questions: dict[TierName, tuple[TransferId, list[tuple[Keys, SlotArray]]]] = {}
        self._forget: tuple[TierName, ...] = ()
        self._step = 0

    def __len__(self) -> int:
        orders = len(self._loads) + len(self._stores) + len(self._moves)
        return orders + len(self._questions) + len(self._forget)

    @property
    def is_storing(self) -> bool:
        """Whether blocks are to be stored from the device, sent off or not."""
        return self._transit.blocks_from_device > 0

    def load(
        self,
        request: Any,
        group: int,
        lease: Lease,
        blocks: SlotArray,
        overlap: OverlapDecision | None = None,
    ) -> TransferId:
        """Order one group's blocks of a hit to the device; layer after layer if read early."""
        transfer = Transfer(
            self._flights.new_id(),
            HOST,
            DEVICE,
            lease.slots,
            blocks,
            group,
            in_parts=overlap is not None and overlap.is_early,
        )
        self._loads.append(LoadOrder(transfer, lease, request))
        self._transit.load(group, len(blocks))
        return transfer.id

    def store(
        self, group: int, lease: Lease, device_blocks: SlotArray, request: Any = None
    ) -> TransferId:
        """Order blocks into host slots. The stores of one group and step are one transfer."""
        self._stores.append(StoreOrder(group, lease, device_blocks, request))
        if request is not None and request.hints is not None:
            request.num_storing += 1
        self._transit.store(group, len(device_blocks))
        transfer_id = self._store_ids.get(group)
        if transfer_id is None:
            transfer_id = self._store_ids[group] = self._flights.new_id()
        return transfer_id

    def move(self, src: End, dst: End, keys: Keys, runs: RunNumbers | None = None) -> TransferId:
        """Order blocks from one tier to another."""
        config = self._config
        transfer = Transfer(
            self._flights.new_id(),
            src.tier,
            dst.tier,
            src.slots,
            dst.slots,
            keys=keys.array,
            within=config.promote_deadline if dst.tier == HOST else config.store_deadline,
            runs=runs,
        )
        self._moves.append(MoveOrder(transfer, src.leases + dst.leases))
        return transfer.id

    def ask(self, level: TierName, keys: Keys, at: SlotArray) -> TransferId:
        """Ask a level which of these keys it has; a level is asked one question a step.

        ``at`` is where each stands in its chain: the next number is the next block.
        """
        if level not in self._questions:
            self._questions[level] = (self._flights.new_id(), [])
        question_id, asked = self._questions[level]
        asked.append((keys, at))
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

    def cancel_loads(self, request: Any) -> list[LoadOrder]:
        """Take a request's loads back; their leases are released."""
        cancelled = [order for order in self._loads if order.request is request]
        if cancelled:
            self._loads = [order for order in self._loads if order.request is not request]
        for order in cancelled:
            order.lease.release()
            self._transit.load(order.transfer.group, -len(order.transfer))
        return cancelled

    def drop_stores(self, request: Any) -> None:
        """Take back what was to be stored of a request and is not sent off."""
        dropped = [order for order in self._stores if order.request is request]
        self._stores = [order for order in self._stores if order.request is not request]
        for order in dropped:
            order.lease.abort()
            self._transit.store(order.group, -len(order.device_blocks))
            if request.hints is not None:
                request.num_storing -= 1
        left = {order.group for order in self._stores}
        self._store_ids = {g: each for g, each in self._store_ids.items() if g in left}

    def launch(self, now: float) -> Plan:
        """Everything ordered since the last call as one plan: loads, then moves, then stores.

        The stores of one group travel together: one copy of many blocks beats many of a few.
        """
        self._step += 1
        if not (self._loads or self._stores or self._moves or self._questions or self._forget):
            return Plan(self._step)
        loads, moves, stores, store_ids = self._loads, self._moves, self._stores, self._store_ids
        # Before they are in flight: what is in both, should an interrupt come, would end twice.
        self._loads, self._moves, self._stores, self._store_ids = [], [], [], {}
        transfers = []
        for load in loads:
            deadline = now + self._config.load_deadline
            self._flights.launch(load.transfer, (load.lease,), deadline, (load.request,))
            transfers.append(load.transfer)
        for move in moves:
            assert move.transfer.within is not None
            self._flights.launch(move.transfer, move.leases, now + move.transfer.within)
            transfers.append(move.transfer)
        for group, transfer_id in sorted(store_ids.items()):
            of_group = [order for order in stores if order.group == group]
            transfers.append(self._launch_store(transfer_id, group, of_group, now))
        if not self._questions and not self._forget:
            return Plan(self._step, tuple(transfers))
        questions = [self._launch_question(level, now) for level in self._questions]
        forget, self._forget, self._questions = self._forget, (), {}
        return Plan(self._step, tuple(transfers), tuple(questions), forget)

    def _launch_question(self, level: TierName, now: float) -> Question:
        question_id, asked = self._questions[level]
        within = self._config.ask_deadline
        keys = np.concatenate([keys.array for keys, _ in asked])
        at = np.concatenate([at for _, at in asked])
        starts = np.cumsum([0, *(len(at) for _, at in asked[:-1])])
        question = Question(question_id, level, keys, within, run_numbers(at, starts))
        self._flights.launch(question, (), now + within)
        return question

    def _launch_store(
        self, transfer_id: TransferId, group: int, orders: Sequence[StoreOrder], now: float
    ) -> Transfer:
        leases = tuple(order.lease for order in orders)
        served = tuple(order.request for order in orders if order.request is not None)
        blocks = [order.device_blocks for order in orders]
        slots = [lease.slots for lease in leases]
        transfer = Transfer(
            transfer_id,
            DEVICE,
            HOST,
            blocks[0] if len(blocks) == 1 else np.concatenate(blocks),
            slots[0] if len(slots) == 1 else np.concatenate(slots),
            group,
        )
        deadline = now + self._config.store_deadline
        self._flights.launch(transfer, leases, deadline, served)
        return transfer

    def discard(self) -> None:
        """Drop everything not sent off, as if never ordered."""
        for load in self._loads:
            load.lease.release()
        _drop(self._moves)
        for store in self._stores:
            store.lease.abort()
        self._loads, self._moves, self._stores = [], [], []
        self._store_ids, self._questions, self._forget = {}, {}, ()


def _drop(moves: Sequence[MoveOrder]) -> None:
    """No rank has heard of these: nothing was touched."""
    for move in moves:
        for lease in move.leases:
            lease.abort() if lease.purpose is Purpose.WRITE else lease.release()
