"""Integers are taken as they are or refused, at every door that takes block numbers or tokens."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvferry
from kvferry.cache.slots import as_slots
from kvferry.core.quantities import integer, integers
from kvferry.errors import InputError

BLOCKS, TOKENS = 9, 4


def short(value: object) -> str:
    try:
        return repr(value)[:40] if not isinstance(value, memoryview) else "memoryview"
    except ValueError:  # Python does not write integers of 5000 digits
        return "huge"


NO_INTEGERS: list[Any] = [
    [5.2, 5.9],
    [1.0, 2.0],
    [True, 2],
    [np.True_, 2],
    ["5", "6"],
    [b"5", b"6"],
    [None, 1],
    [Decimal(5), Decimal(6)],
    [Fraction(1), 2],
    [1, 2**63],
    [1, -(2**63) - 1],
    [1, 10**5000],
    [[1, 2]],
    [[1], [2]],
    "12",
    b"12",
    bytearray(b"12"),
    memoryview(b"12"),
    {1, 2},
    {1: 2, 2: 1},
    12,
    None,
    1.5,
    np.array([5.2, 5.9]),
    np.array([1.0, 2.0]),
    np.array([True, False]),
    np.array([1, 2], dtype=object),
    np.array(["1", "2"]),
    np.array([[1, 2]]),
    np.array([1, 2**63], dtype=np.uint64),
    np.array(["2020-01-01", "2020-01-02"], dtype="M8[D]"),
]


@pytest.mark.parametrize("blocks", NO_INTEGERS, ids=short)
def test_block_numbers_that_are_no_integers_are_refused_everywhere(blocks: Any) -> None:
    """5.2 and 5.9 counted as two blocks, and both landed in block 5."""
    kv = np.arange(BLOCKS * 8, dtype=np.uint8).reshape(BLOCKS, 8)
    before = kv.copy()
    with kvferry.attach([kv], model="m", block_tokens=TOKENS, host="4KiB") as ferry:
        keys = ferry.keys(range(2 * TOKENS))
        with pytest.raises(InputError, match="device blocks"):
            ferry.store(keys, blocks)
        assert ferry.wait(ferry.store(keys, [0, 1])).num_blocks == 2
        hit = ferry.match(keys)
        with pytest.raises(InputError, match="device blocks"):
            ferry.load(hit, blocks)
        assert np.array_equal(kv, before)
        assert ferry.wait(ferry.load(hit, [2, 3])).ok
    with pytest.raises(InputError, match="slots"):
        as_slots(blocks)


@pytest.mark.parametrize(
    "blocks",
    [
        [3, 4],
        (3, 4),
        range(3, 5),
        [np.int32(3), 4],
        np.array([3, 4], np.uint8),
        np.array([3, 0, 4, 0], ">i4")[::2],
        np.array([3, 4], np.uint64),
    ],
    ids=repr,
)
def test_any_form_of_integers_will_do(blocks: Any) -> None:
    assert integers(blocks, "x").tolist() == [3, 4]
    assert as_slots(blocks).tolist() == [3, 4]


def test_an_array_of_the_right_kind_is_not_copied_and_slots_are() -> None:
    array = np.arange(5)
    assert integers(array, "x") is array
    slots = as_slots(array)
    assert not np.shares_memory(slots, array)
    assert not slots.flags.writeable


@given(
    st.lists(
        st.integers(-(2**65), 2**65) | st.floats() | st.booleans() | st.none() | st.text(max_size=2)
    )
)
def test_a_list_comes_back_equal_or_not_at_all(items: list[Any]) -> None:
    whole = all(type(item) is int and -(2**63) <= item < 2**63 for item in items)
    if whole:
        assert integers(items, "x").tolist() == items
    else:
        with pytest.raises(InputError, match="x must"):
            integers(items, "x")


def test_one_integer() -> None:
    assert integer(np.int8(3), "x") == 3
    for bad in (3.0, True, np.True_, "3", None):
        with pytest.raises(InputError, match="x must be an integer"):
            integer(bad, "x")
