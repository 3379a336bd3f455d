"""Whether a key is twice in a batch, against a set.

One-line breaks that were tried; each made a test of this module fail.

- ``any_in``: keys not compared whole
- ``_any_twice``: those who met not compared with whom they met; not among themselves; more numbers
  than a cell can hold; cells that are not written, so that all are sorted after all
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import keys as duplicates
from kvferry.core.keys import KEY_WORDS, Duplicates, Keys

FEW = duplicates._FEW
CELLS = duplicates._CELLS


def with_first_words(words: list[int]) -> Keys:
    array = np.zeros((len(words), KEY_WORDS), dtype="<u8")
    array[:, 0] = words
    return Keys(array)


def spread(count: int) -> list[int]:
    """Words of different cells."""
    return [number | number << 20 for number in range(count)]


def test_a_repeat_whose_cell_has_others_too() -> None:
    """Whoever writes its number last, the two meet somebody, though perhaps not each other."""
    base = spread(FEW)
    others = [base[7] | 1 << (40 + bit) for bit in range(3)]  # of the same cell
    twice = base[7] | 1 << 50
    finder = Duplicates()
    assert not finder.any_in(with_first_words([*base, *others, twice]))
    for order in range(5):
        crowd = [*others[:order], twice, *others[order:]]
        assert finder.any_in(with_first_words([*base, twice, *crowd]))
        assert finder.any_in(with_first_words([*crowd, *base, twice]))
        assert finder.any_in(with_first_words([twice, *base, *crowd]))


def test_keys_that_share_their_first_word_are_not_one() -> None:
    array = with_first_words(spread(FEW)).array.copy()
    array[3, 0] = array[9, 0]
    array[3, 2] = 1
    finder = Duplicates()
    assert not finder.any_in(Keys(array))
    array[9, 2] = 1
    assert finder.any_in(Keys(array))


@pytest.mark.parametrize("count", [CELLS - 1, CELLS, CELLS + 1, CELLS + 5000])
def test_more_keys_than_there_are_cells(count: int) -> None:
    words = spread(count)
    finder = Duplicates()
    assert not finder.any_in(with_first_words(words))
    words[-1] = words[count // 2]
    assert finder.any_in(with_first_words(words))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=12), st.integers(0))
@settings(max_examples=200)
def test_against_a_set(crowd: list[tuple[int, int]], seed: int) -> None:
    """A few cells with many keys in each, among others that keep to themselves."""
    words = [cell | high << 40 for cell, high in crowd] + spread(FEW + 4)[4:]
    Random(seed).shuffle(words)
    assert Duplicates().any_in(with_first_words(words)) == (len(set(words)) != len(words))
