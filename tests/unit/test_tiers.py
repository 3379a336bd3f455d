"""Below the host: blocks go down by write-through or spill, and come up in bounded pieces."""

from __future__ import annotations

from itertools import permutations

import pytest
from tests.fakes.desk import Desk, routes, story
from tests.fakes.pools import evict

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.types import (
    HOST,
    Health,
    MatchState,
    Rank,
    TierName,
)

DISK, FAR = TierName("disk"), TierName("far")
DOWN, UP = (HOST, DISK), (DISK, HOST)


def tier(slots: int = 64, write: WriteMode = WriteMode.THROUGH, name: TierName = DISK) -> SlotTier:
    return SlotTier(name, Pool(slots), write)


def below_pool(desk: Desk) -> Pool:
    pool = desk.scheduler.lower.tiers[0].pool
    assert pool is not None
    return pool


def settle_down(desk: Desk) -> None:
    """Until nothing more is ordered."""
    for _ in range(20):
        desk.plan()
        if not desk.flying:
            return
        desk.land()
    raise AssertionError("the tiers never come to rest")


def forget_host(desk: Desk) -> None:
    """The host needs its room for something else; what is below stays there."""
    assert evict(desk.pool, desk.pool.num_slots)
    assert desk.pool.counts.cached == 0


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_stores_of_a_chain_that_land_in_any_order_all_go_down(order: tuple[int, ...]) -> None:
    """Seen red where what landed before its parent was left out: it stayed out for ever."""
    desk = Desk(tiers=[tier()])
    keys = story(1, 12)
    stores = []
    for turn in range(3):
        desk.store("a", keys, 16 * (turn + 1))
        stores += desk.plan()
    for turn in order:
        desk.land(stores[turn])
    desk.scheduler.finish("a")
    desk.run()
    assert below_pool(desk).counts.cached == 12
    desk.check_empty()


def test_spill_copies_nothing_while_the_host_has_room() -> None:
    desk = Desk(tiers=[tier(write=WriteMode.SPILL)], slots=64)
    desk.keep("a", story(1, 4), 16)
    for _ in range(30):  # demand fades; an eighth of the host is free anyway
        assert desk.plan() == []


def test_a_tier_that_writes_nothing_is_left_alone_for_longer_and_longer() -> None:
    """Seen red without a rest: the same blocks were sent down again with every step."""
    desk = Desk(tiers=[tier(write=WriteMode.SPILL)], slots=16)
    desk.keep("a", story(1, 16), 64)
    sent = []
    for _ in range(1000):
        moves = desk.plan()
        sent += [desk.now] if moves else []
        desk.land(*moves, failed="read-only file system") if moves else None
        desk.now += 0.01
    assert 4 <= len(sent) <= 8, "at 0.1, 0.2, 0.4 ... seconds"
    desk.now += 30.0
    (move,) = desk.plan()
    desk.land(move)
    assert below_pool(desk).counts.cached == len(move)
    assert not desk.scheduler.writeback._rests
    desk.check_empty()


def test_spill_copies_the_coldest_ahead_of_need_and_no_more() -> None:
    desk = Desk(tiers=[tier(write=WriteMode.SPILL)], slots=16)
    desk.keep("a", story(1, 16), 64)
    for _ in range(60):  # the memory of the burst fades, an eighth stays clean
        desk.run()
    below = below_pool(desk)
    spilled = below.counts.cached
    assert 2 <= spilled <= 8 + 1
    for _ in range(20):
        desk.run()
    assert below.counts.cached == spilled
    keys = desk.scheduler.matcher.names[0].of(story(1, 16), range(16))
    assert below.cached(keys)[-2:].all()  # the end of a conversation goes first
    assert not below.cached(keys)[0]


def test_a_step_in_which_nothing_changed_looks_for_nothing_to_spill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(tiers=[tier(write=WriteMode.SPILL)], slots=16)
    desk.keep("a", story(1, 16), 64)
    settle_down(desk)
    looks: list[int] = []
    coldest = desk.pool.eviction.coldest

    def look(count: int) -> Keys:
        looks.append(count)
        return coldest(count)

    monkeypatch.setattr(desk.pool.eviction, "coldest", look)
    for _ in range(10):
        assert desk.plan() == []
    assert looks == []
    desk.now += 1.0  # what was touched or let go meanwhile
    desk.plan()
    assert len(looks) == 1
    below_pool(desk).reset()
    desk.now += 0.2
    assert routes(desk.plan()) == [DOWN]


def test_spilling_is_no_sign_of_use() -> None:
    """Reading a block to copy it down must not make it the newest."""
    desk = Desk(tiers=[tier(write=WriteMode.SPILL)], slots=16)
    desk.keep("old", story(1, 8), 32)
    desk.keep("new", story(2, 8), 32)
    for _ in range(10):
        desk.run()
    desk.keep("third", story(3, 8), 32)
    assert desk.hit(story(2, 8)) == 32


def below_only(told: Keys, **settings: object) -> Desk:
    """A desk with one tier that has this story, which the host has lost."""
    desk = Desk(tiers=[tier(slots=100)], **settings)  # type: ignore[arg-type]
    for end in range(8, 4 * len(told) + 1, 8):
        desk.store("teller", told, end)
        settle_down(desk)
    desk.scheduler.finish("teller")
    forget_host(desk)
    return desk


def test_promotion_comes_in_pieces_that_can_be_used_as_they_land() -> None:
    told = story(1, 80)
    desk = below_only(told, slots=400)
    assert desk.match("b", told).state is MatchState.WAIT
    pieces = desk.plan()
    assert [len(piece) for piece in pieces] == [32, 32, 16]
    desk.land(pieces[0])
    assert desk.match("b", told).state is MatchState.WAIT  # its own wait is for all of them
    assert desk.hit(told[:32]) == 128  # but who needs no more has it now
    desk.land(pieces[1], pieces[2])
    assert desk.match("b", told).num_tokens == 320


def test_promotion_is_bounded_by_a_share_of_the_host() -> None:
    """Many who wait for much must not flush what others use."""
    desk = below_only(story(1, 16), slots=16)
    assert desk.match("b", story(1, 16)).state is MatchState.WAIT
    (move,) = desk.plan()
    assert len(move) == 4
    assert desk.match("c", story(1, 16)).state is not MatchState.HIT
    assert desk.plan() == []
    desk.land(move)
    assert desk.match("b", story(1, 16)).num_tokens == 16


def test_what_comes_up_within_the_bound_is_of_use() -> None:
    """All of one group and nothing of the other would flush the host for nobody."""
    window = reach.SlidingWindow(4, window=9)
    desk = Desk(reach.FullAttention(4), window, tiers=[tier()], slots=32)
    told = story(1, 12)
    desk.keep("a", told, 48)
    settle_down(desk)
    forget_host(desk)
    assert desk.match("b", told).state is MatchState.WAIT  # eight slots: six and two
    assert sum(map(len, desk.plan())) == 8
    desk.land()
    match = desk.match("b", told)
    assert (match.state, match.num_tokens) == (MatchState.HIT, 24)


def test_a_longer_request_joins_and_brings_up_the_rest() -> None:
    told = story(1, 6)
    desk = below_only(told, slots=64)
    desk.match("b", told[:3])
    (first,) = desk.plan()
    assert desk.match("c", told).state is MatchState.WAIT
    (second,) = desk.plan()
    assert (len(first), len(second)) == (3, 3)
    desk.land(second)
    assert desk.match("c", told).state is MatchState.WAIT
    desk.land(first)
    assert desk.match("b", told[:3]).num_tokens == 12
    assert desk.match("c", told).num_tokens == 24


def test_no_request_joins_a_promotion_whose_time_is_up() -> None:
    told = story(1, 4)
    desk = below_only(told, slots=64, promote_deadline=3)
    desk.match("b", told)
    (hung,) = desk.plan()
    desk.flying.remove(hung)
    desk.now = 3.5
    desk.scheduler.settle()
    desk.scheduler.finish("b")
    desk.keep("c", told, 16)  # computed anew, and sent down again
    settle_down(desk)
    forget_host(desk)
    assert desk.match("d", told).state is MatchState.WAIT
    assert desk.match("e", told).state is MatchState.WAIT  # for the one that d began
    desk.run()
    assert desk.match("e", told).state is MatchState.HIT
    for request_id in "de":
        desk.scheduler.finish(request_id)
    desk.land(hung)
    desk.check_empty()


def test_a_tier_is_measured_by_the_time_in_which_it_had_something_to_bring() -> None:
    told, other = story(1, 4), story(2, 4)
    desk = below_only(told, slots=64, promote_deadline=3, block_bytes=[100])
    desk.match("b", told)
    (hung,) = desk.plan()
    desk.flying.remove(hung)
    desk.now = 3.5
    desk.scheduler.settle()
    desk.scheduler.finish("b")
    desk.keep("c", other, 16)
    settle_down(desk)
    forget_host(desk)
    desk.now = 1000.0
    assert desk.match("d", other).state is MatchState.WAIT
    desk.plan()
    desk.now = 1002.0
    desk.run()
    assert desk.scheduler.hits.worth.bandwidth_of(DISK) == 4 * 100 / 2
    desk.land(hung)
    desk.scheduler.finish("d")
    desk.check_empty()


@pytest.mark.parametrize("num_stored", [0, 4])
def test_an_outage_does_not_end_the_flush(num_stored: int) -> None:
    """Seen red: what was left, failed or stored in an outage stayed in the host alone for ever."""
    desk = Desk(tiers=[tier(write=WriteMode.SPILL)], slots=64, disk="/mnt", tier_flush="1min")
    writeback = desk.scheduler.writeback
    desk.keep("a", story(1, 16), 64)
    writeback.flush()
    desk.plan()
    desk.now += 1
    desk.scheduler.note_health(Health(Rank(0), DISK, "its cable was pulled"))
    assert not writeback.flush_is_due, "an idle engine is not stepped for nothing"
    assert not writeback.can_flush
    assert len(desk.flying) == 1
    desk.land(failed="its cable was pulled")
    desk.keep("b", story(2, num_stored), 4 * num_stored)
    writeback.flush()
    assert not desk.plan()
    assert not writeback.is_flushing
    desk.scheduler.note_health(Health(Rank(0), DISK, ""))
    while writeback.is_flushing:
        writeback.flush()
        desk.plan()
        writeback.flush()  # an idle step while the first blocks are under way
        desk.land()
        desk.now += 1
    assert below_pool(desk).counts.cached == 16 + num_stored
