"""The tier's mover: every order ends in one receipt, and no byte is copied twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.fakes.crafted_keys import key, keys
from tests.fakes.memory_tiers import KeyedMemoryTier, MemoryTier

from kvferry.cache.slots import as_slots
from kvferry.errors import InputError
from kvferry.hostmem.slots import HostTier
from kvferry.tiers.movers import SharedMover, TierMover
from kvferry.types import (
    DEVICE,
    HOST,
    NO_SLOTS,
    Health,
    Outcome,
    Question,
    Rank,
    Receipt,
    TierName,
    Transfer,
    TransferId,
)

DISK = TierName("disk")
SLOT_BYTES = 32


class Rig:
    """A host of four slots over a tier of four places. Host slot ``n`` moves with key ``n``."""

    def __init__(self) -> None:
        self.host = HostTier(4, SLOT_BYTES)
        self.disk = MemoryTier(4, SLOT_BYTES, name=DISK)
        self.mover = TierMover(self.host, self.disk, rank=Rank(3), close_seconds=0.1)
        self.next_id = 0

    def down(self, src: list[int], dst: list[int]) -> int:
        return self.move(HOST, DISK, src, dst)

    def up(self, src: list[int], dst: list[int]) -> int:
        return self.move(DISK, HOST, src, dst)

    def move(self, src: TierName, dst: TierName, src_slots: list[int], dst_slots: list[int]) -> int:
        self.next_id += 1
        self.mover.submit(
            Transfer(
                TransferId(self.next_id),
                src,
                dst,
                as_slots(src_slots),
                as_slots(dst_slots),
                keys=keys(src_slots if src == HOST else dst_slots).array,
                within=10.0,
            )
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
    made.disk.fault = None
    made.mover.close()


def test_orders_that_cannot_be_are_refused_and_touch_nothing(rig: Rig) -> None:
    rig.down([0, 1], [0, 1])
    rig.one()
    before = rig.host.rows.copy()
    for src, dst in ((DEVICE, DISK), (DISK, DEVICE), (HOST, DEVICE), (DEVICE, HOST)):
        with pytest.raises(InputError, match=f"no way from {src} to {dst}"):
            rig.move(src, dst, [0], [1])
    with pytest.raises(InputError, match="places 0 to 3"):
        rig.down([0], [9])
    with pytest.raises(InputError, match="host slots are 0 to 3, asked for 9 to 9"):
        rig.down([9], [0])
    with pytest.raises(InputError, match="without keys or deadline"):
        rig.mover.submit(Transfer(TransferId(77), HOST, DISK, as_slots([0]), as_slots([0])))
    assert rig.mover.drain(1) == []
    assert (rig.host.rows == before).all()


def test_tiers_of_different_blocks_do_not_fit_together() -> None:
    with pytest.raises(InputError, match="blocks of 16 bytes, the host slots of 32"):
        TierMover(HostTier(2, 32), MemoryTier(2, 16))


def test_ranks_that_share_a_host_each_move_and_find_their_own_blocks() -> None:
    """Whatever the transfer, a block is looked for by the rank that put it there."""
    host = HostTier(16, SLOT_BYTES)
    host.rows[:] = np.random.default_rng(4).integers(0, 256, (16, SLOT_BYTES), dtype=np.uint8)
    kept = host.rows.copy()
    disks = [KeyedMemoryTier(SLOT_BYTES, name=DISK) for _ in range(3)]
    movers = [
        SharedMover(TierMover(host, disk, rank=Rank(r)), rank=Rank(r), num_ranks=3)
        for r, disk in enumerate(disks)
    ]

    def every(transfer: Transfer | Question) -> list[Receipt]:
        receipts = []
        for mover in movers:
            if isinstance(transfer, Question):
                mover.ask(transfer)
            else:
                mover.submit(transfer)
            receipts += mover.drain(10)
        return receipts

    def move(number: int, src: TierName, slots: list[int], order: list[int]) -> list[Receipt]:
        ends = (as_slots(slots), NO_SLOTS) if src == HOST else (NO_SLOTS, as_slots(slots))
        dst = DISK if src == HOST else HOST
        rows = keys(order).array
        return every(Transfer(TransferId(number), src, dst, *ends, keys=rows, within=9.0))

    numbers = list(range(12))
    receipts = move(1, HOST, numbers, numbers)
    assert [receipt.outcome for receipt in receipts] == [Outcome.OK] * 3
    assert sum(len(disk._blocks) for disk in disks) == 12, "stored once"
    disks[1].lose(keys(numbers))
    gone = {n for n in numbers if int(keys([n]).array[0, 0]) % 3 == 1}
    assert gone
    host.rows[:] = 0xEE
    receipts = move(5, DISK, numbers[::-1], numbers)
    failed = {at for receipt in receipts for at in receipt.failed}
    assert failed == gone, "positions are those of the whole transfer"
    for number in set(numbers) - gone:
        assert (host.rows[11 - number] == kept[number]).all()
    receipts = every(Question(TransferId(6), DISK, keys(numbers).array, 9.0))
    assert {at for receipt in receipts for at in receipt.failed} == gone
    assert [r.outcome for r in move(7, HOST, [0], [0])].count(Outcome.OK) == 3
    movers[0].forget()
    assert not disks[0]._blocks
    disks[2].go_away("pulled")
    assert movers[2].health() == Health(Rank(2), DISK, "pulled")
    assert key(0) not in disks[0]._blocks
    for mover in movers:
        mover.close()
