"""The tier mover: every transfer ends in one receipt, whatever its tier does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import ClosedError, InputError, TransferError
from kvferry.tiers import HostTier, MemoryTier, TierMover
from kvferry.types import (
    DEVICE,
    HOST,
    Outcome,
    Rank,
    Receipt,
    TierName,
    Transfer,
    TransferId,
    as_slots,
)

DISK = TierName("disk")
SLOT_BYTES = 32


class Rig:
    """A host of four slots over a slow tier of four."""

    def __init__(self) -> None:
        self.host = HostTier(4, SLOT_BYTES)
        self.disk = MemoryTier(4, SLOT_BYTES, name=DISK)
        self.mover = TierMover(self.host, self.disk, rank=Rank(3))
        self.next_id = 0

    def down(self, src: list[int], dst: list[int]) -> int:
        return self.move(HOST, DISK, src, dst)

    def up(self, src: list[int], dst: list[int]) -> int:
        return self.move(DISK, HOST, src, dst)

    def move(self, src: TierName, dst: TierName, src_slots: list[int], dst_slots: list[int]) -> int:
        self.next_id += 1
        self.mover.submit(
            Transfer(TransferId(self.next_id), src, dst, as_slots(src_slots), as_slots(dst_slots))
        )
        return self.next_id

    def one(self) -> Receipt:
        (receipt,) = self.mover.drain(10)
        return receipt


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.host.rows[:] = np.random.default_rng(2).integers(0, 256, (4, SLOT_BYTES), dtype=np.uint8)
    yield made
    made.mover.close()


def test_down_and_up_again(rig: Rig) -> None:
    kept = rig.host.rows.copy()
    down = rig.down([0, 1, 2], [3, 0, 1])
    receipt = rig.one()
    assert (receipt.transfer_id, receipt.rank, receipt.outcome) == (down, 3, Outcome.OK)
    assert receipt.num_bytes == 3 * SLOT_BYTES
    rig.host.rows[:] = 0xEE
    up = rig.up([1, 3], [2, 0])
    receipt = rig.one()
    assert (receipt.transfer_id, receipt.outcome) == (up, Outcome.OK)
    assert (rig.host.rows[[2, 0]] == kept[[2, 0]]).all()
    assert (rig.host.rows[[1, 3]] == 0xEE).all()
    assert rig.mover.poll() == []


@pytest.mark.parametrize(
    "error", [TransferError("worn out"), OSError(28, "disk full"), KeyError(3)]
)
def test_every_exception_becomes_a_failed_receipt(rig: Rig, error: Exception) -> None:
    def fault(what: str) -> None:
        raise error

    rig.disk.fault = fault
    for move in (rig.down, rig.up):
        transfer = move([0], [1])
        receipt = rig.one()
        assert receipt.transfer_id == transfer
        assert receipt.outcome is Outcome.FAILED
        assert str(error) in receipt.reason
        assert receipt.num_bytes == 0
    rig.disk.fault = None
    rig.down([0], [1])
    assert rig.one().outcome is Outcome.OK, "the threads outlive the faults"


def test_a_lost_block_fails_and_leaves_the_host_as_it_was(rig: Rig) -> None:
    rig.down([0, 1], [0, 1])
    rig.one()
    rig.disk.lose(as_slots([1]))
    before = rig.host.rows.copy()
    rig.up([0, 1], [2, 3])
    receipt = rig.one()
    assert receipt.outcome is Outcome.FAILED
    assert "slot 1 holds nothing" in receipt.reason
    assert (rig.host.rows == before).all()


def test_slots_that_do_not_exist_fail(rig: Rig) -> None:
    rig.down([0], [9])
    assert "0 to 3" in rig.one().reason
    rig.down([9], [0])
    assert rig.one().outcome is Outcome.FAILED


def test_a_route_that_is_not_ours_fails_and_touches_nothing(rig: Rig) -> None:
    rig.down([0, 1], [0, 1])
    rig.one()
    before = rig.host.rows.copy()
    for src, dst in ((DEVICE, DISK), (DISK, DEVICE), (HOST, DEVICE), (DEVICE, HOST)):
        rig.move(src, dst, [0], [1])
        receipt = rig.one()
        assert receipt.outcome is Outcome.FAILED
        assert str(src) in receipt.reason
        assert str(dst) in receipt.reason
    assert (rig.host.rows == before).all()


def test_a_slow_tier_blocks_neither_submit_nor_poll(rig: Rig) -> None:
    rig.disk.delay = 0.15
    start = time.monotonic()
    rig.down([0], [0])
    rig.down([1], [1])
    assert rig.mover.poll() == []
    assert time.monotonic() - start < 0.1
    assert rig.mover.drain(0.01) == [], "a drain gives up when its time is over"
    assert [r.outcome for r in rig.mover.drain(10)] == [Outcome.OK] * 2
    assert time.monotonic() - start >= 0.3


def test_down_does_not_wait_for_up(rig: Rig) -> None:
    gate = threading.Event()

    def fault(what: str) -> None:
        if what == "read":
            assert gate.wait(10)

    rig.down([0], [0])
    rig.one()
    rig.disk.fault = fault
    rig.up([0], [3])
    down = rig.down([1], [1])
    give_up = time.monotonic() + 5
    receipts: list[Receipt] = []
    while not receipts and time.monotonic() < give_up:
        receipts = rig.mover.poll()
    assert [receipt.transfer_id for receipt in receipts] == [down]
    gate.set()
    assert rig.one().outcome is Outcome.OK


def test_close_finishes_what_was_submitted(rig: Rig) -> None:
    rig.disk.delay = 0.05
    for slot in range(3):
        rig.down([slot], [slot])
    rig.mover.close()
    rig.mover.close()
    assert len(rig.mover.poll()) == 3
    assert rig.mover.drain() == []
    with pytest.raises(ClosedError, match="disk is closed"):
        rig.down([0], [0])


def test_tiers_of_different_slots_do_not_fit_together() -> None:
    with pytest.raises(InputError, match="slots of 16 bytes, the host of 32"):
        TierMover(HostTier(2, 32), MemoryTier(2, 16))
