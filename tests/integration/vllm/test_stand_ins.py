"""What stands in for vLLM where it is not installed does what vLLM does, in random lives."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.vllm_parts import STAND_INS, VllmParts, vllms_own

from kvferry.connectors.common.messages import StepReceipts
from kvferry.types import Outcome, Rank, Receipt, TransferId

NEWEST_BUILT = (0, 32)
"""The newest vLLM that has a CPU build."""

NUM_BLOCKS = 12
NUM_HASHES = 6
NUM_GROUPS = 2
HASH_TOKENS = 4


@pytest.fixture(autouse=True)
def newest() -> None:
    import vllm

    number = tuple(map(int, vllm.__version__.split(".")[:2]))
    if number < NEWEST_BUILT:
        pytest.skip(f"the stand-ins are for vLLM {NEWEST_BUILT}, this is {number}")


def hash_of(number: int) -> bytes:
    return bytes([number + 1]) * 32


def name(pool: Any, numbers: list[int], hashes: list[bytes], group: int, size: int) -> None:
    pool.cache_full_blocks(
        SimpleNamespace(block_hashes=hashes),
        [pool.blocks[number] for number in numbers],
        num_cached_blocks=0,
        num_full_blocks=len(numbers),
        block_size=size,
        kv_cache_group_id=group,
    )


class Pools:
    """vLLM's pool and the stand-in, told the same. Owns both, and which blocks are in use."""

    def __init__(self) -> None:
        made = [
            parts.pool(NUM_BLOCKS, enable_caching=True, hash_block_size=HASH_TOKENS)
            for parts in (vllms_own(), STAND_INS)
        ]
        self.pools: list[Any] = made
        self.used: list[int] = []

    def tell(self, verb: str, numbers: list[int]) -> None:
        for pool in self.pools:
            getattr(pool, verb)([pool.blocks[number] for number in numbers])

    def take(self, count: int) -> None:
        taken = [[block.block_id for block in pool.get_new_blocks(count)] for pool in self.pools]
        assert taken[0] == taken[1]
        self.used += taken[0]

    def name(self, numbers: list[int], hashes: list[bytes], group: int, size: int) -> None:
        for pool in self.pools:
            name(pool, numbers, hashes, group, size)

    def check(self) -> None:
        theirs, ours = map(_facts, self.pools)
        assert theirs == ours


def _facts(pool: Any) -> Any:
    """All that can be seen of a pool: who is free, in which order, who is used, what is where."""
    free, block = [], pool.free_block_queue.fake_free_list_head.next_free_block
    while block.next_free_block is not None:
        free.append(block.block_id)
        block = block.next_free_block
    found: dict[Any, Any] = {}
    for number in range(NUM_HASHES):
        for groups in ([0], [1], [0, 1]):
            cached = pool.get_cached_block(hash_of(number), groups)
            found[number, tuple(groups)] = cached and [block.block_id for block in cached]
    blocks = [(b.ref_cnt, b.block_hash, b.is_null) for b in pool.blocks]
    return free, pool.get_num_free_blocks(), blocks, found


@pytest.mark.parametrize("seed", range(20))
def test_the_pools_do_the_same(seed):
    rng, pools = random.Random(seed), Pools()
    pools.check()
    num_named = num_touched = 0
    for _ in range(300):
        verb = rng.choice(["take", "free", "free", "touch", "name", "name", "evict", "too many"])
        num_free = pools.pools[0].get_num_free_blocks()
        if verb == "take":
            pools.take(rng.randint(0, min(3, num_free)))
        elif verb == "free" and pools.used:
            numbers = rng.sample(pools.used, rng.randint(1, len(pools.used)))
            for number in numbers:
                pools.used.remove(number)
            pools.tell("free_blocks", numbers)
        elif verb == "touch":
            numbers = rng.sample(range(1, NUM_BLOCKS), 2)
            pools.tell("touch", numbers)
            pools.used += numbers
            num_touched += 1
        elif verb == "name":
            blocks = pools.pools[0].blocks
            nameless = [n for n in dict.fromkeys(pools.used) if blocks[n].block_hash is None]
            numbers, per_block = nameless[:2], rng.choice([1, 2])
            hashes = [hash_of(rng.randrange(NUM_HASHES)) for _ in range(2 * per_block)]
            pools.name([0, *numbers], hashes + hashes, rng.randrange(NUM_GROUPS), 4 * per_block)
            num_named += len(numbers)
        elif verb == "evict":
            numbers = rng.sample(range(1, NUM_BLOCKS), 1)
            for pool in pools.pools:
                pool.evict_blocks(set(numbers))
        elif verb == "too many":
            for pool in pools.pools:
                with pytest.raises(ValueError, match="free"):
                    pool.get_new_blocks(num_free + 1)
        pools.check()
    assert num_named > 20
    assert num_touched > 10


def test_a_block_that_has_a_name_gets_no_other():
    pools = Pools()
    pools.take(1)
    pools.name(pools.used, [hash_of(0)], 0, HASH_TOKENS)
    for pool in pools.pools:
        with pytest.raises(AssertionError):
            name(pool, pools.used, [hash_of(1)], 0, HASH_TOKENS)


def _totals(parts: VllmParts, num_ranks: int, seed: int) -> list[Any]:
    """A few steps of ranks that say this and that, summed up."""
    rng, total, found = random.Random(seed), parts.total(num_ranks), []
    names = [f"r{number}" for number in range(20)]
    left = [list(names) for _ in range(num_ranks)]
    for _ in range(30):
        outputs = []
        for rank in range(num_ranks):
            told = parts.output()
            count = min(rng.randint(0, 2), len(left[rank]))
            told.finished_recving = {left[rank].pop(0) for _ in range(count)} or None
            told.invalid_block_ids = {rng.randrange(9)} if rng.random() < 0.2 else set()
            if rng.random() < 0.5:
                receipt = Receipt(TransferId(rng.randrange(99)), Rank(rank), Outcome.OK, "")
                told.kv_connector_worker_meta = StepReceipts((receipt,))
            outputs.append(SimpleNamespace(kv_connector_output=told))
        summed = total.aggregate(outputs).kv_connector_output
        fields = (summed.finished_recving, summed.invalid_block_ids)
        found.append((*fields, summed.kv_connector_worker_meta))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_sums_over_ranks_are_the_same(num_ranks):
    for seed in range(10):
        theirs = _totals(vllms_own(), num_ranks, seed)
        assert theirs == _totals(STAND_INS, num_ranks, seed)
        assert any(arrived for arrived, _, _ in theirs)
