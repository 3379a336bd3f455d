"""Orders wait for the next plan; whoever owns them can still take them back."""

from __future__ import annotations

from tests.fakes.desk import LOAD, STORE, Desk, by_group, routes, story

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.types import DEVICE, HOST, TierName

DISK = TierName("disk")


def test_loads_go_first_then_moves_then_stores() -> None:
    desk = Desk(tiers=[SlotTier(DISK, Pool(32), WriteMode.THROUGH)])
    desk.store("a", story(1, 2), 8)
    desk.run()  # orders the move down
    desk.store("b", story(2, 2), 8)
    desk.match("c", story(1, 2))
    desk.load("c", 8)
    assert routes(desk.plan()) == [LOAD, (HOST, DISK), STORE]


def test_a_plan_is_sent_once() -> None:
    desk = Desk()
    desk.store("a", story(1, 2), 8)
    assert desk.scheduler.num_queued == 1
    first, second = desk.scheduler.plan(), desk.scheduler.plan()
    assert (len(first.transfers), len(second.transfers)) == (1, 0)
    assert second.step == first.step + 1
    assert not second
    assert desk.scheduler.num_queued == 0
    assert desk.scheduler.num_in_flight == 1


def test_a_load_not_sent_off_can_be_taken_back() -> None:
    desk = Desk()
    desk.keep("a", story(1, 2), 8)
    desk.match("b", story(1, 2))
    held = desk.load("b", 8)
    desk.scheduler.preempt("b")
    assert desk.plan() == []
    assert by_group(desk.scheduler.settle().released) == held
    desk.check_empty()


def test_one_requests_loads_leave_the_others() -> None:
    desk = Desk()
    for number in (1, 2):
        desk.keep(f"s{number}", story(number, 2), 8)
        desk.match(f"r{number}", story(number, 2))
        desk.load(f"r{number}", 8, first_block=10 * number)
    desk.scheduler.abort("r1")
    (sent,) = desk.plan()
    assert sent.dst_slots.tolist() == [20, 21]


def test_a_store_goes_on_without_its_request() -> None:
    desk = Desk()
    desk.store("a", story(1, 2), 8)
    desk.scheduler.preempt("a")
    desk.scheduler.abort("a")
    desk.run()
    assert desk.hit(story(1, 2)) == 8


def test_what_waits_is_counted_against_the_bounds() -> None:
    desk = Desk(block_bytes=[10])
    transit = desk.scheduler.transfers
    desk.store("a", story(1, 2), 8)
    assert transit.blocks_from_device == 2
    assert transit.num_bytes == 20
    desk.plan()
    assert transit.blocks_from_device == 2
    desk.land()
    assert transit.blocks_from_device == 0
    desk.match("b", story(1, 2))
    desk.load("b", 8)
    assert transit.blocks_to_device == 2
    assert transit.bytes_to_device == transit.num_bytes == 20
    desk.plan()
    assert transit.blocks_to_device == 2
    desk.land()
    assert transit.blocks_to_device == 0


def test_close_drops_what_was_not_sent_off() -> None:
    desk = Desk(tiers=[SlotTier(DISK, Pool(32), WriteMode.THROUGH)])
    desk.keep("a", story(1, 2), 8)
    desk.match("b", story(1, 2))
    desk.load("b", 8)
    desk.store("c", story(2, 2), 8)
    assert desk.scheduler.num_queued == 3  # a load, a store, a move down
    desk.scheduler.close()
    desk.check_empty()
    below = desk.scheduler.lower.tiers[0].pool
    assert below is not None
    assert below.num_leases == 0


def test_stores_of_different_groups_do_not_mix() -> None:
    desk = Desk(reach.FullAttention(4), reach.RecurrentState(4))
    desk.store("a", story(1, 2), 8, first_block=3)
    sent = desk.plan()
    assert [(t.group, t.src, t.src_slots.tolist()) for t in sent] == [
        (0, DEVICE, [3, 4]),
        (1, DEVICE, [3, 4]),
    ]
    slots = [slot for t in sent for slot in t.dst_slots.tolist()]
    assert len(set(slots)) == 4
