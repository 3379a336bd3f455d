"""The index against a dict, wherever the keys of a chain may lie.

A lookup follows runs of slots or asks the table, depending on how long runs are. Here these lengths
are a few keys, so that small cases take every way; some tests run with the real ones. Layouts are
those that a guess from a neighbour gets wrong: runs that break, change direction or meet the last
slot, a key that moved while its old slot still holds a copy of it, another key in the middle, keys
asked for twice, from the middle, backwards, or not there.

One-line breaks of ``index.py`` that were tried; each made a test of this module fail.

- ``_run_length``: no look at ``_cell``; ``longest = len(words)``; ``find``: a run one key too long
- ``_find_in_table``: only one lane looked at; no look into the dict; only word 1 compared
- ``insert``: two keys of a batch get the same cell; the spilled are not counted for their row
- ``_note_keys``: the first run only; every slot taken to follow the one before
- ``remove``: the cell is not emptied; the slot keeps its cell; a row still counts what it spilled
- ``clear``: the table or the dict is not cleared
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.crafted_keys import colliding_key, key

from kvferry.cache import slots as index_module
from kvferry.cache.slots import Index, as_slots
from kvferry.core.keys import KEY_WORDS, Key, Keys
from kvferry.errors import IntegrityError
from kvferry.types import NO_SLOT

NUM_SLOTS = 20
NUM_KEYS = 30

KeyMaker = Callable[[int], Key]


def crowding_key(number: int) -> Key:
    """Keys of one row of the table."""
    words = np.zeros(KEY_WORDS, dtype="<u8")
    words[1] = number
    return Key(words.tobytes())


def odd_crowding_key(number: int) -> Key:
    return crowding_key(number) if number % 3 else key(number)


MAKERS: tuple[KeyMaker, ...] = (key, colliding_key, crowding_key, odd_crowding_key)


@contextmanager
def short_ways() -> Iterator[None]:
    """Every length at which a call changes its way, small enough for a few keys."""
    with mock.patch.multiple(
        index_module,
        _FIRST_LOOK=2,
        _LOOK_GROWTH=2,
        _LONG=4,
        _SHORT_RUNS=1,
        _FEW=0,
        _PIECE=3,
        _RUN=3,
    ):
        yield


class Twin:
    """An index and a dict that are told the same."""

    def __init__(self, make: KeyMaker, num_slots: int = NUM_SLOTS) -> None:
        self.make = make
        self.num_slots = num_slots
        self.index = Index(num_slots)
        self.slots: dict[int, int] = {}

    def keys(self, numbers: Sequence[int]) -> Keys:
        return Keys.from_bytes(map(self.make, numbers))

    def insert(self, numbers: Sequence[int], slots: Sequence[int]) -> None:
        """What is present, or wants a slot in use, is left out; the rest goes in one batch."""
        used = set(self.slots.values())
        pairs = [
            (number, slot)
            for number, slot in zip(numbers, slots, strict=False)
            if number not in self.slots and slot not in used
        ]
        self.index.insert(self.keys([n for n, _ in pairs]), as_slots([s for _, s in pairs]))
        self.slots.update(pairs)

    def remove(self, numbers: Sequence[int]) -> None:
        here = [number for number in dict.fromkeys(numbers) if number in self.slots]
        self.index.remove(as_slots([self.slots.pop(number) for number in here]))

    def check(self, numbers: Sequence[int]) -> None:
        expected = [self.slots.get(number, NO_SLOT) for number in numbers]
        assert self.index.find(self.keys(numbers)).tolist() == expected
        assert [self.index.find_few(self.make(number))[0] for number in numbers] == expected

    def check_all(self) -> None:
        assert len(self.index) == len(self.slots)
        assert self.index.slots().tolist() == sorted(self.slots.values())
        for number, slot in self.slots.items():
            assert self.index.key_of(slot) == self.make(number)


numbers = st.integers(0, NUM_KEYS - 1)
spans = st.tuples(numbers, st.integers(1, NUM_KEYS)).map(
    lambda span: list(range(span[0], min(NUM_KEYS, span[0] + span[1])))
)
rings = st.tuples(st.integers(0, NUM_SLOTS - 1), st.sampled_from((1, -1, 2, 7))).map(
    lambda ring: [(ring[0] + ring[1] * step) % NUM_SLOTS for step in range(NUM_SLOTS)]
)
layouts = st.one_of(
    rings, rings.map(lambda ring: list(dict.fromkeys(ring))), st.permutations(range(NUM_SLOTS))
).map(lambda slots: list(dict.fromkeys(slots)))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), spans, layouts),
        st.tuples(st.just("remove"), spans, st.none()),
        st.tuples(st.just("remove"), st.lists(numbers), st.none()),
        st.tuples(st.just("clear"), st.just([]), st.none()),
    ),
    max_size=10,
)
questions = st.lists(
    st.one_of(spans, spans.map(lambda span: span[::-1]), st.lists(numbers)), min_size=1, max_size=6
)


@pytest.mark.parametrize("make", MAKERS)
@given(steps=steps, questions=questions)
@settings(max_examples=120)
def test_wherever_the_keys_lie(
    make: KeyMaker,
    steps: list[tuple[str, list[int], list[int] | None]],
    questions: list[list[int]],
) -> None:
    twin = Twin(make)
    with short_ways():
        for what, asked, slots in steps:
            if what == "insert":
                assert slots is not None
                twin.insert(asked, slots)
            elif what == "remove":
                twin.remove(asked)
            else:
                twin.index.clear()
                twin.slots.clear()
            twin.check(range(NUM_KEYS))
            for question in questions:
                twin.check(question)
    twin.check_all()


def test_runs_of_every_length_with_the_real_ones() -> None:
    """Chains cut into pieces that lie anywhere, holes and copies left behind: as after long use."""
    rng = np.random.default_rng(8)
    num_slots = 6000
    for piece in (1, 3, 31, 32, 33, 100, 700, 1023, 1024, 2000):
        twin = Twin(key, num_slots)
        starts = rng.permutation(num_slots // piece) * piece
        slots = (starts[:, None] + np.arange(piece)).ravel().tolist()
        chain = range(len(slots))
        twin.insert(chain, slots)
        twin.check(chain)
        gone = rng.permutation(len(slots))[: len(slots) // 50].tolist()
        twin.remove(gone)
        twin.check(chain)
        back = gone[: len(gone) // 2]
        twin.insert(back, [slots[number] for number in gone[::-1]])
        twin.check(chain)
        twin.check(rng.permutation(len(slots)).tolist())
        twin.check_all()


@pytest.mark.parametrize(("piece", "most"), [(6000, 0.001), (2000, 0.001), (1024, 0.002)])
def test_few_keys_of_a_run_are_looked_up_in_the_table(piece: int, most: float) -> None:
    """What is fast here is fast because the table, at random places, is seldom asked."""
    twin = Twin(key, 6000)
    starts = np.random.default_rng(9).permutation(6000 // piece) * piece
    slots = (starts[:, None] + np.arange(piece)).ravel().tolist()
    twin.insert(range(len(slots)), slots)
    chain = twin.keys(range(len(slots)))
    with (
        mock.patch.object(twin.index, "find_few", wraps=twin.index.find_few) as few,
        mock.patch.object(twin.index, "_find_in_table", side_effect=AssertionError),
    ):
        assert twin.index.find(chain).tolist() == slots
    assert 0 < few.call_count <= max(1, most * len(slots))


def test_after_long_use_few_keys_are_spilled() -> None:
    """What is in the dict takes more time and memory."""
    num_slots, rng = 20_000, np.random.default_rng(10)
    index = Index(num_slots)
    order = rng.permutation(num_slots)
    spilled = []
    for turn in range(60):
        slots = order[turn * 1000 % num_slots :][:1000]
        if turn * 1000 >= num_slots:
            index.remove(slots)
        words = rng.integers(0, 1 << 63, (1000, KEY_WORDS), dtype=np.uint64)
        index.insert(Keys(words), slots)
        assert np.array_equal(index.find(Keys(words)), slots)
        spilled.append(len(index._spilled))
    assert 0 < max(spilled) < num_slots / 40
    index.remove(np.arange(num_slots))
    assert not index._spilled
    assert not index._num_spilled.any()


def test_removing_what_is_not_there_is_our_own_fault() -> None:
    twin = Twin(key)
    twin.insert([1], [1])
    twin.remove([1])
    with pytest.raises(IntegrityError, match="slot 1 should be indexed"):
        twin.index.remove(as_slots([1]))
