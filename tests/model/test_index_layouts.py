"""The index against a dict, wherever the keys of a chain may lie.

A look-up follows runs of slots, looks around keys it knows, and asks the table, depending on how
long runs are. Here these lengths are a few keys, so that small cases take every way; one test runs
with the real ones. Layouts are those that a guess from a neighbour gets wrong: runs that break,
change direction or meet the last slot, a key that moved while its old slot still holds a copy of
it, another key in the middle, keys asked for twice, from the middle, backwards, or not there.

One-line breaks of ``index.py`` and ``tag_table.py`` that were tried; each made a test of this
module fail. Try them again when you change either.

- ``_run_length``: no look at ``_place``; ``// KEY_WORDS + 1``; ``longest = len(words)``
- ``find``: a run one key longer than it is; the rest looked up from the first key after it
- ``_look_around``: no look at ``_place``; every guess right; no ``clip``, or one that lets negative
  slots through; no ``+ every``
- ``find``: no table after looking around; the table asked for all keys but noted for the
  missing
- ``_ask_table``: no look at the crowded; ``_holds``: only word 1 compared
- ``insert``: the homeless keep their place; ``remove``: no ``_ABSENT``; the table not told
- ``_note_keys``: the first run only; every slot taken to follow the one before
- ``_spill``: the displaced key not in the dict; it keeps its place
- ``_remove_spilled``: a row is never crowded any more once one of its keys has left the dict
- ``clear``: the table not told; the dict not cleared
- ``TagTable.claim``: two keys of a batch get the same lane (no look at who has it); those of a full
  row are not said to be homeless; their slots are written into lane 0; tags do not keep step
- ``TagTable.candidates`` and ``Index.find_few``: tags that are even; only the first lane that fits
- ``TagTable._claim_one``: the tag not written; the slot not written; always lane 0
- ``TagTable._hash``: the rows of the batch before; nobody counts the crowded rows
- ``TagTable.crowd``: always, or never, a displaced key; ``TagTable.uncrowd``: nothing done
- ``_picks``: a large table fills high lanes first
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

from kvferry.cache import index as index_module
from kvferry.cache import index as table_module
from kvferry.cache.index import Index, Positions
from kvferry.cache.slots import as_slots
from kvferry.core.keys import KEY_WORDS, Key, KeyArray, Keys
from kvferry.types import NO_SLOT, SlotArray

NUM_SLOTS = 20
NUM_KEYS = 30

KeyMaker = Callable[[int], Key]


def crowding_key(number: int) -> Key:
    """Keys of one row of the table, each with a tag of its own."""
    words = np.zeros(KEY_WORDS, dtype="<u8")
    words[1] = 2 * number + 1 | number << 8
    return Key(words.tobytes())


def odd_crowding_key(number: int) -> Key:
    return crowding_key(number) if number % 3 else key(number)


def evenly_crowding_key(number: int) -> Key:
    """Keys of one row and one tag: the lane that says "crowded" is next to that tag."""
    words = np.zeros(KEY_WORDS, dtype="<u8")
    words[1] = 2 + number % 2 | number << 8
    words[3] = number
    return Key(words.tobytes())


MAKERS: tuple[KeyMaker, ...] = (
    key,
    colliding_key,
    crowding_key,
    odd_crowding_key,
    evenly_crowding_key,
)
every_table = pytest.mark.parametrize("many_rows", [1 << 30, 0], ids=["small", "large"])


@contextmanager
def short_ways() -> Iterator[None]:
    """Every length at which a call changes its way, small enough for a few keys."""
    with mock.patch.multiple(
        index_module,
        _FIRST_LOOK=2,
        _LOOK_GROWTH=2,
        _LONG=4,
        _STRIDE=2,
        _MANY=3,
        _SHORT_RUNS=1,
        _FEW=0,
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
        assert [self.index.find_one(self.make(number)) for number in numbers] == expected

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


@every_table
@pytest.mark.parametrize("make", MAKERS)
@given(steps=steps, questions=questions)
@settings(max_examples=120)
def test_wherever_the_keys_lie(
    many_rows: int,
    make: KeyMaker,
    steps: list[tuple[str, list[int], list[int] | None]],
    questions: list[list[int]],
) -> None:
    with mock.patch.object(table_module, "_MANY_ROWS", many_rows):
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


def both_ways(test: Callable[[int], None]) -> Callable[[int], None]:
    """With runs of a few keys and the short lengths; with long runs and the real ones."""
    return pytest.mark.parametrize("unit", [4, 1500])(test)


@contextmanager
def ways_for(unit: int) -> Iterator[None]:
    if unit < index_module._LONG:
        with short_ways():
            yield
    else:
        yield


@both_ways
def test_a_removed_key_is_absent_though_its_slot_still_has_it(unit: int) -> None:
    twin = Twin(key, 3 * unit)
    chain = range(3 * unit)
    with ways_for(unit):
        twin.insert(chain, chain)
        twin.remove(range(unit + 1, 2 * unit))
        twin.check(chain)
        twin.remove([3 * unit - 1])
        twin.check(chain)
        twin.remove(chain)
        twin.check(chain)


@both_ways
def test_a_key_that_moved_is_where_it_is_now(unit: int) -> None:
    twin = Twin(key, 4 * unit)
    chain = range(3 * unit)
    with ways_for(unit):
        twin.insert(chain, chain)
        moved = range(unit + 2, unit + 2 + unit // 2)
        twin.remove(moved)
        twin.insert(moved, range(4 * unit - len(moved), 4 * unit))
        twin.check(chain)


@both_ways
def test_another_key_in_the_middle_is_not_taken_for_the_one_asked_for(unit: int) -> None:
    twin = Twin(key, 3 * unit)
    chain = list(range(3 * unit))
    with ways_for(unit):
        twin.insert(chain, chain)
        for hole in (1, unit, 2 * unit + 1, 3 * unit - 1):
            twin.remove([hole])
            twin.insert([10 * unit + hole], [hole])
        twin.check(chain)
        twin.check([*chain[unit:], 11 * unit, *chain[: unit + 2]])


@both_ways
def test_a_run_goes_no_further_than_the_last_slot(unit: int) -> None:
    twin = Twin(key, 2 * unit)
    with ways_for(unit):
        chain = range(2 * unit)
        twin.insert(chain, [*range(unit, 2 * unit), *range(unit)])
        twin.check(chain)
        twin.check([*chain, *chain])


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


@pytest.mark.parametrize(
    ("piece", "most"), [(6000, 0.001), (2000, 0.001), (1024, 0.002), (500, 0.12), (100, 0.25)]
)
def test_few_keys_of_a_run_are_looked_up_one_by_one(piece: int, most: float) -> None:
    """What is fast here is fast because the table, at random places, is seldom asked."""
    twin = Twin(key, 6000)
    starts = np.random.default_rng(9).permutation(6000 // piece) * piece
    slots = (starts[:, None] + np.arange(piece)).ravel().tolist()
    twin.insert(range(len(slots)), slots)
    chain = twin.keys(range(len(slots)))
    index, table, asked = twin.index, twin.index._table, 0
    few, many = index.find_few, table.candidates

    def count_few(keys: bytes) -> list[int]:
        nonlocal asked
        found = few(keys)
        asked += len(found)
        return found

    def count_many(words: KeyArray) -> tuple[Positions, SlotArray, Positions]:
        nonlocal asked
        asked += len(words)
        return many(words)

    with (
        mock.patch.object(index, "find_few", count_few),
        mock.patch.object(table, "candidates", count_many),
    ):
        assert index.find(chain).tolist() == slots
    assert 0 < asked <= max(1, most * len(slots))


@every_table
def test_a_crowded_row_has_nothing_to_do_with_who_once_made_way(many_rows: int) -> None:
    with mock.patch.object(table_module, "_MANY_ROWS", many_rows):
        twin = Twin(odd_crowding_key)
    crowd = [number for number in range(NUM_KEYS) if number % 3][:10]
    twin.insert(crowd, range(10))
    for number in crowd:
        if twin.index._place[twin.slots[number]] != index_module._SPILLED:
            continue
        slot = twin.slots[number]
        twin.remove([number])
        twin.insert([3], [slot])  # a key of another row
        twin.insert([number], [15])
        twin.check(range(NUM_KEYS))
        twin.remove([3, number])
        twin.insert([number], [slot])
    twin.check(range(NUM_KEYS))
    twin.check_all()


@every_table
def test_after_long_use_few_keys_find_no_lane(many_rows: int) -> None:
    """Where the rows are by far not full; what has no lane is looked up slowly."""
    num_slots, rng = 20_000, np.random.default_rng(10)
    with mock.patch.object(table_module, "_MANY_ROWS", many_rows):
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
        spilled.append(sum(map(len, index._overflow.values())))
    assert 0 < max(spilled) < num_slots / 1000


def test_a_large_table_fills_low_lanes_first() -> None:
    """Else each of its slots lies in a line of memory of its own."""
    used = []
    for many_rows in (1 << 30, 0):
        with mock.patch.object(table_module, "_MANY_ROWS", many_rows):
            table = table_module.TagTable(4000)
        for batch in np.random.default_rng(11).integers(0, 1 << 63, (40, 100, 4), dtype=np.uint64):
            places, _ = table.claim(batch, np.arange(100))
            used.append(np.count_nonzero(places & 7 <= 1))
    spread, low = sum(used[:40]), sum(used[40:])
    assert low > 0.7 * 4000
    assert spread < 0.4 * 4000
