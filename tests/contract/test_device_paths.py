"""Every path, both directions, every layout, odd sizes: bit-exact, and not one byte beside it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.kv import LAYOUTS, make_kv
from tests.fakes.rig import INTERPRETED, PATHS, Rig

ALL = (*PATHS, *INTERPRETED)

# Bytes per page: odd and even, below, at and above the words and rows of a kernel.
PAGES = [1, 6, 17, 513, 2048, 2053]


def check_store(rig: Rig) -> None:
    blocks, slots = [5, 0, 3, 6], [2, 8, 0, 5]
    device = rig.kv.snapshot()
    expected = rig.host.copy()
    for block, slot in zip(blocks, slots, strict=True):
        expected[slot, : rig.kv.layout.block_bytes] = np.frombuffer(rig.kv.block(block), np.uint8)
        rig.host[slot, : rig.kv.layout.block_bytes] = 0xEE  # poison
    rig.store(blocks, slots)
    rig.drain_ok()
    assert np.array_equal(rig.host, expected)
    assert rig.kv.snapshot() == device


def check_load(rig: Rig) -> None:
    slots, blocks = [7, 1, 4], [6, 2, 0]
    host = rig.host.copy()
    for slot, block in zip(slots, blocks, strict=True):
        rig.kv.set_block(block, rig.slot(slot))
    expected = rig.kv.snapshot()
    for block in blocks:
        rig.kv.set_block(block, b"\xee" * rig.kv.layout.block_bytes)  # poison
    rig.load(slots, blocks)
    rig.drain_ok()
    assert rig.kv.snapshot() == expected
    assert np.array_equal(rig.host, host)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ALL)
def test_bytes_arrive_exactly(path: str, layout: str, page: int) -> None:
    rig = Rig(make_kv(layout, page=page, seed=page), path=path, seed=page)
    check_store(rig)
    check_load(rig)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("path", ALL)
def test_many_blocks_and_slots_in_any_order(path: str, seed: int) -> None:
    """So many that ids travel on their own, and slots that are no neighbours."""
    kv = make_kv("split", page=24, num_blocks=100, seed=seed)
    rig = Rig(kv, path=path, num_slots=100, seed=seed)
    for _ in range(2):  # the second on an idle card, with everything prepared
        blocks, slots = (rig.rng.permutation(100)[:70].tolist() for _ in range(2))
        rig.host[...] = 0xEE
        rig.store(blocks, slots)
        rig.drain_ok()
        assert [rig.slot(slot) for slot in slots] == [kv.block(block) for block in blocks]
        targets = rig.rng.permutation(100)[:70].tolist()
        rig.load(slots, targets)
        rig.drain_ok()
        assert [kv.block(block) for block in targets] == [rig.slot(slot) for slot in slots]


@pytest.mark.parametrize("path", ALL)
def test_groups_of_different_shape_share_the_slots(path: str) -> None:
    groups = [make_kv("layers", page=64, seed=1), make_kv("split", page=7, num_blocks=4, seed=2)]
    rig = Rig(groups, path=path)
    rig.store([1], [0], group=0)
    rig.store([3], [1], group=1)
    rig.drain_ok()
    assert rig.slot(0, group=0) == groups[0].block(1)
    assert rig.slot(1, group=1) == groups[1].block(3)


@pytest.mark.parametrize("path", ["one by one", "dma"])
def test_a_block_that_is_one_run_is_one_descriptor(path: str) -> None:
    rig = Rig(make_kv("block-outermost"), path=path)
    rig.store([0, 2, 4], [0, 1, 2])
    rig.drain_ok()
    copies = sum(rig.driver.batches) or rig.driver.calls.count("copy_async")
    assert copies == 3


@pytest.mark.parametrize("path", PATHS)
def test_receipts_carry_bytes_seconds_and_path(path: str) -> None:
    rig = Rig(path=path)
    for start, name in ((rig.store, "staged"), (rig.load, "kernel")):
        transfer = start([0, 1], [0, 1])
        receipt = rig.drain()[transfer]
        assert receipt.num_bytes == 2 * rig.kv.layout.block_bytes
        assert receipt.seconds > 0
        assert receipt.path == (name if path == "kernels" else "dma")
