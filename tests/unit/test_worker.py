"""The worker half: every transfer it was given ends in exactly one receipt."""

from __future__ import annotations

import time

import pytest

from kvferry.errors import ClosedError
from kvferry.types import (
    DEVICE,
    HOST,
    Outcome,
    Plan,
    Rank,
    Receipt,
    TierName,
    Transfer,
    TransferId,
    as_slots,
)
from kvferry.worker import Worker

DISK = TierName("disk")


class FakeMover:
    """Takes transfers, and answers for them when polled."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = Rank(rank)
        self.submitted: list[Transfer] = []
        self.answered = 0
        self.fault: Exception | None = None
        self.waits: list[float | None] = []
        self.closed = 0

    def submit(self, transfer: Transfer) -> object:
        if self.fault is not None:
            raise self.fault
        self.submitted.append(transfer)
        return None

    def poll(self) -> list[Receipt]:
        new, self.answered = self.submitted[self.answered :], len(self.submitted)
        return [Receipt(t.id, self.rank, Outcome.OK) for t in new]

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        self.waits.append(timeout)
        return self.poll()

    def close(self) -> None:
        self.closed += 1


def transfer(number: int, src: TierName, dst: TierName) -> Transfer:
    return Transfer(TransferId(number), src, dst, as_slots([0]), as_slots([1]))


def plan(*transfers: Transfer) -> Plan:
    return Plan(1, transfers)


def test_each_transfer_goes_to_the_mover_of_its_route_in_order() -> None:
    device, disk = FakeMover(), FakeMover()
    worker = Worker({(DEVICE, HOST): device, (HOST, DEVICE): device, (HOST, DISK): disk})
    load, down, store = (
        transfer(0, HOST, DEVICE),
        transfer(1, HOST, DISK),
        transfer(2, DEVICE, HOST),
    )
    worker.execute(plan(load, down, store))
    assert device.submitted == [load, store]
    assert disk.submitted == [down]
    assert sorted(r.transfer_id for r in worker.poll()) == [0, 1, 2]
    assert worker.poll() == []


def test_an_unknown_route_fails_alone() -> None:
    mover = FakeMover()
    worker = Worker({(DEVICE, HOST): mover}, rank=Rank(2))
    worker.execute(plan(transfer(0, HOST, DISK), transfer(1, DEVICE, HOST)))
    refused, done = worker.poll()
    assert (refused.transfer_id, refused.rank, refused.outcome) == (0, 2, Outcome.FAILED)
    assert refused.reason == "no way from host to disk"
    assert (done.transfer_id, done.outcome) == (1, Outcome.OK)


def test_a_mover_that_raises_does_not_stop_the_plan() -> None:
    broken, fine = FakeMover(), FakeMover()
    broken.fault = OSError("bus error")
    worker = Worker({(HOST, DEVICE): broken, (DEVICE, HOST): fine})
    worker.execute(plan(transfer(0, HOST, DEVICE), transfer(1, DEVICE, HOST)))
    receipts = {receipt.transfer_id: receipt for receipt in worker.drain()}
    assert receipts[TransferId(0)].outcome is Outcome.FAILED
    assert receipts[TransferId(0)].reason == "OSError: bus error"
    assert receipts[TransferId(1)].outcome is Outcome.OK
    assert worker.drain() == []


def test_drain_shares_its_time_between_movers() -> None:
    class Slow(FakeMover):
        def drain(self, timeout: float | None = None) -> list[Receipt]:
            time.sleep(0.03)
            return super().drain(timeout)

    first, second = Slow(), FakeMover()
    worker = Worker({(HOST, DISK): first, (DISK, HOST): second})
    worker.drain(0.02)
    assert first.waits[0] == pytest.approx(0.02, abs=0.01)
    assert second.waits == [0.0]
    worker.drain()
    assert second.waits == [0.0, None]


def test_closing_twice_closes_each_mover_once_and_use_after_is_refused() -> None:
    shared = FakeMover()
    worker = Worker({(DEVICE, HOST): shared, (HOST, DEVICE): shared})
    worker.execute(plan(transfer(0, DEVICE, HOST)))
    worker.close()
    worker.close()
    assert shared.closed == 1
    with pytest.raises(ClosedError, match="worker is closed"):
        worker.execute(plan(transfer(1, DEVICE, HOST)))
    assert [receipt.transfer_id for receipt in worker.poll()] == [0], "no receipt is lost"


def test_one_mover_that_cannot_close_does_not_keep_the_others_open() -> None:
    class Stuck(FakeMover):
        def close(self) -> None:
            raise OSError("busy")

    other = FakeMover()
    worker = Worker({(HOST, DISK): Stuck(), (DEVICE, HOST): other})
    with pytest.raises(OSError, match="busy"):
        worker.close()
    assert other.closed == 1
