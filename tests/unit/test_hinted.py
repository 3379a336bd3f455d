"""What a request's hints do, through the scheduler: loads, stores, and what stays."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys as crafted
from tests.fakes.desk import Desk, story
from tests.fakes.pools import evict

from kvferry.cache import reach
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Purpose
from kvferry.hints import Hints
from kvferry.scheduler.journal import Reason
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.types import MatchState, TierName


def say(desk: Desk, name: str, number: int, num_blocks: int, **hints: object) -> None:
    """A whole life with hints: compute, store, finish, land."""
    keys = story(number, num_blocks)
    opened = desk.scheduler.open(name, keys, Hints.read(hints))
    desk.scheduler.named[name] = opened
    desk.keep(name, keys, 4 * num_blocks)


def kept(desk: Desk, *numbers: int) -> dict[int, int]:
    """How many tokens of each story can still be had."""
    return {number: desk.pool.match(story(number, 16)) for number in numbers}


def test_a_request_that_stores_nothing_is_never_worth_a_store():
    desk = Desk()
    request = desk.scheduler.open("a", story(1, 8), Hints(max_store_tokens=0))
    request.match()
    request.run()
    assert not request.is_worth_storing(1 << 30)
    assert request.store(desk.tables(32), 32) == ()
    half = desk.scheduler.open("b", story(1, 8), Hints(max_store_tokens=16))
    half.match()
    half.run()
    assert half.is_worth_storing(32)
    assert len(half.store(desk.tables(32), 32)[0].blocks) == 4
    assert not half.is_worth_storing(1 << 30)
    half.end()
    request.end()
    desk.run()
    desk.check_empty()


def test_nothing_is_loaded_for_one_that_says_so():
    desk = Desk()
    desk.keep("a", story(1, 4), 16)
    request = desk.scheduler.open("q", story(1, 4), Hints(max_load_tokens=0))
    assert request.match(max_tokens=16).state is MatchState.MISS
    assert request.match(max_tokens=16).state is MatchState.MISS
    why = desk.scheduler.explain("q")
    assert why is not None
    assert why.reason is Reason.HINT
    assert desk.scheduler.stats().queries == 1
    some = desk.scheduler.open("r", story(1, 4), Hints(max_load_tokens=9))
    assert some.match(max_tokens=16).num_tokens == 8
    assert some.match(computed_tokens=12, max_tokens=16).state is MatchState.MISS
    request.end()
    some.end()
    desk.check_empty()


def test_a_conversation_that_is_over_goes_first_but_not_what_others_share():
    desk = Desk(slots=16)
    desk.keep("old", story(5, 4), 16)
    shared = story(1, 2)
    desk.keep("a", shared + story(2, 2), 16)
    other = shared + story(3, 4)
    request = desk.scheduler.open("b", other, Hints(ended=True))
    desk.scheduler.named["b"] = request
    desk.keep("b", other, 24)
    desk.keep("new", story(6, 8), 32)  # needs four: those of b
    assert desk.pool.match(other) == 2
    assert kept(desk, 5, 6) == {5: 4, 6: 8}


def test_priorities_order_evictions():
    desk = Desk(slots=16)
    for number, priority in ((1, 30), (2, 10), (3, 90), (4, 35)):
        say(desk, f"r{number}", number, 4, priorities=[{"priority": priority}])
    gone = []
    for number in (5, 6, 7):
        before = kept(desk, 1, 2, 3, 4)
        desk.keep(f"n{number}", story(number, 4), 16)
        gone += [n for n, count in kept(desk, 1, 2, 3, 4).items() if count < before[n]]
    assert gone == [2, 1, 4]
    assert kept(desk, 3) == {3: 4}


def test_a_priority_lasts_for_its_duration_and_covers_what_comes_before():
    desk = Desk(slots=32)
    ranges = [{"token_start": 8, "token_end": 16, "priority": 80, "duration_ms": 10_000}]
    say(desk, "a", 1, 8, priorities=ranges)
    assert desk.scheduler.stats().pool.pinned == 4  # blocks 2 and 3, and what they follow
    desk.keep("b", story(2, 28), 112)
    assert kept(desk, 1) == {1: 4}
    desk.now += 11
    desk.keep("c", story(3, 32), 128)
    assert kept(desk, 1) == {1: 0}


class Counted:
    """A chain that counts how often all of it is named."""

    def __init__(self, keys):
        self._keys, self.num_named = keys, 0

    def __len__(self):
        return len(self._keys)

    def __getitem__(self, position):
        return self._keys[position]

    def keys(self):
        self.num_named += 1
        return self._keys


@pytest.mark.parametrize("below", [False, True])
def test_of_one_that_is_not_here_only_the_first_block_is_named(below):
    tiers = [SlotTier(TierName("disk"), Pool(16), WriteMode.THROUGH)] if below else ()
    desk, hints = Desk(tiers=tiers), Hints(pin_seconds=60)
    for number, is_here in ((1, False), (2, True)):
        if is_here:
            desk.keep("before", story(number, 4), 16)
        chain = Counted(story(number, 4))
        request = desk.scheduler.open("it", chain, hints)
        request.end()
        assert (chain.num_named > 0) == (is_here or below), "what lies below is looked for, too"
        assert desk.pool.counts.pinned == (4 if is_here else 0)


def test_of_several_groups_each_is_looked_for():
    desk = Desk(reach.FullAttention(4), reach.FullAttention(4))
    keys = story(1, 4)
    lease = desk.pool.reserve(desk.scheduler.matcher.names[1].all(keys))
    assert lease is not None
    lease.commit()
    desk.scheduler.open("it", keys, Hints(pin_seconds=60)).end()
    assert desk.pool.counts.pinned == 4


def test_over_ends_what_was_said_of_going_on_but_no_pin():
    desk = Desk(slots=16, pin_share=0.5)
    for number in (1, 2):
        say(desk, f"a{number}", number, 4, continues="10min")
    keys = story(1, 4)
    desk.scheduler.control.pin(keys[:2], 60.0)
    desk.scheduler.control.hint(keys, Hints(ended=True))
    assert desk.scheduler.stats().pool.pinned == 6, "two pinned, and the other conversation's"
    for number in range(10, 14):
        desk.keep(f"n{number}", story(number, 4), 16)
    assert kept(desk, 1, 2) == {1: 2, 2: 4}
    desk.pool.check_integrity()


def test_making_room_looks_at_few_blocks_that_should_go_first_and_cannot() -> None:
    pool = Pool(2000)
    for start in range(0, 2000, 100):
        lease = pool.reserve(crafted(range(start, start + 100)), chained=False)
        assert lease is not None
        lease.commit()
    leased = pool.lease(crafted(range(1000)), Purpose.COPY)
    assert leased is not None
    for slots in np.split(leased.slots, 10):
        pool.eviction.evict_first(slots, 0)
    with mock.patch.object(pool.table, "is_idle", wraps=pool.table.is_idle) as is_idle:
        assert evict(pool, 5) == 5
    assert max(len(call.args[0]) for call in is_idle.call_args_list) == 5 + 64
    leased.release()
    assert evict(pool, 1000) == 1000
    assert pool.match(crafted(range(1000))) == 0


def test_a_store_may_let_the_hold_on_its_own_beginning_give_way():
    """Seen red: the beginning was claimed twice, and was not counted as cached afterwards."""
    desk = Desk(slots=4)
    say(desk, "a", 1, 1, continues=True)
    assert desk.pool.counts.pinned == 1
    say(desk, "b", 1, 5)  # one more than there are
    assert desk.pool.match(story(1, 5)) == 4
    desk.pool.check_integrity()
    desk.keep("c", story(2, 4), 16)
    assert kept(desk, 1, 2) == {1: 0, 2: 4}
    desk.check_empty()


BOUND = (
    "12 blocks are not pinned on host: pins and TTLs hold 4 of at most 4 blocks there (pin_share)"
)


@pytest.mark.parametrize(
    "said",
    [
        {"continues": True},
        {"priorities": [{"priority": 80}]},
        {"priorities": [{"token_start": n, "token_end": n + 32, "priority": 80} for n in (0, 32)]},
        {"priorities": [{"priority": 80}], "continues": "30s"},
        {"priorities": [{"priority": 80}], "pin_seconds": 60},
    ],
)
def test_whatever_is_not_held_the_refusal_says_so_once(said):
    """Seen red: only a keep said it."""
    desk = Desk(slots=16)
    say(desk, "a", 1, 16, **said)
    entry = desk.scheduler.journal("a")
    assert entry is not None
    assert entry.refused == (BOUND,)
    assert desk.scheduler.control.hint(story(1, 16), Hints.read(said)).refused == (BOUND,)


def test_what_was_said_to_matter_little_after_all_is_not_refused():
    desk = Desk(slots=16)
    high, low = {"priority": 80}, {"token_start": 16, "priority": 10}
    say(desk, "a", 1, 16, priorities=[high, low])
    entry = desk.scheduler.journal("a")
    assert entry is not None
    assert entry.refused == ()
    assert desk.pool.counts.pinned == 4
