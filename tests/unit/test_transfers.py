"""Transfers in flight: when they are late, and how receipts of a part of the blocks end leases."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.cache.slots import Ending, Lease, Purpose, as_slots
from kvferry.config import Config
from kvferry.errors import InputError
from kvferry.scheduler.transfers import InFlight, Transfers
from kvferry.types import (
    DEVICE,
    HOST,
    Outcome,
    Rank,
    Receipt,
    TierName,
    Transfer,
    TransferId,
)

DISK = TierName("disk")
SLOTS = as_slots(range(4))


class Sky:
    """Transfers of four blocks for one rank; keeps how their leases end."""

    def __init__(self) -> None:
        self.transfers = Transfers(1, (0,), Config())
        self.endings: list[Ending] = []

    def end(self, lease: Lease, ending: Ending, failed: object = ()) -> None:
        self.endings.append(ending)

    def disown(self, lease: Lease) -> None:
        raise AssertionError("transfers never disown")

    def launch(
        self, src: TierName, dst: TierName, *purposes: Purpose, deadline: float = 10.0
    ) -> int:
        transfer_id = self.transfers._new_id()
        pool: Any = self
        leases = tuple(Lease(purpose, SLOTS, SLOTS, pool) for purpose in purposes)
        transfer = Transfer(transfer_id, src, dst, SLOTS, SLOTS)
        self.transfers._fly(InFlight(transfer, leases), deadline)
        return int(transfer_id)


def partial(transfer: int, *positions: int) -> Receipt:
    return Receipt(TransferId(transfer), Rank(0), Outcome.PARTIAL, "worn", failed=positions)


def test_the_next_deadline_is_that_of_the_transfer_that_is_late_next() -> None:
    """Seen red with the other transfers' deadlines forgotten once one has passed."""
    sky = Sky()
    assert sky.transfers.next_deadline > 1e9
    first, third, second = (
        sky.launch(DEVICE, HOST, Purpose.WRITE, deadline=at) for at in (5.0, 9.0, 7.0)
    )
    late = []
    for now in range(20):
        if now >= sky.transfers.next_deadline:
            late += [(now, flight.transfer.id) for flight in sky.transfers.expire(float(now))]
    assert late == [(5, first), (7, second), (9, third)]
    assert sky.transfers.next_deadline > 1e9
    sky.launch(DEVICE, HOST, Purpose.WRITE, deadline=3.0)  # already in the past
    assert sky.transfers.next_deadline == 3.0


def test_a_copy_to_or_from_the_device_is_one_whole() -> None:
    sky = Sky()
    sky.transfers.settle([partial(sky.launch(DEVICE, HOST, Purpose.WRITE), 1)])
    sky.transfers.settle([partial(sky.launch(HOST, DEVICE, Purpose.READ), 1)])
    assert sky.endings == [Ending.ABORT, Ending.SPOIL]


@pytest.mark.parametrize("positions", [(4,), (-1, 2)])
def test_positions_that_do_not_exist_are_refused(positions: tuple[int, ...]) -> None:
    sky = Sky()
    up = sky.launch(DISK, HOST, Purpose.READ, Purpose.WRITE)
    with pytest.raises(InputError, match="but it has 4"):
        sky.transfers.settle([partial(up, *positions)])
    assert sky.endings == []
    assert len(sky.transfers.settle([Receipt(TransferId(up), Rank(0), Outcome.OK)])) == 1
