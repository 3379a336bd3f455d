"""Block tables as callers give them: what is refused, and what counts as named twice."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.ferry import BlockTables
from kvferry.scheduler.transfers import NO_BLOCK
from kvferry.transfer.layout import GroupLayout, describe

MOST = 2**63 - 1


def layouts(*num_blocks: int) -> list[GroupLayout]:
    return [describe({"a": np.zeros((count, 8), np.uint8)}, block_axis=0) for count in num_blocks]


@pytest.mark.parametrize("wrong", [-2, 7, MOST, -MOST - 1])
def test_with_several_groups_one_may_be_missing_but_not_wrong(wrong: int) -> None:
    tables = BlockTables(layouts(7, 9)).whole([[NO_BLOCK, 6], [8, 0]], before=0)
    assert [each.tolist() for each in tables] == [[NO_BLOCK, 6], [8, 0]]
    with pytest.raises(InputError, match=f"block {wrong} does not exist"):
        BlockTables(layouts(7, 9)).whole([[NO_BLOCK, wrong], [8, 0]], before=0)


def test_what_is_named_twice_is_found_among_all() -> None:
    tables = BlockTables(layouts(7, 5))
    rng = np.random.default_rng()
    for _ in range(200):
        blocks = rng.integers(NO_BLOCK, 7, int(rng.integers(0, 8)))
        try:
            tables.require_distinct([blocks], [range(len(blocks))])
        except InputError:
            given = [block for block in blocks.tolist() if block != NO_BLOCK]
            assert len(set(given)) < len(given), blocks
        else:
            given = [block for block in blocks.tolist() if block != NO_BLOCK]
            assert len(set(given)) == len(given), blocks
