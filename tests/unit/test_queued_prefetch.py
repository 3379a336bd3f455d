"""Blocks for requests that wait in the engine's queue: there when their turn comes, and bounded."""

from __future__ import annotations

from tests.fakes.desk import Desk, story
from tests.fakes.pools import evict

from kvferry.cache.pool import Pool
from kvferry.scheduler.control import QUEUE_SECONDS, QUEUE_SHARE, Control
from kvferry.scheduler.tier import KeyedTier, SlotTier, WriteMode
from kvferry.types import HOST, MatchState, TierName

DISK = TierName("disk")
SLOTS = 128
SHARE = SLOTS // QUEUE_SHARE


def below(*numbers: int, blocks: int = 8) -> Desk:
    """Conversations that are on a tier, and nothing of them in the host."""
    desk = Desk(tiers=[SlotTier(DISK, Pool(500), WriteMode.THROUGH)], slots=SLOTS)
    for number in numbers:
        desk.keep(f"w{number}", story(number, blocks), 4 * blocks)
        desk.run()
    evict(desk.pool, SLOTS)
    return desk


def ahead(desk: Desk) -> Control:
    return desk.scheduler.control


def queue(desk: Desk, name: str, number: int, blocks: int = 8) -> None:
    """It comes to the engine's queue; nobody asks for it yet."""
    desk.scheduler.prefetch(desk.scheduler.called(name, story(number, blocks)))


def test_what_waits_is_in_the_host_when_its_turn_comes() -> None:
    desk = below(1)
    queue(desk, "a", 1)
    (move,) = desk.plan()
    assert (move.src, move.dst) == (DISK, HOST)
    desk.land()
    assert desk.match("a", story(1, 8)).state is MatchState.HIT
    assert desk.scheduler.stats().queries == 1, "counted when it asks, not before"
    desk.plan()
    assert not ahead(desk).has_prefetches
    desk.scheduler.finish("a")
    desk.check_empty()


def test_all_together_take_a_share_of_the_host_and_go_on_as_others_are_served() -> None:
    desk = below(*range(1, 7))
    for number in range(1, 7):
        queue(desk, f"r{number}", number)
    for _ in range(5):
        desk.run()
    assert desk.pool.counts.cached == SHARE == 16
    assert ahead(desk).num_queued_slots == SHARE
    for number in range(1, 7):
        assert desk.match(f"r{number}", story(number, 8)).state is MatchState.HIT, number
        desk.scheduler.finish(f"r{number}")
        for _ in range(3):
            desk.run()
    assert not ahead(desk).has_prefetches
    desk.check_empty()


def test_one_longer_than_the_share_comes_in_part() -> None:
    desk = below(1, blocks=40)
    queue(desk, "a", 1, 40)
    for _ in range(5):
        desk.run()
    assert desk.pool.counts.cached == SHARE
    match = desk.match("a", story(1, 40))
    assert match.state is MatchState.WAIT, "the rest comes when it asks"
    desk.run()
    desk.scheduler.finish("a")


def test_what_nobody_came_for_goes_first() -> None:
    """Seen red without ``_let_go``: as the youngest it would outlive what others came for."""
    desk = below(1, 2)
    desk.keep("b", story(9, 100), 400)
    desk.run()
    queue(desk, "a", 1)
    desk.run()
    desk.run()
    desk.now += QUEUE_SECONDS
    desk.run()
    assert not ahead(desk).has_prefetches
    desk.keep("c", story(8, 28), 4 * 28)
    matcher = desk.scheduler.matcher
    assert not desk.pool.cached(matcher.names[0].of(story(1, 8), range(8))).any()
    assert desk.pool.cached(matcher.names[0].of(story(9, 100), range(100))).all()


def test_who_is_gone_is_fetched_for_no_more() -> None:
    desk = below(1, 2)
    queue(desk, "a", 1)
    queue(desk, "b", 2)
    desk.scheduler.finish("b")
    desk.plan()
    assert len(desk.flying) == 1
    desk.scheduler.finish("a")
    desk.run()
    assert not ahead(desk).has_prefetches
    desk.run()
    desk.check_empty()


def test_who_leaves_before_anything_came_costs_others_nothing() -> None:
    """Seen red: all that the host had of the prompt, which it had not fetched, went first."""
    desk = Desk(tiers=[KeyedTier(TierName("far"), WriteMode.NEVER)], slots=16)
    desk.keep("b", story(2, 4), 16)
    desk.keep("c", story(1, 4), 16)
    queue(desk, "a", 1)
    desk.plan()
    assert desk.asked, "what else there is of it only the tier can tell"
    desk.scheduler.finish("a")
    desk.plan()
    assert not ahead(desk).has_prefetches
    desk.keep("d", story(3, 12), 48)
    assert desk.pool.cached(desk.scheduler.matcher.names[0].of(story(1, 4), range(4))).all()


def test_a_reset_ends_it() -> None:
    desk = below(1, 2)
    queue(desk, "a", 1)
    desk.plan()
    queue(desk, "b", 2)
    desk.scheduler.reset()
    assert not ahead(desk).has_prefetches
    desk.run()
    desk.run()
    desk.check_empty()
