"""The index against a plain dict, also where every key wants the same row and the same tag."""

from __future__ import annotations

import pytest
from tests.fakes.crafted_keys import colliding_keys, keys

from kvferry.cache.index import Index
from kvferry.core.keys import Keys
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOT, as_slots


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
