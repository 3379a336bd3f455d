"""The index against a plain dict, also where every key wants the same row and the same tag."""

from __future__ import annotations

import pytest
from tests.fakes.crafted_keys import colliding_keys, keys

from kvferry.cache.index import Index
from kvferry.cache.slots import as_slots
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOT


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
