"""What is stored together lies in as few runs as the free slots allow."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys as numbered

from kvferry.cache.pool import Pool
from kvferry.cache.slots import FreeTogether, num_spare_together
from kvferry.errors import InputError
from kvferry.types import as_slots


def num_runs(slots: list[int]) -> int:
    return 1 + sum(b != a + 1 for a, b in pairwise(slots)) if slots else 0


def fewest_runs(free: set[int], count: int) -> int:
    """So few can hold them: the longest ones first."""
    lengths, run = [], 0
    for slot in range(max(free, default=0) + 2):
        if slot in free:
            run += 1
        elif run:
            lengths.append(run)
            run = 0
    lengths.sort(reverse=True)
    needed = 0
    while count > 0:
        count -= lengths[needed]
        needed += 1
    return needed


@pytest.mark.parametrize("seed", range(30))
def test_against_a_set(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.choice((1, 5, 40, 200))
    together, free, used = FreeTogether(), set(range(num_slots)), set[int]()
    together.push(np.arange(num_slots))
    for _ in range(120):
        if used and rng.random() < 0.5:
            back = sorted(rng.sample(sorted(used), rng.randint(1, len(used))))
            if rng.random() < 0.5:
                back = back[: max(1, len(back) // 4)]
            together.push(as_slots(back))
            free |= set(back)
            used -= set(back)
        else:
            count = rng.randint(0, len(free))
            taken = together.take(count).tolist()
            assert len(set(taken)) == len(taken) == count
            assert set(taken) <= free
            assert num_runs(taken) == fewest_runs(free, count)
            free -= set(taken)
            used |= set(taken)
        assert together.count == len(free)
        assert together.slots.tolist() == sorted(free)


def test_the_tightest_run_that_holds_all_is_taken() -> None:
    together = FreeTogether()
    together.push(as_slots([4, 5, 9, 12, 13, 14, 15, 20, 21, 22]))
    assert together.take(3).tolist() == [20, 21, 22]
    assert together.take(6).tolist() == [4, 5, 12, 13, 14, 15]
    assert together.take(0).tolist() == []
    assert together.slots.tolist() == [9]


def test_single_slots_wait_for_their_neighbours() -> None:
    together = FreeTogether()
    together.push(as_slots([3, 7]))
    together.push(as_slots([4, 6, 8]))
    together.push(as_slots([5]))
    assert together.take(6).tolist() == [3, 4, 5, 6, 7, 8]


def test_what_must_come_next_comes_next() -> None:
    together = FreeTogether()
    together.push(np.arange(10))
    together.give_out_next(as_slots([7, 2, 9]))
    assert together.take(2).tolist() == [7, 2]
    assert together.take(3).tolist() == [9, 0, 1]
    assert together.slots.tolist() == [3, 4, 5, 6, 8]
    with pytest.raises(InputError, match="not free"):
        together.give_out_next(as_slots([7]))


def test_a_worn_pool_keeps_what_is_stored_together_in_fewer_runs() -> None:
    """The same requests through both: as they come, and together."""

    def runs(*, together: bool) -> float:
        rng = random.Random(3)
        pool = Pool(8192, together=together)
        lengths = []
        for number in range(2500):
            lease = pool.reserve(numbered(range(1000 * number, 1000 * number + rng.randint(1, 40))))
            assert lease is not None
            if number > 1200:
                lengths.append(num_runs(lease.slots.tolist()))
            lease.commit()
            if rng.random() < 0.5:
                pool.touch(numbered(range(1000 * (number // 2), 1000 * (number // 2) + 8)))
        pool.check_integrity()
        return sum(lengths) / len(lengths)

    assert runs(together=True) < 0.8 * runs(together=False)


def test_little_is_kept_free_and_nothing_where_what_goes_is_copied_below() -> None:
    assert num_spare_together(63) == 0
    assert num_spare_together(640) == 10
    assert num_spare_together(1 << 30) == 1024
    for feeds_below, spare in ((False, 10), (True, 0)):
        pool = Pool(640, together=True)
        pool.feeds_below = feeds_below
        for number in range(30):
            lease = pool.reserve(numbered(range(1000 * number, 1000 * number + 25)))
            assert lease is not None
            lease.commit()
        assert pool.num_free <= spare
        assert pool.counts.evicted == 750 - 640 + pool.num_free
