"""The contract of eviction orders, run against every one we have.

A new policy joins by a line in ``ORDERS``. What holds for all: which slots are in the order, how
many are taken, each exactly once. Which goes first is checked against an oracle where there is one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.policy import EvictionOrder, LruOrder
from kvferry.types import as_slots

ORDERS: dict[str, Callable[[int], EvictionOrder]] = {"lru": LruOrder}
NUM_SLOTS = 12


every_order = pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS.keys())

slot_lists = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), slot_lists),
        st.tuples(st.just("discard"), slot_lists),
        st.tuples(st.just("take"), st.integers(0, NUM_SLOTS + 2)),
        st.tuples(st.just("put_back"), st.just(None)),
        st.tuples(st.just("clear"), st.just(None)),
    ),
    max_size=60,
)


class Oracle:
    """The order as an OrderedDict, one slot at a time."""

    def __init__(self) -> None:
        self.slots: OrderedDict[int, None] = OrderedDict()

    def touch(self, slots: list[int]) -> None:
        for slot in slots:
            self.slots[slot] = None
            self.slots.move_to_end(slot)

    def discard(self, slots: list[int]) -> None:
        for slot in slots:
            self.slots.pop(slot, None)

    def take_oldest(self, count: int) -> list[int]:
        return [self.slots.popitem(last=False)[0] for _ in range(min(count, len(self.slots)))]

    def put_back(self, slots: list[int]) -> None:
        for slot in reversed(slots):
            self.slots[slot] = None
            self.slots.move_to_end(slot, last=False)


def check_membership(order: EvictionOrder, members: set[int]) -> None:
    assert len(order) == len(members)
    assert set(order.peek_oldest(NUM_SLOTS).tolist()) == members
    held = order.holds(as_slots(range(NUM_SLOTS)))
    assert set(np.flatnonzero(held).tolist()) == members


@every_order
@given(steps=steps)
def test_membership(
    make: Callable[[int], EvictionOrder], steps: list[tuple[str, list[int] | int | None]]
) -> None:
    order = make(NUM_SLOTS)
    members: set[int] = set()
    taken: list[int] = []
    for what, argument in steps:
        if what == "touch":
            assert isinstance(argument, list)
            order.touch(as_slots(argument))
            members |= set(argument)
        elif what == "discard":
            assert isinstance(argument, list)
            order.discard(as_slots(argument))
            members -= set(argument)
        elif what == "take":
            assert isinstance(argument, int)
            taken = order.take_oldest(argument).tolist()
            assert len(taken) == len(set(taken)) == min(argument, len(members))
            assert set(taken) <= members
            members -= set(taken)
        elif what == "put_back":
            back = [slot for slot in taken if slot not in members]
            order.put_back(as_slots(back))
            members |= set(back)
        else:
            order.clear()
            members = set()
        check_membership(order, members)
    rest = order.take_oldest(NUM_SLOTS)
    assert set(rest.tolist()) == members
    assert len(order) == 0


@every_order
def test_what_was_put_back_goes_first_again(make: Callable[[int], EvictionOrder]) -> None:
    order = make(NUM_SLOTS)
    order.touch(as_slots(range(6)))
    taken = order.take_oldest(3)
    order.put_back(taken)
    assert order.take_oldest(3).tolist() == taken.tolist()
    assert len(order) == 3


@every_order
def test_emptiness(make: Callable[[int], EvictionOrder]) -> None:
    order = make(NUM_SLOTS)
    order.touch(as_slots(()))
    order.put_back(as_slots(()))
    order.discard(as_slots(range(NUM_SLOTS)))
    assert order.take_oldest(5).tolist() == []
    assert order.take_oldest(0).tolist() == []
    check_membership(order, set())


@given(steps=steps)
def test_lru_takes_the_longest_untouched_first(
    steps: list[tuple[str, list[int] | int | None]],
) -> None:
    order, oracle = LruOrder(NUM_SLOTS), Oracle()
    taken: list[int] = []
    for what, argument in steps:
        if what == "touch":
            assert isinstance(argument, list)
            order.touch(as_slots(argument))
            oracle.touch(argument)
        elif what == "discard":
            assert isinstance(argument, list)
            order.discard(as_slots(argument))
            oracle.discard(argument)
        elif what == "take":
            assert isinstance(argument, int)
            assert order.peek_oldest(argument).tolist() == list(oracle.slots)[:argument]
            taken = oracle.take_oldest(argument)
            assert order.take_oldest(argument).tolist() == taken
        elif what == "put_back":
            back = [slot for slot in taken if slot not in oracle.slots]
            order.put_back(as_slots(back))
            oracle.put_back(back)
        else:
            order.clear()
            oracle.slots.clear()
        check_membership(order, set(oracle.slots))
    assert order.take_oldest(NUM_SLOTS).tolist() == oracle.take_oldest(NUM_SLOTS)


def test_lru_over_many_laps_of_its_queue() -> None:
    """Long enough that the queue of touches is compacted again and again."""
    order, oracle = LruOrder(NUM_SLOTS), Oracle()
    rng = np.random.default_rng(5)
    for lap in range(3000):
        touched = rng.permutation(NUM_SLOTS)[: rng.integers(0, NUM_SLOTS + 1)].tolist()
        order.touch(as_slots(touched))
        oracle.touch(touched)
        if lap % 7 == 0:
            count = int(rng.integers(0, 6))
            taken = oracle.take_oldest(count)
            assert order.take_oldest(count).tolist() == taken
            order.put_back(as_slots(taken[: count // 2]))
            oracle.put_back(taken[: count // 2])
        assert len(order) == len(oracle.slots)
    assert order.take_oldest(NUM_SLOTS).tolist() == oracle.take_oldest(NUM_SLOTS)
