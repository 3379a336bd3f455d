"""What is stored, when, and what waits: whole slots, bounds."""

from __future__ import annotations

import pytest
from tests.fakes.desk import STORE, Desk, routes, story

from kvferry.cache import reach
from kvferry.core.keys import Keys

WINDOW = reach.SlidingWindow(4, window=9)


def test_stores_of_one_step_travel_together_by_group() -> None:
    desk = Desk(reach.FullAttention(4), WINDOW, slots=64)
    for number in range(3):
        desk.store(f"r{number}", story(number, 4), 16, first_block=8 * number)
    sent = desk.plan()
    assert routes(sent) == [STORE, STORE]
    assert [t.group for t in sent] == [0, 1]
    assert [len(t) for t in sent] == [12, 12]


def test_slots_no_group_can_ever_use_are_not_stored() -> None:
    """Hits end where every group's block ends; a window block between two ends serves none."""
    desk = Desk(reach.FullAttention(16), reach.SlidingWindow(4, window=5), hash_tokens=4, slots=64)
    held = desk.store("a", story(1, 16), 64)
    assert held == {0: [0, 1, 2, 3], 1: [3, 7, 11, 15]}


def returns(desk: Desk, name: str, told: Keys, computed: int, until: int | None = None) -> int:
    """A request comes with so many tokens on the device; how many of them need no store."""
    desk.match(name, told, computed)
    request = desk.scheduler.called(name)
    request.unstored_from(until if until is not None else computed)
    return request.stored_tokens


def test_a_request_that_returns_goes_on_behind_what_is_kept() -> None:
    desk = Desk()
    told = story(1, 6)
    desk.keep("a", told, 16)
    assert returns(desk, "b", told, 16, until=18) == 16  # whole blocks
    assert returns(desk, "b", told, 16, until=12) == 16  # it never goes back
    assert desk.store("b", told, 24, first_block=8) == {0: [12, 13]}
    assert returns(desk, "c", told, 24) == 24  # on its way counts


def test_a_request_that_is_kept_whole_is_done_and_a_lost_block_is_stored_anew() -> None:
    desk = Desk()
    told = story(1, 6)
    desk.keep("a", told, 24)
    assert returns(desk, "b", told, 16, until=24) == 24
    lease = desk.scheduler.pool.lease(told)
    assert lease is not None
    lease.release([4])
    assert returns(desk, "c", told, 12, until=24) == 16
    assert desk.store("c", told, 24, first_block=8) == {0: [12]}


def test_what_is_skipped_was_used_and_stays_longer() -> None:
    desk = Desk(slots=8)
    old, new = story(1, 4), story(2, 4)
    desk.keep("a", old, 16)
    desk.keep("b", new, 16)
    returns(desk, "c", old, 16)
    desk.keep("d", story(3, 4), 16)
    assert (desk.hit(old), desk.hit(new)) == (16, 0)


def test_windows_and_old_blocks_skip_nothing() -> None:
    desk = Desk(reach.FullAttention(4), WINDOW)
    told = story(1, 4)
    desk.keep("a", told, 16)
    assert returns(desk, "b", told, 16) == 0
    desk = Desk()
    desk.match("b", told)
    desk.scheduler.reset()
    desk.keep("a", told, 16)
    assert returns(desk, "b", told, 16) == 0


def test_stores_beyond_the_bound_wait_and_are_asked_for_again() -> None:
    desk = Desk(max_storing_blocks=3)
    told = story(1, 8)
    assert desk.store("a", told, 32) == {0: [0, 1, 2]}
    assert desk.store("a", told, 32) == {}
    assert desk.scheduler.stats().shed_stores >= 1
    assert desk.scheduler.stored_tokens("a") == 12
    desk.run()
    assert desk.store("a", told, 32) == {0: [3, 4, 5]}
    desk.run()
    assert desk.store("a", told, 32) == {0: [6, 7]}
    desk.run()
    assert desk.hit(told) == 32


@pytest.mark.parametrize(("blocks", "stored"), [(12, 10), (320, 80), (400, 100)])
def test_the_bound_is_a_quarter_of_the_device_but_small_devices_store_all(
    blocks: int, stored: int
) -> None:
    """Seen red: of the 10 blocks of a request on a device of 12 blocks 3 were stored."""
    desk = Desk(blocks=blocks, slots=512)
    length = min(blocks - 2, 200)
    (ordered,) = desk.store("a", story(1, length), 4 * length).values()
    assert len(ordered) == stored


def test_loads_take_the_bytes_before_stores_do() -> None:
    desk = Desk(block_bytes=[100], max_bytes_in_flight="450B")
    desk.keep("a", story(1, 4), 16)
    desk.match("b", story(1, 4))
    desk.load("b", 16)
    assert desk.store("c", story(2, 4), 16) == {}
    desk.run()
    assert desk.store("c", story(2, 4), 16) == {0: [0, 1, 2, 3]}


def test_what_is_stored_already_takes_none_of_the_room() -> None:
    """A returning conversation has a long stored beginning; its new end must not wait for that."""
    desk = Desk(max_storing_blocks=2, slots=64)
    told = story(1, 20)
    for end in range(8, 65, 8):
        desk.store("a", told, end)
        desk.run()
    assert desk.hit(told[:16]) == 64
    assert desk.store("b", told, 72) == {0: [16, 17]}


def test_several_groups_wait_while_a_bound_is_reached_and_then_go_whole() -> None:
    """Seen red: the first group took the room, and without a window's end it served no request."""
    desk = Desk(reach.FullAttention(4), WINDOW, max_storing_blocks=8, slots=64)
    told = story(1, 4)
    desk.store("a", told, 16)
    assert desk.store("b", story(2, 4), 16) == {}
    assert desk.scheduler.stats().shed_stores == 1
    assert desk.scheduler.stored_tokens("b") == 0
    desk.run()
    assert desk.store("b", story(2, 4), 16) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    desk.run()
    assert desk.hit(told) == desk.hit(story(2, 4)) == 16
    desk.check_empty()


def test_a_store_of_several_groups_may_pass_a_bound_that_is_not_reached() -> None:
    """Else it would wait for as long as smaller stores are on their way."""
    desk = Desk(reach.FullAttention(4), WINDOW, max_storing_blocks=12, slots=64)
    desk.store("a", story(1, 4), 16)
    assert desk.store("b", story(2, 8), 32) == {0: [*range(8)], 1: [*range(8)]}
    assert desk.store("c", story(3, 1), 4) == {}
    desk.run()
    assert desk.hit(story(2, 8)) == 32
