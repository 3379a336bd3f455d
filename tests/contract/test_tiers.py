"""The contract of tiers, run against every one that needs nothing but this machine.

A new tier joins by a line in ``TIERS``. Those in ``REMEMBERS_NOTHING`` say so when an unwritten
slot is read; for plain memory there is no such thing as unwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ClosedError, InputError, TransferError
from kvferry.tiers import HostTier, MemoryTier, Tier
from kvferry.types import TierName, as_slots

TIERS: dict[str, Callable[[int, int], Tier]] = {
    "memory": lambda slots, size: MemoryTier(slots, size),
    "host": lambda slots, size: HostTier(slots, size),
}
REMEMBERS_NOTHING = {"memory"}

NUM_SLOTS, SLOT_BYTES = 6, 48
every_tier = pytest.mark.parametrize("kind", sorted(TIERS))


@pytest.fixture
def tier(kind: str) -> Iterator[Tier]:
    made = TIERS[kind](NUM_SLOTS, SLOT_BYTES)
    yield made
    made.close()


def fresh(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, SLOT_BYTES), dtype=np.uint8)


def poisoned(count: int) -> np.ndarray:
    return np.full((count, SLOT_BYTES), 0xEE, dtype=np.uint8)


@every_tier
@given(
    writes=st.lists(st.lists(st.integers(0, NUM_SLOTS - 1), unique=True), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_reads_give_what_was_last_written(kind: str, writes: list[list[int]], seed: int) -> None:
    tier = TIERS[kind](NUM_SLOTS, SLOT_BYTES)
    expected: dict[int, bytes] = {}
    for number, slots in enumerate(writes):
        rows = fresh(len(slots), seed + number)
        tier.write(as_slots(slots), rows)
        expected.update((slot, row.tobytes()) for slot, row in zip(slots, rows, strict=True))
        rows[:] = 0  # the tier must have a copy of its own
    for order in (sorted(expected), sorted(expected, reverse=True)):
        into = poisoned(len(order))
        tier.read(as_slots(order), into)
        assert [row.tobytes() for row in into] == [expected[slot] for slot in order]
    tier.close()


@every_tier
def test_only_the_named_slots_change(tier: Tier) -> None:
    before = fresh(NUM_SLOTS)
    tier.write(as_slots(range(NUM_SLOTS)), before)
    tier.write(as_slots([4, 1]), fresh(2, 9))
    after = poisoned(NUM_SLOTS)
    tier.read(as_slots(range(NUM_SLOTS)), after)
    for slot in (0, 2, 3, 5):
        assert (after[slot] == before[slot]).all()
    assert (after[[4, 1]] == fresh(2, 9)).all()


@every_tier
def test_rows_that_are_a_part_of_something_larger(tier: Tier) -> None:
    wide = np.full((4, 3 * SLOT_BYTES), 0xEE, dtype=np.uint8)
    source = fresh(8)[::2]
    tier.write(as_slots([0, 1, 2, 3]), source)
    tier.read(as_slots([3, 2, 1, 0]), wide[:, SLOT_BYTES : 2 * SLOT_BYTES])
    assert (wide[:, SLOT_BYTES : 2 * SLOT_BYTES] == source[::-1]).all()
    assert (wide[:, :SLOT_BYTES] == 0xEE).all()
    assert (wide[:, 2 * SLOT_BYTES :] == 0xEE).all()


@every_tier
def test_no_slots_is_fine(tier: Tier) -> None:
    tier.write(as_slots(()), poisoned(0))
    tier.read(as_slots(()), poisoned(0))


@every_tier
@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, SLOT_BYTES - 1), np.uint8),
        np.zeros((2, SLOT_BYTES + 1), np.uint8),
        np.zeros((1, SLOT_BYTES), np.uint8),
        np.zeros((3, SLOT_BYTES), np.uint8),
        np.zeros(2 * SLOT_BYTES, np.uint8),
        np.zeros((2, SLOT_BYTES), np.int8),
        np.zeros((2, SLOT_BYTES // 4), np.float32),
    ],
)
@pytest.mark.parametrize("verb", ["write", "read"])
def test_rows_of_the_wrong_shape_are_refused(tier: Tier, rows: np.ndarray, verb: str) -> None:
    kept = fresh(NUM_SLOTS)
    tier.write(as_slots(range(NUM_SLOTS)), kept)
    with pytest.raises(InputError) as error:
        getattr(tier, verb)(as_slots([0, 1]), rows)
    for word in (str(tier.name), str((2, SLOT_BYTES)), str(rows.shape), str(rows.dtype)):
        assert word in str(error.value)
    again = poisoned(NUM_SLOTS)
    tier.read(as_slots(range(NUM_SLOTS)), again)
    assert (again == kept).all(), "nothing was lost"


@every_tier
@pytest.mark.parametrize("slots", [[NUM_SLOTS], [0, 100], [-1, 2]])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_slots_out_of_range_are_refused(tier: Tier, slots: list[int], verb: str) -> None:
    kept = fresh(NUM_SLOTS)
    tier.write(as_slots(range(NUM_SLOTS)), kept)
    into = poisoned(len(slots))
    with pytest.raises(InputError, match=f"0 to {NUM_SLOTS - 1}.* {min(slots)} to {max(slots)}"):
        getattr(tier, verb)(np.array(slots, dtype=np.int64), into)
    assert (into == 0xEE).all()
    again = poisoned(NUM_SLOTS)
    tier.read(as_slots(range(NUM_SLOTS)), again)
    assert (again == kept).all()


@pytest.mark.parametrize("kind", sorted(REMEMBERS_NOTHING))
def test_a_slot_never_written_cannot_be_read(tier: Tier) -> None:
    tier.write(as_slots([0]), fresh(1))
    with pytest.raises(TransferError, match="slot 3 holds nothing"):
        tier.read(as_slots([0, 3]), poisoned(2))


@every_tier
@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 8), (-1, 8), (4, 0), (4, -8)])
def test_a_tier_without_room_is_refused(kind: str, num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(InputError, match=f"got {num_slots} slots of {slot_bytes} bytes"):
        TIERS[kind](num_slots, slot_bytes)


@every_tier
def test_closing_twice_is_fine_and_use_after_is_not(tier: Tier) -> None:
    tier.write(as_slots([0]), fresh(1))
    tier.close()
    tier.close()
    for verb in (tier.write, tier.read):
        with pytest.raises(ClosedError, match=f"tier {tier.name} is closed"):
            verb(as_slots([0]), poisoned(1))


# -- what each has of its own ------------------------------------------------------------------


def test_host_rows_are_the_slots_themselves() -> None:
    tier = HostTier(4, 16)
    tier.rows[2] = 7
    into = np.zeros((1, 16), np.uint8)
    tier.read(as_slots([2]), into)
    assert (into == 7).all()
    assert tier.address == tier.rows.ctypes.data
    assert tier.address % 4096 == 0
    kept = tier.rows
    tier.close()
    assert (kept[2] == 7).all(), "an engine that still holds the rows keeps the memory alive"
    with pytest.raises(ClosedError):
        _ = tier.address


def test_a_fault_leaves_the_slots_of_a_write_empty_and_those_of_a_read_alone() -> None:
    faults: list[str] = []

    def fault(what: str) -> None:
        if what in faults:
            raise TransferError(f"{what} fault")

    tier = MemoryTier(4, SLOT_BYTES, fault=fault, name=TierName("worn"))
    tier.write(as_slots([0, 1]), fresh(2))
    faults.append("read")
    with pytest.raises(TransferError, match="read fault"):
        tier.read(as_slots([0]), poisoned(1))
    faults[:] = ["write"]
    with pytest.raises(TransferError, match="write fault"):
        tier.write(as_slots([1]), fresh(1))
    faults.clear()
    into = poisoned(1)
    tier.read(as_slots([0]), into)
    assert (into == fresh(2)[:1]).all()
    with pytest.raises(TransferError, match="tier worn: slot 1 holds nothing"):
        tier.read(as_slots([1]), into)


def test_what_is_lost_cannot_be_read_and_can_be_written_again() -> None:
    tier = MemoryTier(4, SLOT_BYTES)
    tier.write(as_slots([0, 1]), fresh(2))
    tier.lose(as_slots([1, 3]))
    into: Any = poisoned(1)
    tier.read(as_slots([0]), into)
    with pytest.raises(TransferError, match="slot 1 holds nothing"):
        tier.read(as_slots([1]), into)
    tier.write(as_slots([1]), fresh(1, 5))
    tier.read(as_slots([1]), into)
    assert (into == fresh(1, 5)).all()
    tier.close()
    tier.lose(as_slots([0]))
