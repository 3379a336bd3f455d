"""What a request is given: over all groups, up to the right token, and asked again for little."""

from __future__ import annotations

import pytest
from tests.fakes.desk import Desk, story

from kvferry.cache import reach
from kvferry.types import MatchState

FULL = reach.FullAttention(4)
WINDOW = reach.SlidingWindow(4, window=9)


def test_own_tokens_that_end_between_two_states_are_no_error() -> None:
    desk = Desk(FULL, reach.RecurrentState(8), hash_tokens=4)
    told = story(1, 4)
    assert desk.match("a", told, computed=4).state is MatchState.MISS
    desk.keep("b", told, 16)
    assert desk.match("c", told, computed=4).num_tokens == 16


def count_looks(desk: Desk) -> list[int]:
    """Count full look-ups from now on."""
    looks: list[int] = []
    look = desk.scheduler.matcher.lookup

    def counting(*args, **kwargs):
        looks.append(1)
        return look(*args, **kwargs)

    desk.scheduler.matcher.lookup = counting
    return looks


def test_a_hit_leaves_spare_tokens_and_still_looks_once() -> None:
    """For draft models, whose last block is computed again whatever is stored."""
    desk = Desk(slots=64, spare_tokens=4)
    told = story(1, 8)
    desk.keep("a", told[:5], 20)
    looks = count_looks(desk)
    match = desk.scheduler.match

    def ask(request, computed=0):
        return match(request, told, computed_tokens=computed, max_tokens=31)

    for _ in range(10):
        assert ask("b").num_tokens == 16
    assert len(looks) == 1
    assert ask("c", computed=8).to_load == 8
    assert ask("d", computed=12).to_load == 4
    assert ask("e", computed=16).state is MatchState.MISS
    desk.keep("f", told, 28)
    assert ask("b").num_tokens == 24


def test_others_stores_do_not_make_it_look_again() -> None:
    desk = Desk(slots=64)
    told = story(1, 8)
    desk.keep("a", told[:4], 16)
    looks = count_looks(desk)
    for number in range(2, 8):
        assert desk.match("b", told).num_tokens == 16
        desk.keep(f"x{number}", story(number, 4), 16)
    assert len(looks) == 1


def test_a_request_that_paused_too_long_to_know_what_is_new_looks_again() -> None:
    desk = Desk(FULL, WINDOW, slots=64, match_deadline=1e6)
    told = story(1, 4)
    desk.scheduler.store("a", told, [list(range(4)), [-1] * 4], 16)
    desk.run()
    looks = count_looks(desk)
    desk.match("b", told)
    for number in range(300):
        desk.keep(f"x{number}", story(2 + number, 1), 4)
    desk.match("b", told)
    assert len(looks) == 2


def test_a_last_block_that_is_not_whole_is_nothing_to_wait_for() -> None:
    desk = Desk(reach.FullAttention(8), hash_tokens=4)
    told = story(1, 3)  # a block and a half
    desk.keep("a", told, 12)
    for number in range(2, 5):
        assert desk.match("b", told).num_tokens == 8
        desk.keep(f"x{number}", story(number, 2), 8)


def test_other_tokens_of_its_own_or_another_cap_make_it_look_again() -> None:
    desk = Desk()
    told = story(1, 4)
    desk.keep("a", told, 16)
    assert desk.match("b", told).to_load == 16
    assert desk.match("b", told, computed=4).to_load == 12
    assert desk.match("b", told, computed=4, most=15).to_load == 8
    assert desk.pool.num_leases == 1


def test_a_hit_that_is_not_asked_for_any_more_is_let_go() -> None:
    desk = Desk(match_deadline=5)
    told = story(1, 4)
    desk.keep("a", told, 16)
    desk.match("b", told)
    desk.now = 4.0
    desk.match("b", told)  # still wanted
    desk.now = 8.0
    desk.scheduler.settle()
    assert desk.pool.num_leases == 1
    desk.now = 9.5
    desk.scheduler.settle()
    assert desk.pool.num_leases == 0
    assert desk.scheduler.stats().expired_hits == 1
    assert desk.load("b", 16) == {}


def two_stories(**settings: object) -> Desk:
    desk = Desk(**settings)  # type: ignore[arg-type]
    desk.keep("s1", story(1, 4), 16)
    desk.keep("s2", story(2, 4), 16)
    return desk


@pytest.mark.parametrize(
    "settings",
    [{"max_loading_blocks": 6}, {"blocks": 8}, {"block_bytes": [1], "max_bytes_in_flight": "3B"}],
    ids=["blocks", "device", "bytes"],
)
def test_a_load_beyond_the_bound_waits_its_turn(settings: dict[str, object]) -> None:
    desk = Desk(max_storing_blocks=64, **settings)  # type: ignore[arg-type]
    for number in (1, 2):  # a store may take several steps where bytes are few
        for _ in range(4):
            desk.store(f"s{number}", story(number, 4), 16)
            desk.run()
        desk.scheduler.finish(f"s{number}")
    assert desk.match("a", story(1, 4)).state is MatchState.HIT
    desk.load("a", 16)
    assert desk.match("b", story(2, 4)).state is MatchState.WAIT
    desk.run()
    assert desk.match("b", story(2, 4)).state is MatchState.HIT


def test_a_rank_that_hangs_does_not_hold_up_everyone() -> None:
    desk = two_stories(max_loading_blocks=6, load_deadline=5)
    desk.match("a", story(1, 4))
    desk.load("a", 16)
    desk.plan()
    assert desk.match("b", story(2, 4)).state is MatchState.WAIT
    desk.now = 6.0
    settled = desk.scheduler.settle()
    assert [failed.request_id for failed in settled.failed] == ["a"]
    assert desk.match("b", story(2, 4)).state is not MatchState.WAIT


def test_one_that_found_nothing_may_ask_again_while_another_loads() -> None:
    """Seen red: the slots of a hit without any were put together."""
    desk = Desk(FULL, WINDOW)
    desk.keep("a", story(1, 2), 8)
    assert desk.match("b", story(2, 2)).state is MatchState.MISS
    desk.match("c", story(1, 2))
    desk.load("c", 8)
    assert desk.match("b", story(2, 2)).state is MatchState.MISS
