"""What the ranks of a vLLM say of their tiers, put together."""

from __future__ import annotations

import pytest

from kvferry.config import Config
from kvferry.connectors.common.messages import RankShape, TierShape
from kvferry.connectors.common.ranks import disagreement, tiers_of_ranks
from kvferry.scheduler.tier import KeyedTier, SlotTier, WriteMode
from kvferry.types import Rank, TierName

NEAR, FAR = TierName("near"), TierName("far")


def rank(number: int, *tiers: tuple[TierName, int | None]) -> RankShape:
    return RankShape(Rank(number), tiers=tuple(TierShape(*tier) for tier in tiers))


def test_tiers_are_those_of_all_ranks_with_the_fewest_places() -> None:
    shapes = [rank(0, (NEAR, 9), (FAR, None)), rank(1, (NEAR, 7), (FAR, None))]
    assert disagreement(shapes) == ""
    near, far = tiers_of_ranks(shapes, Config(tier_write="through"))
    assert isinstance(near, SlotTier)
    assert near.pool.num_slots == 7
    assert isinstance(far, KeyedTier)
    assert (near.name, far.name) == (NEAR, FAR)
    assert near.write is far.write is WriteMode.THROUGH


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([(FAR, 9), (NEAR, 9)], "rank 2 far (places), near (places)"),
        ([(NEAR, 9)], "rank 2 near (places)"),
        ([(NEAR, 9), (FAR, None)], "rank 2 near (places), far (by key)"),
        ([], "rank 2 no tier"),
    ],
)
def test_ranks_that_differ_are_named(others: list[tuple[TierName, int | None]], words: str) -> None:
    same = [(NEAR, 9), (FAR, 9)]
    said = disagreement([rank(2, *others), rank(0, *same), rank(1, *same)])
    assert said.startswith("rank 0 has near (places), far (places) below host memory, ")
    assert words in said
    assert said.endswith("give all ranks the same tiers")
