"""What the ranks of a vLLM say of their tiers, put together; and ranks over one host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.fakes.crafted_keys import keys
from tests.fakes.kv import make_kv

from kvferry.cache.slots import as_slots
from kvferry.config import Config
from kvferry.connectors.common.messages import RankShape, TierShape
from kvferry.connectors.common.ranks import (
    RankPlace,
    disagreement,
    movers_of,
    shape_of,
    tiers_of_ranks,
)
from kvferry.rank import RankMemory
from kvferry.scheduler.tier import KeyedTier, SlotTier, WriteMode
from kvferry.types import HOST, Outcome, Question, Rank, TierName, Transfer, TransferId

NEAR, FAR = TierName("near"), TierName("far")
KV = make_kv("split")


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


@pytest.fixture
def two() -> Iterator[list[RankMemory]]:
    """Ranks that would share one host memory; here each has a copy of the same bytes."""
    config = Config.from_dict({"host": "1MiB", "tiers": "near=memory:1MiB, far=memory-by-key:1MiB"})
    with ExitStack() as closing:
        ranks = [RankMemory.open([KV.layout], config, rank=Rank(number)) for number in range(2)]
        for each in ranks:
            closing.callback(each.close)
            assert each.host.wait(60)
        yield ranks


def test_ranks_over_one_host_memory_split_a_tier_by_key(two: list[RankMemory]) -> None:
    shape = shape_of(two[0], [KV.layout], RankPlace(Rank(0)))
    assert [tier.num_places is None for tier in shape.tiers] == [False, True]
    some = keys(range(8))
    movers = [
        movers_of(each, RankPlace(Rank(number), 2, 2, replicates=True))[1]
        for number, each in enumerate(two)
    ]
    slots = as_slots(range(8))
    none = slots[:0]
    down = Transfer(TransferId(1), HOST, FAR, slots, none, keys=some.array, within=60.0)
    for mover in movers:
        mover[FAR].submit(down)
    moved = [mover[FAR].drain(60)[0] for mover in movers]
    assert {receipt.outcome for receipt in moved} == {Outcome.OK}
    assert sum(receipt.num_bytes for receipt in moved) == 8 * KV.layout.block_bytes
    assert all(receipt.num_bytes for receipt in moved)
    # Each is asked for its own, and has it.
    for mover in movers:
        mover[FAR].ask(Question(TransferId(2), FAR, some.array, 60.0))
        assert mover[FAR].drain(60)[0].outcome is Outcome.OK
