"""The library and the scheduler while host memory is still becoming ready."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.fakes.by_name import ByName
from tests.fakes.crafted_keys import key

import kvferry
from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.scheduler.stores import SLOTS_SECONDS
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


class Start:
    """A server's first prompt, of eight blocks: two slots are ready, and ``now`` passes."""

    def __init__(self, groups: int = 1, **settings: int) -> None:
        self.now = 0.0
        self.engine = SimpleNamespace(evicts=False, num_free=1000, num_held=0)
        self.scheduler = ByName(
            Pool(40, num_ready=2),
            [FullAttention(16)] * groups,
            config=Config.from_dict(settings),
            num_device_blocks=1000,
            engine=self.engine,
            clock=lambda: self.now,
        )
        self.keys = Keys.from_bytes([key(number) for number in range(8)])
        self.tables = (np.arange(8),) * groups

    def stored(self, num_tokens: int = 128) -> int:
        """Blocks that one more step stores."""
        self.scheduler.store_left()
        ordered = self.scheduler.store("a", self.keys, self.tables, num_tokens)
        return sum(len(blocks.blocks) for blocks in ordered)


def test_the_first_prompt_waits_for_slots_rather_than_lose_its_blocks() -> None:
    start = Start()
    assert [start.stored(), start.stored()] == [2, 0]
    start.scheduler.note_ready(Rank(0), 5)
    start.now += 0.9 * SLOTS_SECONDS  # more have come: there may be more soon
    assert [start.stored(), start.stored()] == [3, 0]
    start.scheduler.note_ready(Rank(0), 40)
    assert start.stored() == 3
    assert start.scheduler.stored_tokens("a") == 128


def test_several_groups_go_whole_once_there_are_slots() -> None:
    start = Start(groups=2)
    assert start.stored() == 0
    start.scheduler.note_ready(Rank(0), 16)
    assert start.stored() == 16


def test_the_bounds_hold_for_several_groups_while_slots_come() -> None:
    """Seen red: with a free slot for each block, any number of bytes was in flight."""
    start = Start(groups=2, max_storing_blocks=8)
    start.scheduler.note_ready(Rank(0), 32)
    assert [start.stored(64), start.stored(128)] == [8, 0]


@pytest.mark.parametrize("end", ["no more come", "one of two ranks has more", "blocks are needed"])
def test_a_store_does_not_wait_for_slots_for_ever(end: str) -> None:
    start = Start()
    assert start.stored() == 2
    if end == "no more come":
        start.now += SLOTS_SECONDS
    elif end == "one of two ranks has more":
        start.scheduler._ready.append(2)
        for num_slots in (10, 20):
            start.now += 0.9 * SLOTS_SECONDS
            start.scheduler.note_ready(Rank(0), num_slots)
    else:
        start.engine.num_free = 3
    assert start.stored() == 0
    assert start.scheduler.stored_tokens("a") == 128, "it is left out, as where all is in use"
