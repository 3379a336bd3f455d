"""Transfers in flight: they land when every rank has answered and end their leases once."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.cache.leases import Ending, Lease, Purpose
from kvferry.config import Config
from kvferry.errors import InputError, ReceiptError
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


def test_lands_when_all_ranks_answered_in_any_order() -> None:
    sky = Sky(3)
    first, second = sky.launch(), sky.launch()
    assert sky.transfers.settle([ok(second, 2), ok(first, 1), ok(first, 0)]) == []
    assert sky.owner.endings == []
    landed = sky.transfers.settle([ok(first, 2), ok(second, 0)])
    assert [flight.transfer.id for flight in landed] == [first]
    assert landed[0].ok
    assert sky.owner.endings == [Ending.COMMIT]
    assert sky.transfers.num_in_flight == 1
    sky.transfers.settle([ok(second, 1)])
    assert sky.transfers.counts.landed == 2
    assert sky.transfers.counts.bytes_moved == {(DEVICE, HOST): 60}


@pytest.mark.parametrize(
    ("purpose", "dst", "good", "bad"),
    [
        (Purpose.WRITE, HOST, Ending.COMMIT, Ending.ABORT),
        (Purpose.READ, DEVICE, Ending.RELEASE, Ending.SPOIL),
        (Purpose.COPY, DISK, Ending.RELEASE, Ending.RELEASE),
        (Purpose.WRITE, DISK, Ending.COMMIT, Ending.ABORT),
    ],
)
def test_one_failing_rank_fails_it_for_all(
    purpose: Purpose, dst: TierName, good: Ending, bad: Ending
) -> None:
    sky = Sky(2)
    fine, broken = sky.launch(purpose, dst=dst), sky.launch(purpose, dst=dst)
    sky.transfers.settle([ok(fine, 0), ok(fine, 1), failed(broken, 1, "cable")])
    assert sky.owner.endings == [good]
    (flight,) = sky.transfers.settle([ok(broken, 0)])
    assert not flight.ok
    assert flight.reason == "rank 1: cable"
    assert sky.owner.endings == [good, bad]
    assert sky.transfers.counts.failed == 1


@pytest.mark.parametrize(
    ("receipt", "words"),
    [
        (ok(1, 0), ["transfer 1", "only 1"]),
        (ok(-1, 0), ["transfer -1", "only 1"]),
        (ok(0, 2), ["rank 2", "0 to 1"]),
        (ok(0, -1), ["rank -1", "0 to 1"]),
    ],
)
def test_a_receipt_that_answers_nothing_is_refused_before_any_is_taken(
    receipt: Receipt, words: list[str]
) -> None:
    sky = Sky(2)
    transfer = sky.launch()
    with pytest.raises(ReceiptError) as error:
        sky.transfers.settle([ok(transfer, 0), ok(transfer, 1), receipt])
    assert all(word in str(error.value) for word in words)
    assert sky.owner.endings == []
    assert sky.transfers.counts.landed == 0
    assert len(sky.transfers.settle([ok(transfer, 0), ok(transfer, 1)])) == 1


def test_a_deadline_ends_the_waiting_and_not_the_claim() -> None:
    sky = Sky(2)
    transfer = sky.launch(deadline=5.0)
    sky.transfers.settle([ok(transfer, 0)])
    assert sky.transfers.expire(4.9) == []
    (flight,) = sky.transfers.expire(5.0)
    assert flight.overdue
    assert flight.reason == "no answer in time from rank 1"
    assert sky.owner.endings == []
    assert sky.transfers.expire(6.0) == [], "told once"
    assert list(sky.transfers.in_flight()) == [], "nobody else waits for it"
    assert sky.transfers.num_in_flight == 1
    (flight,) = sky.transfers.settle([ok(transfer, 1)])
    assert not flight.ok
    assert sky.owner.endings == [Ending.ABORT]


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


def test_a_lost_rank_is_not_waited_for() -> None:
    sky = Sky(2)
    half, whole = sky.launch(), sky.launch()
    sky.transfers.settle([ok(half, 0)])
    landed = sky.transfers.lose_rank(Rank(1), "died")
    assert [(f.transfer.id, f.reason) for f in landed] == [(half, "died")]
    (flight,) = sky.transfers.settle([ok(whole, 0)])
    assert flight.reason == "died"
    later = sky.launch()
    (flight,) = sky.transfers.settle([ok(later, 0)])
    assert flight.reason == "died"
    assert sky.transfers.settle([ok(half, 1)]) == []
    assert sky.owner.endings == [Ending.ABORT] * 3


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_rank_that_does_not_exist_cannot_be_lost(rank: int) -> None:
    sky = Sky(2)
    transfer = sky.launch()
    with pytest.raises(InputError, match=f"rank {rank} .* 0 to 1"):
        sky.transfers.lose_rank(Rank(rank), "typo")
    (flight,) = sky.transfers.settle([ok(transfer, 0), ok(transfer, 1)])
    assert flight.ok


def test_closing_ends_everything_once() -> None:
    sky = Sky(2)
    sky.launch()
    sky.launch(Purpose.READ, dst=DEVICE)
    sky.transfers.close()
    sky.transfers.close()
    assert sky.owner.endings == [Ending.ABORT, Ending.SPOIL]
    assert sky.transfers.num_in_flight == 0


# -- below the host --------------------------------------------------------------------------------


def partial(transfer: int, rank: int, *positions: int, reason: str = "worn") -> Receipt:
    return Receipt(TransferId(transfer), Rank(rank), Outcome.PARTIAL, reason, failed=positions)


def test_what_failed_on_any_rank_is_lost_and_the_rest_counts() -> None:
    sky = Sky(3)
    up = sky.move(DISK, HOST, 4, Purpose.READ, Purpose.WRITE)
    assert sky.transfers.settle([partial(up, 0, 3), ok(up, 1)]) == []
    assert sky.owner.endings == [], "not before every rank has answered"
    (flight,) = sky.transfers.settle([partial(up, 2, 1, 3)])
    assert flight.ok
    assert flight.lost.tolist() == [False, True, False, True]
    assert flight.note == "rank 0: worn"
    assert sky.owner.endings == [Ending.RELEASE, Ending.COMMIT]
    assert sky.owner.failed == [[1, 3], [1, 3]]
    assert (sky.transfers.counts.failed, sky.transfers.counts.lost_blocks) == (0, 2)


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


def test_a_question_is_answered_by_all_ranks_and_counts_as_no_transfer() -> None:
    sky = Sky(2)
    question = sky.ask(3)
    assert list(sky.transfers.in_flight()) == []
    assert sky.transfers.num_awaited == 1
    assert sky.transfers.settle([partial(question, 0, 0)]) == []
    (flight,) = sky.transfers.settle([partial(question, 1, 2)])
    assert flight.lost.tolist() == [True, False, True]
    counts = sky.transfers.counts
    assert (counts.launched, counts.landed, counts.lost_blocks) == (0, 0, 0)
    assert not counts.bytes_moved


def test_a_question_whose_time_is_up_is_over() -> None:
    sky = Sky(2)
    question = sky.ask(2, deadline=5.0)
    sky.transfers.settle([ok(question, 0)])
    (flight,) = sky.transfers.expire(5.0)
    assert flight.lost.all()
    assert sky.transfers.num_in_flight == 0
    assert sky.transfers.counts.overdue == 0
    assert sky.transfers.settle([ok(question, 1)]) == []
    assert sky.transfers.counts.stale_receipts == 1


def test_giving_up_a_tier_ends_the_waiting_for_it_alone() -> None:
    sky = Sky(1)
    up = sky.move(DISK, HOST, 2, Purpose.READ, Purpose.WRITE)
    store = sky.move(DEVICE, HOST, 2, Purpose.WRITE)
    question = sky.ask(2)
    sky.transfers.give_up(DISK, "unplugged")
    late = sky.transfers.expire(0.0)
    assert [(f.transfer.id, f.reason) for f in late] == [(up, "unplugged"), (question, "unplugged")]
    assert sky.owner.endings == []
    assert sky.transfers.num_in_flight == 2
    sky.transfers.settle([ok(up, 0), ok(store, 0)])
    assert sky.owner.endings == [Ending.SPOIL, Ending.ABORT, Ending.COMMIT]
