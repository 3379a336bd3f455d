"""What is stored of several groups when there is no room for all: every small case, brute force.

Seen red with: groups served one after the other; a window's blocks taken from its first one on;
a window passed by that got nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tests.fakes.desk import Desk, story
from tests.fakes.pools import forget

from kvferry.cache import reach
from kvferry.scheduler.stores import usable

SIZE, COUNT = 4, 3
KNOWN, NEW, LOST = range(3)
WINDOW = reach.SlidingWindow(SIZE, window=2 * SIZE + 1)
OTHERS: list[reach.Group] = [
    WINDOW,
    reach.ChunkedLocal(SIZE, chunk=2 * SIZE),
    reach.RecurrentState(SIZE),
    reach.FullAttention(SIZE),
]
States = Sequence[tuple[int, ...]]


def masks(states: States) -> tuple[list[reach.BoolArray], list[reach.BoolArray]]:
    held = [np.array([each != LOST for each in group]) for group in states]
    return held, [np.array([each == NEW for each in group]) for group in states]


def read(groups: Sequence[reach.Group], tokens: int) -> Iterator[tuple[int, int]]:
    for g, group in enumerate(groups):
        yield from ((g, place) for place in reach.needed(group, tokens))


def best(groups: Sequence[reach.Group], states: States, room: int) -> int:
    """The longest hit for which there is room, in the plainest words."""
    found = 0
    for tokens in range(SIZE, COUNT * SIZE + 1, SIZE):
        blocks = [states[g][place] for g, place in read(groups, tokens)]
        if LOST not in blocks and blocks.count(NEW) <= room:
            found = tokens
    return found


def store(
    groups: Sequence[reach.Group], states: States, todo: dict[int, range], room: int
) -> tuple[list[tuple[int, ...]], dict[int, range]] | None:
    """What is there afterwards, and what is still to be stored; None if nothing is of use."""
    held, new = masks(states)
    above = min(part.start for part in todo.values()) * SIZE
    chosen = usable(groups, todo, held, new, [(room, [1] * 2)], above=above, alignment=SIZE)
    if chosen is None:
        return None
    after = [list(group) for group in states]
    num_taken = 0
    for g, part in chosen.items():
        assert todo[g].start <= part.start <= part.stop <= todo[g].stop
        for place in part:
            if after[g][place] == NEW:
                after[g][place] = KNOWN
                num_taken += 1
    assert num_taken <= room
    return [tuple(g) for g in after], {g: range(chosen[g].stop, COUNT) for g in chosen}


def longest(groups: Sequence[reach.Group], states: States) -> int:
    known = [np.array([each == KNOWN for each in group]) for group in states]
    return reach.longest_hit(groups, known, COUNT * SIZE, alignment=SIZE)


def cases(other: reach.Group) -> Iterator[list[tuple[int, ...]]]:
    for num_known in range(COUNT + 1):
        first = (KNOWN,) * num_known + (NEW,) * (COUNT - num_known)
        for second in itertools.product((KNOWN, NEW, LOST), repeat=COUNT):
            yield [first, second]


@pytest.mark.parametrize("other", OTHERS, ids=lambda group: type(group).__name__)
@pytest.mark.parametrize("is_first", [False, True])
def test_what_is_stored_makes_the_longest_hit_there_is_room_for(
    other: reach.Group, is_first: bool
) -> None:
    groups: list[reach.Group] = [reach.FullAttention(SIZE), other]
    todo = {0: range(COUNT), 1: range(COUNT)}
    for case in cases(other):
        states = case[::-1] if is_first else case
        order = groups[::-1] if is_first else groups
        for room in range(2 * COUNT + 1):
            stored = store(order, states, todo, room)
            if stored is None:
                assert not best(order, states, 2 * COUNT)
            else:
                assert longest(order, stored[0]) == best(order, states, room)


@pytest.mark.parametrize("other", OTHERS, ids=lambda group: type(group).__name__)
@pytest.mark.parametrize("room", [1, 2, 3])
def test_bit_by_bit_the_longest_hit_of_all_is_reached(other: reach.Group, room: int) -> None:
    groups: list[reach.Group] = [reach.FullAttention(SIZE), other]
    for case in cases(other):
        states: States = case
        todo = {0: range(COUNT), 1: range(COUNT)}
        for _ in range(3 * COUNT):
            todo = {g: part for g, part in todo.items() if part}
            stored = store(groups, states, todo, room) if todo else None
            if stored is None:
                break
            states, todo = stored
        assert longest(groups, states) == best(groups, case, 2 * COUNT)


FULL = reach.FullAttention(4)


def test_with_the_bound_reached_a_windows_last_blocks_are_stored_with_the_rest() -> None:
    desk = Desk(FULL, WINDOW, max_storing_blocks=6, slots=64)
    told = story(1, 8)
    assert desk.store("a", told, 32) == {0: [0, 1, 2, 3], 1: [2, 3]}
    assert desk.scheduler.stats().shed_stores == 1
    desk.run()
    assert desk.hit(told) == 16
    assert desk.store("a", told, 32) == {0: [4, 5, 6, 7], 1: [6, 7]}
    desk.run()
    assert desk.hit(told) == 32
    desk.scheduler.check_integrity()


def test_a_window_longer_than_the_bound_is_stored_bit_by_bit() -> None:
    desk = Desk(FULL, reach.SlidingWindow(4, window=25), max_storing_blocks=3, slots=64)
    told = story(1, 8)
    for _ in range(8):
        desk.store("a", told, 32)
        desk.run()
    assert desk.hit(told) == 32
    assert desk.scheduler.stored_tokens("a") == 32


def test_a_request_set_back_behind_what_is_kept_of_one_group_goes_on() -> None:
    desk = Desk(FULL, WINDOW, max_storing_blocks=16, slots=64)
    told = story(1, 8)
    desk.keep("a", told, 32)
    forget(desk.pool, desk.scheduler.matcher.slot_keys(1, told, range(8)))
    desk.match("b", told, computed=32)
    desk.store("c", story(2, 8), 32)  # takes all the room
    assert desk.store("b", told, 32) == {}
    assert desk.store("b", told, 8) == {}
    desk.run()
    desk.store("b", told, 32)
    desk.run()
    assert desk.hit(told) == 32
