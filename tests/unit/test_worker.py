"""The worker half: every transfer it was given ends in exactly one receipt."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.cache.slots import as_slots
from kvferry.errors import ClosedError
from kvferry.types import (
    DEVICE,
    HOST,
    Health,
    Outcome,
    Plan,
    Question,
    Rank,
    Receipt,
    TierName,
    Transfer,
    TransferId,
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
        return self.poll()

    def close(self) -> None:
        self.closed += 1


def transfer(number: int, src: TierName, dst: TierName) -> Transfer:
    return Transfer(TransferId(number), src, dst, as_slots([0]), as_slots([1]))


def plan(*transfers: Transfer) -> Plan:
    return Plan(1, transfers)


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


class FakeLowerTier(FakeMover):
    """A tier's mover that writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []
        self.changes: list[Health] = []

    def submit(self, transfer: Transfer) -> object:
        self.told.append(transfer.id)
        return super().submit(transfer)

    def ask(self, question: Question) -> object:
        if self.fault is not None:
            raise self.fault
        self.told.append(question.id)
        return None

    def forget(self, reset: object = None) -> None:
        if self.fault is not None:
            raise self.fault
        self.told.append("forget")

    def health(self) -> Health | None:
        return self.changes.pop(0) if self.changes else None


def question(number: int, tier: TierName = DISK) -> Question:
    return Question(TransferId(number), tier, np.zeros((2, 4), dtype=np.uint64), 1.0)


def test_a_tier_is_told_to_forget_before_all_else_and_carries_both_ways() -> None:
    tier = FakeLowerTier()
    worker = Worker({}, tiers={DISK: tier})
    up, down = transfer(1, DISK, HOST), transfer(2, HOST, DISK)
    worker.execute(Plan(1, (up, down), (question(3),), (DISK,)))
    assert tier.told == ["forget", 3, 1, 2]
    assert sorted(r.transfer_id for r in worker.poll()) == [1, 2]
    worker.close()
    assert tier.closed == 1


def test_questions_that_cannot_be_asked_are_answered() -> None:
    tier = FakeLowerTier()
    worker = Worker({}, tiers={DISK: tier}, rank=Rank(1))
    worker.execute(Plan(1, questions=(question(1, TierName("moon")),)))
    tier.fault = OSError("no route")
    worker.execute(Plan(2, questions=(question(2),)))
    first, second = worker.poll()
    assert (first.transfer_id, first.outcome) == (1, Outcome.FAILED)
    assert first.reason == "there is no tier moon here"
    assert (second.transfer_id, second.reason) == (2, "OSError: no route")


def test_a_tier_that_cannot_forget_is_shut_out() -> None:
    """It may hold bytes of weights that are no more."""
    tier = FakeLowerTier()
    tier.fault = OSError("read-only")
    worker = Worker({}, tiers={DISK: tier})
    worker.execute(Plan(1, (transfer(1, DISK, HOST),), forget=(DISK, TierName("moon"))))
    (refused,) = worker.poll()
    assert refused.outcome is Outcome.FAILED
    (health,) = worker.health()
    assert (health.tier, health.reason) == (DISK, "it could not forget: OSError: read-only")
    tier.fault = None
    worker.execute(Plan(2, (transfer(2, DISK, HOST),), (question(3),)))
    assert [receipt.outcome for receipt in worker.poll()] == [Outcome.FAILED] * 2
    assert tier.told == []
    worker.close()


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


def test_a_drain_that_raises_keeps_the_receipts_of_the_movers_before_it() -> None:
    class Broken(FakeMover):
        def drain(self, timeout: float | None = None) -> list[Receipt]:
            if self.fault is not None:
                raise self.fault
            return super().drain(timeout)

    fine, broken = FakeMover(), Broken()
    worker = Worker({(HOST, DEVICE): fine, (DEVICE, HOST): broken})
    worker.execute(plan(transfer(0, HOST, DEVICE), transfer(1, DEVICE, HOST)))
    broken.fault = OSError("the device is lost")
    with pytest.raises(OSError, match="lost"):
        worker.drain()
    broken.fault = None
    assert sorted(receipt.transfer_id for receipt in worker.drain()) == [0, 1]
