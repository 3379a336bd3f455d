"""The library and the scheduler while host memory is still becoming ready."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.by_name import ByName
from tests.fakes.crafted_keys import key

import kvferry
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.types import Rank

BLOCKS, BLOCK_TOKENS = 64, 16


def test_copies_during_growth_are_bit_exact() -> None:
    rng = np.random.default_rng(3)
    kv = [rng.integers(0, 256, (BLOCKS, 99_991), dtype=np.uint8) for _ in range(2)]
    wanted = [layer.copy() for layer in kv]
    tables = np.arange(BLOCKS)
    with kvferry.attach(kv, model="m", block_tokens=BLOCK_TOKENS, host="300MiB") as ferry:
        seen = set()
        for turn in range(12):
            keys = ferry.keys(np.arange(BLOCKS * BLOCK_TOKENS) + turn)
            stored = ferry.wait(ferry.store(keys, tables), 30)
            assert stored.ok
            for layer in kv:
                layer[:] = 0
            hit = ferry.match(keys)
            assert len(hit) == stored.num_blocks == BLOCKS
            assert ferry.wait(ferry.load(hit, tables), 30).ok
            assert all(np.array_equal(a, b) for a, b in zip(kv, wanted, strict=True))
            seen.add(ferry.stats().pool.unready)
            ferry._scheduler.pool.check_integrity()
        assert ferry._rank.host.wait(60)
        ferry.poll()
        assert ferry.stats().pool.unready == 0
        assert ferry.host_stats().is_whole
        assert ferry.host_stats().ready_slots == ferry.stats().pool.total


def test_a_slot_is_given_out_when_every_rank_has_it() -> None:
    scheduler = ByName(Pool(10, num_ready=0), [FullAttention(16)], num_ranks=3)
    keys = Keys.from_bytes([key(number) for number in range(4)])
    assert scheduler.store("a", keys, (np.arange(4),), 64) == ()
    for rank, ready in ((0, 10), (1, 3)):
        scheduler.note_ready(Rank(rank), ready)
        assert scheduler.pool.num_ready == 0
    scheduler.note_ready(Rank(2), 5)
    assert scheduler.pool.num_ready == 3
    scheduler.note_ready(Rank(1), 2)  # late news, out of order
    assert scheduler.pool.num_ready == 3
    scheduler.note_ready(Rank(1), 12)  # a rank may have more slots than are asked of it
    assert scheduler.pool.num_ready == 5
    with pytest.raises(InputError, match="ranks are 0 to 2"):
        scheduler.note_ready(Rank(3), 1)
    (blocks,) = scheduler.store("b", keys, (np.arange(4),), 64)
    assert len(blocks.blocks) == 4
    scheduler.close()
