"""Tiers that know keys themselves: asked once, believed for a while, waited for not for long."""

from __future__ import annotations

from tests.fakes.desk import LOAD, Desk, routes, story
from tests.unit.test_tiers import settle_down

from kvferry.cache import reach
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
    return desk.scheduler.matcher.slot_keys(0, told, range(len(told)))


def test_a_stranger_is_asked_about_and_then_brought_up() -> None:
    """Another server has put it there: we only learn of it by asking."""
    desk = Desk(tiers=[keyed()], slots=32)
    told = story(1, 4)
    assert desk.match("b", told).state is MatchState.WAIT
    assert desk.plan() == []
    (question,) = desk.asked
    assert (question.tier, Keys(question.keys)) == (STORE_NAME, slot_keys(desk, told))
    assert desk.match("b", told).state is MatchState.WAIT
    desk.say(slot_keys(desk, told))
    assert desk.match("b", told).state is MatchState.WAIT
    (move,) = desk.plan()
    assert (move.src, move.dst, len(move), len(move.src_slots)) == (*UP, 4, 0)
    assert move.keys is not None
    assert Keys(move.keys) == slot_keys(desk, told)
    desk.land()
    assert desk.match("b", told).num_tokens == 16
    desk.load("b", 16)
    assert routes(desk.plan()) == [LOAD]
    assert desk.land().loaded == ("b",)
    assert desk.scheduler.stats().asked == {STORE_NAME: (4, 4)}
    desk.scheduler.finish("b")
    desk.check_empty()


def test_answers_are_believed_for_a_while_only() -> None:
    desk = Desk(tiers=[keyed(remember=10)])
    told = story(1, 4)
    desk.match("b", told)
    desk.plan()
    desk.say(Keys.empty())
    desk.match("b", told)
    desk.scheduler.finish("b")
    desk.now = 9.0
    assert desk.match("c", told).state is MatchState.MISS
    desk.scheduler.finish("c")
    desk.now = 10.5
    assert desk.match("d", told).state is MatchState.WAIT


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


def test_no_request_waits_for_an_answer_past_its_deadline() -> None:
    desk = Desk(tiers=[keyed()], lookup_deadline=1)
    told = story(1, 4)
    desk.match("b", told)
    desk.plan()
    desk.now = 0.9
    desk.scheduler.settle()
    assert desk.match("b", told).state is MatchState.WAIT
    desk.now = 1.1
    desk.scheduler.settle()
    assert desk.match("b", told).state is MatchState.MISS
    assert desk.scheduler.num_in_flight == 0, "nothing is left of a question nobody answers"
    desk.say(slot_keys(desk, told))  # too late
    assert desk.match("b", told).state is MatchState.MISS
    assert desk.scheduler.stats().stale_receipts == 1
    assert not desk.scheduler.lower._asking


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


def test_windows_are_asked_about_too() -> None:
    window = reach.SlidingWindow(4, window=9)
    desk = Desk(reach.FullAttention(4), window, tiers=[keyed()], slots=64)
    told = story(1, 6)
    desk.match("b", told)
    desk.plan()
    (question,) = desk.asked
    assert len(question) == 12
    desk.say(Keys(question.keys))
    assert desk.match("b", told).state is MatchState.WAIT
    assert sum(map(len, desk.plan())) == 8  # six and the last two
    desk.land()
    assert desk.match("b", told).num_tokens == 24


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
