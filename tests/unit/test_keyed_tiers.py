"""Tiers that know keys themselves: asked once, believed for a while, waited for not for long."""

from __future__ import annotations

from tests.fakes.desk import Desk, routes, story
from tests.unit.test_tiers import settle_down

from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.scheduler.tier import KeyedTier, SlotTier, WriteMode
from kvferry.types import HOST, Health, MatchState, Rank, TierName

STORE_NAME = TierName("store")
DISK = TierName("disk")
DOWN, UP = (HOST, STORE_NAME), (STORE_NAME, HOST)


def keyed(
    write: WriteMode = WriteMode.THROUGH, *, remember: float = 10.0, capacity: int = 1000
) -> KeyedTier:
    return KeyedTier(STORE_NAME, write, remember=remember, capacity=capacity)


def slot_keys(desk: Desk, told: Keys) -> Keys:
    return desk.scheduler.matcher.names[0].of(told, range(len(told)))


def test_an_answer_believed_for_no_time_is_not_asked_for_for_ever() -> None:
    desk = Desk(tiers=[keyed(remember=0)])
    told = story(1, 4)
    desk.match("b", told)
    desk.plan()
    desk.say(slot_keys(desk, told))
    assert desk.match("b", told).state is MatchState.MISS


def test_requests_of_one_step_share_a_question_and_later_ones_join_it() -> None:
    desk = Desk(tiers=[keyed()], slots=64)
    told = story(1, 4)
    for request in "ab":
        assert desk.match(request, told).state is MatchState.WAIT
    assert desk.match("c", story(2, 3)).state is MatchState.WAIT
    desk.plan()
    (question,) = desk.asked
    assert len(question) == 7
    assert desk.match("d", told).state is MatchState.WAIT
    assert desk.scheduler.num_queued == 0, "it is being asked already"
    desk.say(slot_keys(desk, told))
    for request in "abd":
        assert desk.match(request, told).state is MatchState.WAIT  # it comes up now, once
    assert desk.match("c", story(2, 3)).state is MatchState.MISS
    assert len(desk.plan()) == 1
    desk.land()
    for request in "abd":
        assert desk.match(request, told).num_tokens == 16


def test_no_more_is_asked_than_could_be_brought_up() -> None:
    desk = Desk(tiers=[keyed()], slots=16)  # a quarter of the host: four slots
    desk.match("b", story(1, 100))
    desk.plan()
    assert [len(question) for question in desk.asked] == [4]


def test_what_the_host_or_a_nearer_tier_has_is_not_asked_for() -> None:
    desk = Desk(tiers=[SlotTier(DISK, Pool(64), WriteMode.THROUGH), keyed(WriteMode.SPILL)])
    told = story(1, 4)
    desk.keep("a", told[:2], 8)
    settle_down(desk)
    desk.match("b", told)
    desk.plan()
    assert [Keys(question.keys) for question in desk.asked] == [slot_keys(desk, told)[2:]]


def test_a_failed_write_is_no_promise_and_is_sent_again() -> None:
    desk = Desk(tiers=[keyed(WriteMode.SPILL, remember=1)], slots=8)
    told = story(1, 8)
    desk.keep("a", told, 32)
    moves = desk.plan()
    assert moves
    assert routes(moves) == [DOWN]
    first = len(moves[0])
    desk.land(*moves, failed="full")
    assert not desk.plan(), "at once it would fail again"
    desk.now += 0.1
    again = desk.plan()
    assert len(again[0]) >= first
    desk.land()
    assert desk.plan() == [], "what is there is not sent twice"


def test_a_reset_sends_a_forget_and_drops_what_waits_to_go_down() -> None:
    """After it, an old block that arrived late would be found by whoever starts with epoch 0."""
    desk = Desk(tiers=[keyed()])
    told = story(1, 4)
    desk.keep("a", told, 16)  # its way down is ordered, not sent
    assert desk.scheduler.num_queued == 1
    desk.scheduler.reset()
    assert desk.plan() == []
    assert desk.forgotten == [STORE_NAME]
    assert desk.plan() == []
    assert desk.forgotten == [STORE_NAME], "told once"
    desk.check_empty()
    assert desk.match("b", told).state is MatchState.WAIT  # nothing is known any more


def test_a_tier_that_goes_away_ends_all_waiting_for_it_and_heals() -> None:
    desk = Desk(tiers=[keyed()], slots=64, ranks=2)
    told, other = story(1, 4), story(2, 4)
    desk.match("b", told)
    desk.plan()
    desk.say(slot_keys(desk, told), slot_keys(desk, told))
    desk.match("b", told)
    (move,) = desk.plan()
    desk.match("c", other)
    desk.plan()
    desk.scheduler.note_health(Health(Rank(1), STORE_NAME, "master is gone"))
    desk.scheduler.settle()
    assert desk.match("b", told).state is MatchState.MISS
    assert desk.match("c", other).state is MatchState.MISS
    assert desk.scheduler.stats().ailments == {STORE_NAME: "rank 1: master is gone"}
    assert desk.pool.counts.leased == 4  # rank 0 may still write there
    desk.asked = []
    assert desk.match("d", story(3, 4)).state is MatchState.MISS
    desk.keep("e", story(4, 2), 8)
    assert desk.plan() == []
    assert desk.asked == [], "it is neither asked nor written to"
    desk.land(move, failed="master is gone")
    desk.scheduler.note_health(Health(Rank(1), STORE_NAME))
    assert desk.scheduler.stats().ailments == {STORE_NAME: ""}
    assert desk.match("f", other).state is MatchState.WAIT, "asked anew: no answer is from before"
    for request in "bcdf":
        desk.scheduler.finish(request)
    desk.plan()
    desk.say(Keys.empty(), Keys.empty())
    desk.check_empty()
