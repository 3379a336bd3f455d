"""Loads that land layer after layer, on a real card: exact bytes, and who may read which when."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.gpu.card import Bytes, Card
from tests.gpu.test_engine_gpu import (
    LAYOUTS,
    NUM_BLOCKS,
    PATHS,
    RACE_BYTES,
    RACE_LAYOUT,
    LeakyDriver,
    driver,
    make_card,
    random_bytes,
)

from kvferry.transfer.job import Direction
from kvferry.transfer.layout import LayerParts

__all__ = ["driver", "make_card"]  # fixtures

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", PATHS)
def test_bytes_arrive_exactly(
    path: str, layout: str, is_shuffled: bool, make_card: Callable[..., Card]
) -> None:
    device_bytes, make = LAYOUTS[layout]
    card = make_card(path, device_bytes, make)
    blocks = card.rng.permutation(NUM_BLOCKS)[:13].tolist()
    slots = card.rng.permutation(NUM_BLOCKS)[:13].tolist() if is_shuffled else list(range(5, 18))
    device = random_bytes(card, device_bytes)
    card.write(device)
    card.host[...] = random_bytes(card, card.host.size).reshape(card.host.shape)
    before = card.host.copy()
    for block, slot in zip(blocks, slots, strict=True):
        for here, there in card.ranges(block):
            device[here] = card.host[slot, there]
    card.load(slots, blocks, in_parts=True)
    card.drain()
    assert np.array_equal(card.read(), device)
    assert np.array_equal(card.host, before)


def layers_read(card: Card) -> bool:
    """Each layer is copied away behind its own part; whether all of them had landed by then."""
    slots = list(range(NUM_BLOCKS))
    card.write(np.full(RACE_BYTES, 0xEE, dtype=np.uint8))
    card.host[...] = random_bytes(card, card.host.size).reshape(card.host.shape)
    parts, seen = LayerParts.of(card.layout), np.empty(RACE_BYTES, dtype=np.uint8)
    wanted: Bytes = np.full(RACE_BYTES, 0xEE, dtype=np.uint8)
    with card.driver.current():  # before the load: it takes longer than that
        card.driver.register_host(seen.ctypes.data, seen.nbytes)
    load = card.load(slots, slots, in_parts=True)
    assert card.engine._queues[Direction.LOAD].flush(30.0)
    with card.driver.current():
        for name in dict.fromkeys(name for name, _, _ in card.layout.spans):
            card.engine.order_compute_after_part([load], parts.last_of(card.layout, [name]))
            start = int(name.split()[1]) * (RACE_BYTES - 64) // 8
            size = (RACE_BYTES - 64) // 8
            at = seen.ctypes.data + start
            card.driver.copy_async(at, card.device + start, size, card.compute)
        card.driver.synchronize_stream(card.compute)
        card.driver.unregister_host(seen.ctypes.data)
    card.drain()
    for block in slots:
        for here, there in card.ranges(block):
            wanted[here] = card.host[block, there]
    return bool(np.array_equal(seen[:-64], wanted[:-64]))


@pytest.mark.parametrize("path", PATHS)
def test_compute_that_waits_for_its_part_reads_it(
    path: str, driver: LeakyDriver, make_card: Callable[..., Card]
) -> None:
    card = make_card(path, RACE_BYTES, RACE_LAYOUT)
    layers_read(card)  # kernels are compiled and buffers made before the race starts
    assert all(layers_read(card) for _ in range(3))
    driver.deaf_stream = card.compute
    assert not all(layers_read(card) for _ in range(3)), "nobody waited, and nobody saw it"
    driver.deaf_stream = None
