"""Block tables as callers give them: what is refused, and what counts as named twice."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.scheduler.transfers import NO_BLOCK
from kvferry.tickets import whole_tables

MOST = 2**63 - 1


@pytest.mark.parametrize("wrong", [-2, 7, MOST, -MOST - 1])
def test_with_several_groups_one_may_be_missing_but_not_wrong(wrong: int) -> None:
    tables = whole_tables([7, 9], [[NO_BLOCK, 6], [8, 0]], before=0)
    assert [each.tolist() for each in tables] == [[NO_BLOCK, 6], [8, 0]]
    with pytest.raises(InputError, match=f"block {wrong} does not exist"):
        whole_tables([7, 9], [[NO_BLOCK, wrong], [8, 0]], before=0)


def test_what_is_named_twice_is_found_in_the_places_that_count() -> None:
    rng = np.random.default_rng()
    for _ in range(200):
        blocks = rng.integers(NO_BLOCK, 7, int(rng.integers(0, 8)))
        first, stop = sorted(rng.integers(0, 8, 2).tolist())
        is_needed = bool(rng.integers(2))
        needed = [range(first, stop), range(0)] if is_needed else []
        counted = (blocks[first:stop] if is_needed else blocks[first:]).tolist()
        given = [block for block in counted if block != NO_BLOCK]
        try:
            whole_tables([7, 5], [blocks, blocks[:0]], before=first, needed=needed)
        except InputError:
            assert len(set(given)) < len(given), blocks
        else:
            assert len(set(given)) == len(given), blocks
