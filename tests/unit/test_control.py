"""Actions from outside, through the scheduler: look up, pin, unpin, prefetch, drop."""

from __future__ import annotations

import pytest
from tests.fakes.desk import Desk, story

from kvferry.cache.events import EventKind
from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.scheduler.control import MOST_PREFETCHES
from kvferry.scheduler.tier import KeyedTier, SlotTier, WriteMode
from kvferry.types import TierName

DISK = TierName("disk")


def below(desk_slots: int = 8) -> Desk:
    """A small host above a tier that has everything that was stored."""
    disk = SlotTier(DISK, Pool(64), WriteMode.THROUGH)
    return Desk(slots=desk_slots, tiers=[disk])


def let_all_land(desk: Desk) -> None:
    for _ in range(50):
        desk.run()
        scheduler = desk.scheduler
        if not (scheduler.num_in_flight or scheduler.num_queued or scheduler.control.is_busy):
            return


def test_a_look_up_says_what_is_where_and_changes_nothing():
    desk = below()
    desk.keep("a", story(1, 6), 24)
    let_all_land(desk)
    desk.keep("b", story(2, 8), 32)
    let_all_land(desk)
    before = desk.scheduler.stats()
    told = desk.scheduler.control.lookup(story(1, 6))
    assert (told.tokens, told.host_tokens, told.lower_tokens) == (24, 0, 24)
    assert desk.scheduler.control.lookup(story(2, 8)).host_tokens == 32
    assert desk.scheduler.control.lookup(story(7, 3)).host_tokens == 0
    assert desk.scheduler.stats() == before


def test_a_prefetch_asks_a_tier_that_finds_blocks_by_their_keys():
    desk = Desk(slots=32, tiers=[KeyedTier(DISK)])
    control = desk.scheduler.control
    assert control.lookup(story(1, 4)).unknown_blocks == 4
    assert control.prefetch(story(1, 4)).is_under_way
    desk.plan()
    desk.say(story(1, 4))
    let_all_land(desk)
    assert not control.is_busy
    assert control.lookup(story(1, 4)).host_tokens == 16
    assert control.prefetch(story(2, 4)).is_under_way
    desk.plan()
    desk.say(story(9, 1))  # it has nothing of it
    let_all_land(desk)
    assert not control.is_busy
    desk.check_empty()


def test_a_prefetch_that_fails_or_is_forgotten_leaves_nothing():
    desk = below(desk_slots=16)
    desk.keep("a", story(1, 10), 40)
    let_all_land(desk)
    desk.keep("b", story(2, 16), 64)
    let_all_land(desk)
    control = desk.scheduler.control
    assert control.prefetch(story(1, 10)).is_under_way
    desk.plan()
    desk.land(failed="the disk is gone")
    let_all_land(desk)
    assert not control.is_busy
    control.prefetch(story(1, 10))
    desk.plan()
    desk.scheduler.reset()
    assert not control.is_busy
    let_all_land(desk)
    desk.check_empty()


def test_no_more_prefetches_than_the_bound():
    desk = Desk(slots=32, tiers=[KeyedTier(DISK)])
    control = desk.scheduler.control
    for number in range(MOST_PREFETCHES):
        assert control.prefetch(story(number, 2)).is_under_way
    assert "under way already" in control.prefetch(story(99, 2)).refused[0]


def test_a_drop_forgets_what_no_other_request_goes_on_from():
    desk = below(desk_slots=32)
    shared = story(1, 2)
    desk.keep("a", shared + story(2, 3), 20)
    let_all_land(desk)
    desk.keep("b", shared + story(3, 3), 20)
    let_all_land(desk)
    told = desk.scheduler.control.drop(shared + story(2, 3))
    assert told.blocks == 6  # three in the host, three below
    assert told.refused == (
        "2 blocks stay on host: other requests go on from them",
        "2 blocks stay on disk: other requests go on from them",
    )
    assert desk.pool.match(shared + story(2, 3)) == 2
    assert desk.pool.match(shared + story(3, 3)) == 5
    desk.check_empty()


def test_requests_can_be_named_while_they_are_remembered():
    desk = Desk()
    control = desk.scheduler.control
    live = desk.scheduler.open("live", story(1, 2))
    assert control.keys_of("live") == story(1, 2)
    live.end()
    assert control.keys_of("live") is None
    for number in range(1030):
        control.remember(f"r{number}", story(number, 1))
    assert control.keys_of("r0") is None
    assert control.keys_of("r1029") == story(1029, 1)
    assert len(control.request_ids()) == 1024


def test_a_chain_that_repeats_is_not_kept_and_does_no_harm():
    """An engine's mistake: what it calls a request has a block twice."""
    desk = Desk(slots=16)
    desk.keep("a", story(1, 4), 16)
    request = desk.scheduler.open("r", story(1, 4) + story(1, 2), Hints(pin_seconds=60))
    request.end()
    desk.scheduler.check_integrity()
    assert desk.scheduler.stats().pool.pinned == 0


def test_a_hint_that_would_do_nothing_is_refused_and_says_what_would():
    """Seen red: `do_not_store` after the request was taken, and nothing came of it."""
    desk = Desk(slots=16)
    desk.keep("a", story(1, 2), 8)
    for said in ({}, {"do_not_store": True}, {"do_not_load": True}, {"tenant": "x"}):
        with pytest.raises(InputError, match="say ended, continues, pin_seconds or priorities"):
            desk.scheduler.control.hint(story(1, 2), Hints.read(said))
    some = Hints.read({"pin_seconds": 60, "do_not_store": True, "tenant": "x"})
    done = desk.scheduler.control.hint(story(1, 2), some)
    assert done.held_blocks == 2
    assert done.refused == (
        "max_store_tokens goes with a request, not after it",
        "tenant goes with a request, not after it",
    )


def spilled(desk_slots: int, *chains: Keys) -> tuple[Desk, Pool]:
    """A host above a tier to which these were spilled, each block for itself."""
    tier = SlotTier(DISK, Pool(64))
    for chain in chains:
        lease = tier.pool.reserve(chain, chained=False)
        assert lease is not None
        lease.commit()
    return Desk(slots=desk_slots, tiers=[tier]), tier.pool


def test_what_is_over_goes_first_on_a_tier_that_has_only_its_end():
    """Seen red: it was not told of what it has. And it spares what the host knows is shared."""
    shared, end, other = story(1, 2), story(2, 3), story(3, 3)
    desk, disk = spilled(32, story(9, 59), shared, end)
    desk.keep("a", shared + end, 20)
    desk.keep("b", shared + other, 20)
    desk.scheduler.control.hint(shared + end, Hints(ended=True))
    assert disk.reserve(story(8, 5), chained=False) is not None
    assert disk.cached(shared + end).tolist() == [True] * 2 + [False] * 3
    desk, disk = spilled(32, end[1:], story(9, 62))
    desk.keep("a", end, 12)
    disk.touch(end)
    desk.scheduler.control.hint(end, Hints(ended=True))
    assert disk.reserve(story(8, 2), chained=False) is not None
    assert not disk.cached(end).any()


def test_no_log_says_that_a_dropped_block_has_come_to_a_tier():
    """Seen red: a router heard of blocks that were dropped while they went down."""
    desk = below(desk_slots=16)
    found = desk.scheduler.lower.tiers[0].log.reader((EventKind.FOUND,))
    desk.keep("a", story(1, 4), 16)
    desk.plan()
    assert desk.scheduler.control.drop(story(1, 4)).blocks == 8
    let_all_land(desk)
    assert not any(len(event.all_keys()) for event in found.take())
    desk.check_empty()


def test_a_prefetch_says_what_of_it_is_not_kept_or_the_journal_does():
    """Seen red: the answer of its pin was thrown away."""
    words = "pins and TTLs hold 4 of at most 4 blocks there (pin_share)"
    desk = Desk(slots=16)
    desk.keep("a", story(1, 10), 40)
    told = desk.scheduler.control.prefetch(story(1, 10), 60.0)
    assert told.refused == (f"6 blocks are not pinned on host: {words}",)
    desk, _ = spilled(16, story(1, 10))
    told = desk.scheduler.control.prefetch(story(1, 10), 60.0)
    assert (told.is_under_way, told.refused) == (True, ())
    let_all_land(desk)
    entry = desk.scheduler.journal("prefetch-1")
    assert entry is not None
    assert entry.refused == (f"6 blocks are not pinned on host: {words}",)
    assert desk.scheduler.stats().pool.refused_pins == 6
