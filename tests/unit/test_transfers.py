"""Transfers in flight: they land when every rank has answered and end their leases once."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.cache.leases import Ending, Lease, Purpose
from kvferry.config import Config
from kvferry.errors import ReceiptError
from kvferry.scheduler.transfers import Transfers
from kvferry.types import (
    DEVICE,
    HOST,
    Outcome,
    Question,
    Rank,
    Receipt,
    SlotArray,
    TierName,
    Transfer,
    TransferId,
    as_slots,
)

DISK = TierName("disk")


class Owner:
    """Writes down how its leases end."""

    def __init__(self) -> None:
        self.endings: list[Ending] = []
        self.failed: list[list[int]] = []

    def end(self, lease: Lease, ending: Ending, failed: SlotArray) -> None:
        self.endings.append(ending)
        self.failed.append(failed.tolist())

    def disown(self, lease: Lease) -> None:
        raise AssertionError("transfers never disown")


def ok(transfer: int, rank: int) -> Receipt:
    return Receipt(TransferId(transfer), Rank(rank), Outcome.OK, num_bytes=10, seconds=0.5)


def failed(transfer: int, rank: int, reason: str = "") -> Receipt:
    return Receipt(TransferId(transfer), Rank(rank), Outcome.FAILED, reason)


class Sky:
    """Flights with one lease each, whose endings are kept."""

    def __init__(self, num_ranks: int) -> None:
        self.transfers = Transfers(num_ranks, (0,), Config())
        self.owner = Owner()

    def move(self, src: TierName, dst: TierName, length: int, *purposes: Purpose) -> int:
        """A transfer below the host, with these leases."""
        transfer_id = self.transfers._new_id()
        slots = as_slots(range(length))
        transfer = Transfer(transfer_id, src, dst, slots, slots)
        leases = tuple(Lease(purpose, slots, slots, self.owner) for purpose in purposes)
        self.transfers._fly(transfer, leases, 10.0)
        return int(transfer_id)

    def ask(self, length: int, deadline: float = 10.0) -> int:
        question_id = self.transfers._new_id()
        question = Question(question_id, DISK, np.zeros((length, 4), dtype=np.uint64), 1.0)
        self.transfers._fly(question, (), deadline)
        return int(question_id)

    def launch(
        self, purpose: Purpose = Purpose.WRITE, deadline: float = 10.0, dst: TierName = HOST
    ) -> int:
        transfer_id = self.transfers._new_id()
        src = DEVICE if dst == HOST else HOST
        transfer = Transfer(transfer_id, src, dst, as_slots([1]), as_slots([2]))
        lease = Lease(purpose, as_slots([2]), as_slots([0]), self.owner)
        self.transfers._fly(transfer, (lease,), deadline)
        return int(transfer_id)


def test_the_next_deadline_is_that_of_whoever_is_late_next() -> None:
    """Before it nobody is looked at, so one that is passed over is never late.

    Seen red with the others' deadlines forgotten once one has passed.
    """
    sky = Sky(1)
    assert sky.transfers.next_deadline > 1e9
    first, third, second = (sky.launch(deadline=at) for at in (5.0, 9.0, 7.0))
    late = []
    for now in range(20):
        if now >= sky.transfers.next_deadline:
            late += [(now, flight.transfer.id) for flight in sky.transfers.expire(float(now))]
    assert late == [(5, first), (7, second), (9, third)]
    assert sky.transfers.next_deadline > 1e9
    sky.launch(deadline=3.0)  # already in the past
    assert sky.transfers.next_deadline == 3.0


def partial(transfer: int, rank: int, *positions: int, reason: str = "worn") -> Receipt:
    return Receipt(TransferId(transfer), Rank(rank), Outcome.PARTIAL, reason, failed=positions)


def test_a_copy_to_or_from_the_device_is_one_whole() -> None:
    sky = Sky(1)
    sky.transfers.settle([partial(sky.move(DEVICE, HOST, 3, Purpose.WRITE), 0, 1)])
    sky.transfers.settle([partial(sky.move(HOST, DEVICE, 3, Purpose.READ), 0, 1)])
    assert sky.owner.endings == [Ending.ABORT, Ending.SPOIL]


@pytest.mark.parametrize("positions", [(4,), (-1, 2)])
def test_positions_that_do_not_exist_are_refused(positions: tuple[int, ...]) -> None:
    sky = Sky(1)
    up = sky.move(DISK, HOST, 4, Purpose.READ, Purpose.WRITE)
    with pytest.raises(ReceiptError, match="but it has 4"):
        sky.transfers.settle([partial(up, 0, *positions)])
    assert sky.owner.endings == []
    assert len(sky.transfers.settle([ok(up, 0)])) == 1
