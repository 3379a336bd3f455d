"""The pool, rule by rule; the sequences are in tests/model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.fakes.crafted_keys import key, keys
from tests.fakes.pool_events import Evictions
from tests.fakes.pools import evict, forget

from kvferry.cache.policies.contract import Arriving
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease, SlotState
from kvferry.core.keys import Keys
from kvferry.errors import InputError, IntegrityError


def stored(pool: Pool, numbers: list[int], *, chained: bool = True, after: int | None = None):
    lease = pool.reserve(
        keys(numbers), chained=chained, parent=key(after) if after is not None else None
    )
    if lease is not None:
        lease.commit()
    pool.check_integrity()


def cached(pool: Pool, *numbers: int) -> list[int]:
    return [n for n, here in zip(numbers, pool.cached(keys(numbers)), strict=True) if here]


@pytest.mark.parametrize("num_slots", [0, -1])
def test_no_pool_without_slots(num_slots: int) -> None:
    with pytest.raises(InputError, match=f"at least one slot, got {num_slots}"):
        Pool(num_slots)


def test_a_long_conversation_does_not_make_one_eviction_long() -> None:
    pool = Pool(4096)
    for number in range(4096):
        lease = pool.reserve(keys([number]), parent=key(number - 1) if number else None)
        assert lease is not None
        lease.commit()
    looks = 0
    taken = pool.eviction.policy.take

    def counted(count: int, arriving: Arriving) -> np.ndarray:
        nonlocal looks
        looks += 1
        return taken(count, arriving)

    pool.eviction.policy.take = counted  # type: ignore[method-assign]
    for count in (1, 1, 5, 1):
        assert evict(pool, count) == count
    assert looks < 40
    assert pool.match(keys(range(4096))) == 4096 - 8


def test_repeated_keys_are_refused_and_change_nothing() -> None:
    pool = Pool(4)
    stored(pool, [1, 2])
    for call in (
        lambda: pool.reserve(keys([3, 4, 3])),
        lambda: pool.lease(keys([1, 2, 1])),
        lambda: pool.reserve(keys([3, 2]), parent=key(2)),
    ):
        with pytest.raises(InputError, match="a chain never repeats"):
            call()
        pool.check_integrity()
        assert pool.num_leases == 0
        assert pool.counts.cached == 2
    pool.touch(keys([1, 1, 2, 1]))
    pool.check_integrity()


@pytest.mark.parametrize(("parent", "words"), [(b"short", "5 bytes"), ("text", "str")])
def test_a_parent_that_is_no_key_is_refused(parent: Any, words: str) -> None:
    pool = Pool(2)
    with pytest.raises(InputError, match=f"key of 32 bytes, got {words}"):
        pool.reserve(keys([1]), parent=parent)
    pool.check_integrity()
    assert pool.counts.free == 2


def test_empty_questions_have_empty_answers() -> None:
    pool = Pool(2)
    assert pool.match(Keys.empty()) == 0
    assert pool.lease(Keys.empty()) is None
    assert pool.reserve(Keys.empty()) is None
    assert pool.reserve(Keys.empty(), parent=key(1)) is None
    pool.touch(Keys.empty())
    assert evict(pool, 0) == 0
    assert evict(pool, -3) == 0
    pool.check_integrity()


def test_listeners_hear_of_blocks_that_are_not_trusted_any_more() -> None:
    pool = Pool(8)
    gone = Evictions(pool)
    stored(pool, [1, 2, 3], chained=False)
    read, late, written = pool.lease(keys([1])), pool.lease(keys([2])), pool.reserve(keys([4]))
    assert read is not None
    assert late is not None
    assert written is not None
    read.spoil()
    late.disown()
    forget(pool, keys([3]))
    written.disown()  # no listener was ever told of it
    assert gone.read() == [key(1), key(2), key(3)]
    late.spoil()
    written.abort()
    assert len(gone.read()) == 3


def breaks(pool: Pool, how: str) -> None:
    lease: Lease | None = None
    if how == "a reader without a lease":
        pool.table.readers[0] += 1
    elif how == "a free slot in use":
        pool.table.state[int(pool.table.free.slots[0])] = SlotState.CACHED
    elif how == "a slot free twice":
        stack = pool.table.free._stack
        stack[0] = stack[1]
    elif how == "a wrong key":
        # A bit that says in which row of the table the key is.
        pool.table.index._keys[int(pool.table.index.find(keys([1]))[0])] ^= np.uint64(1 << 31)
    elif how == "a lost parent":
        pool.table.chains.children[:] = 0
    elif how == "lost by the policy":
        pool.eviction.policy.clear()
    elif how == "idle slots miscounted":
        pool.table.num_idle -= 1
    elif how == "doomed slots miscounted":
        pool.table.num_doomed += 1
    elif how == "pinned slots miscounted":
        pool.eviction.pins.count += 1
    elif how == "a slot in use and free":
        pool.table.state[int(pool.table.free.slots[0])] = SlotState.WRITING
    elif how == "not ready and in use":
        pool.table.state[-2] = SlotState.UNREADY
    elif how == "neither this nor that":
        pool.table.state[int(pool.table.index.find(keys([1]))[0])] = SlotState.DOOMED
    elif how == "a slot written twice":
        first, second = pool.reserve(keys([9])), pool.reserve(keys([10]))
        assert first is not None
        assert second is not None
        first.slots[:] = second.slots
    elif how == "a lost lease":
        lease = pool.reserve(keys([9]))
        pool.leases.clear()
    assert lease is None or lease.ended is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a reader without a lease", "reader counts and leases disagree"),
        ("a free slot in use", "a slot in use is on the free list"),
        ("a slot in use and free", "a slot in use is on the free list"),
        ("a slot free twice", "a slot is on the free list twice"),
        ("not ready and in use", "a slot is used before it is ready"),
        ("neither this nor that", "index and slot states disagree"),
        ("a wrong key", "an index entry points at a slot of another key"),
        ("a lost parent", "children are miscounted"),
        ("lost by the policy", "the policy lost a cached slot"),
        ("pinned slots miscounted", "pinned slots are miscounted"),
        ("idle slots miscounted", "cached slots are miscounted"),
        ("doomed slots miscounted", "doomed slots are miscounted"),
        ("a slot written twice", "two leases write one slot"),
        ("a lost lease", "a slot is neither free nor cached, and nothing claims it"),
    ],
)
def test_integrity_is_really_checked(how: str, said: str) -> None:
    pool = Pool(8)
    stored(pool, [1, 2, 3])
    breaks(pool, how)
    with pytest.raises(IntegrityError, match=f"^pool: {said}"):
        pool.check_integrity()


def test_counting_looks_at_no_slot() -> None:
    """Scraping metrics runs on the engine's thread."""
    pool = Pool(8)
    stored(pool, [1, 2, 3])
    writing, reading = pool.reserve(keys([4])), pool.lease(keys([1, 2]))
    counts = pool.counts
    assert (counts.free, counts.cached, counts.leased) == (4, 1, 3)
    del pool.table.state, pool.table.readers, pool.table.free._stack
    assert pool.counts == counts
    assert writing is not None
    assert reading is not None
