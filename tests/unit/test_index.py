"""The index against a plain dict, also where every key wants the same row and the same tag."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.crafted_keys import colliding_key, colliding_keys, key, keys

from kvferry.cache.index import Index
from kvferry.core.keys import Keys
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOT, Key, as_slots

NUM_SLOTS = 24
NUM_KEYS = 40

KeyMaker = Callable[[int], Key]


def mixed_key(number: int) -> Key:
    return colliding_key(number) if number % 2 else key(number)


@pytest.mark.parametrize("make", [key, colliding_key, mixed_key])
@given(st.data())
@settings(max_examples=60)
def test_against_a_dict(make: KeyMaker, data: st.DataObject) -> None:
    index = Index(NUM_SLOTS)
    oracle: dict[int, int] = {}
    everything = Keys.from_bytes(map(make, range(NUM_KEYS)))
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            absent = sorted(set(range(NUM_KEYS)) - oracle.keys())
            free = sorted(set(range(NUM_SLOTS)) - set(oracle.values()))
            numbers = data.draw(st.lists(st.sampled_from(absent), unique=True)) if absent else []
            numbers = numbers[: len(free)]
            slots = data.draw(st.permutations(free))[: len(numbers)]
            index.insert(Keys.from_bytes(map(make, numbers)), as_slots(slots))
            oracle.update(zip(numbers, slots, strict=True))
        elif oracle:
            gone = data.draw(st.lists(st.sampled_from(sorted(oracle)), unique=True))
            index.remove(as_slots([oracle.pop(number) for number in gone]))
        found = index.find(everything)
        assert found.tolist() == [oracle.get(number, NO_SLOT) for number in range(NUM_KEYS)]
        for at, one in enumerate(everything):
            assert index.find_one(one) == found[at]
        assert len(index) == len(oracle)
        assert sorted(index.slots().tolist()) == sorted(oracle.values())
        for number, slot in oracle.items():
            assert index.key_of(slot) == make(number)


def test_find_keeps_order_and_answers_repeats() -> None:
    index = Index(8)
    index.insert(keys(range(4)), as_slots([3, 1, 7, 0]))
    assert index.find(keys([2, 9, 0, 2, 3])).tolist() == [7, NO_SLOT, 3, 7, 0]
    assert index.find(Keys.empty()).tolist() == []


def test_a_full_row_spills_and_comes_back() -> None:
    index = Index(16)
    index.insert(colliding_keys(range(10)), as_slots(range(10)))
    assert index.find(colliding_keys(range(12))).tolist() == [*range(10), NO_SLOT, NO_SLOT]
    index.remove(as_slots(range(4)))
    assert index.find(colliding_keys(range(10))).tolist() == [NO_SLOT] * 4 + [*range(4, 10)]
    index.insert(colliding_keys([20, 21]), as_slots([0, 1]))
    assert index.find(colliding_keys([20, 21, 9])).tolist() == [0, 1, 9]
    index.remove(as_slots([*range(4, 10), 0, 1]))
    assert len(index) == 0
    assert index.find(colliding_keys(range(22))).tolist() == [NO_SLOT] * 22


def test_a_tag_that_fits_is_not_a_key_that_fits() -> None:
    index = Index(4)
    index.insert(colliding_keys([0]), as_slots([2]))
    assert index.find(colliding_keys([2, 4, 6])).tolist() == [NO_SLOT] * 3


@pytest.mark.parametrize("make", [key, colliding_key])
def test_many_cycles_leave_nothing_behind(make: KeyMaker) -> None:
    index = Index(32)
    rng = np.random.default_rng(3)
    for cycle in range(200):
        count = int(rng.integers(1, 33))
        numbers = range(cycle * 100, cycle * 100 + count)
        slots = as_slots(rng.permutation(32)[:count])
        batch = Keys.from_bytes(map(make, numbers))
        index.insert(batch, slots)
        assert np.array_equal(index.find(batch), slots)
        index.remove(as_slots(rng.permutation(slots)))
        assert (index.find(batch) == NO_SLOT).all()
    assert len(index) == 0
    assert len(index.slots()) == 0


def test_clear_forgets_the_spilled_too() -> None:
    index = Index(16)
    index.insert(colliding_keys(range(12)), as_slots(range(12)))
    index.clear()
    assert len(index) == 0
    assert (index.find(colliding_keys(range(12))) == NO_SLOT).all()
    index.insert(colliding_keys(range(12)), as_slots(range(12)))
    assert index.find(colliding_keys(range(12))).tolist() == list(range(12))


def test_removing_what_is_not_there_is_our_own_fault() -> None:
    index = Index(4)
    index.insert(keys([1]), as_slots([1]))
    index.remove(as_slots([1]))
    with pytest.raises(IntegrityError, match="slot 1 should be indexed"):
        index.remove(as_slots([1]))


@pytest.mark.parametrize("num_slots", [1, 2, 3, 1000])
def test_any_size_can_be_filled(num_slots: int) -> None:
    index = Index(num_slots)
    index.insert(keys(range(num_slots)), as_slots(range(num_slots)))
    assert index.find(keys(range(num_slots))).tolist() == list(range(num_slots))
