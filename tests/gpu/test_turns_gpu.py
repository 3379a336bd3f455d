"""Beside a long copy, a short one of the model's: on a real card's copy engines."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.gpu.card import Card
from tests.gpu.test_engine_gpu import driver, make_card

from kvferry.device.driver.base import Priority
from kvferry.device.job import Direction
from kvferry.device.layout import GroupLayout, describe
from kvferry.device.layout.tensor_view import TensorView

__all__ = ["driver", "make_card"]  # fixtures

pytestmark = pytest.mark.gpu

NUM_BLOCKS, SEGMENT, NUM_LAYERS = 512, 32 << 10, 32
SMALL = 256 << 10


def layout(base: int) -> GroupLayout:
    size = NUM_BLOCKS * SEGMENT
    return describe(
        [
            TensorView(f"layer {i}", base + i * size, (NUM_BLOCKS, SEGMENT), (SEGMENT, 1), 1)
            for i in range(NUM_LAYERS)
        ],
        block_axis=0,
    )


@pytest.mark.parametrize("direction", Direction)
def test_a_short_copy_is_over_before_a_long_one(
    direction: Direction, make_card: Callable[..., Card]
) -> None:
    """It goes the same way, on a stream of the least priority, and comes when half is queued."""
    card = make_card("staged", NUM_BLOCKS * SEGMENT * NUM_LAYERS, layout, num_slots=NUM_BLOCKS)
    blocks = list(range(NUM_BLOCKS))
    host = np.zeros(SMALL, dtype=np.uint8)
    cuda = card.driver
    with cuda.current():
        device, stream = cuda.alloc_device(SMALL), cuda.create_stream(Priority.LOW)
        event = cuda.create_event(timing=False)
        cuda.register_host(host.ctypes.data, host.nbytes)
    order = card.load if direction is Direction.LOAD else card.store
    order(blocks, blocks)  # kernels are compiled and buffers made
    card.drain()
    was_over = []
    for _ in range(5):
        order(blocks, blocks)
        time.sleep(2e-3)  # of ten
        ends = (device, host.ctypes.data)
        with cuda.current():
            cuda.copy_async(*(ends if direction is Direction.LOAD else ends[::-1]), SMALL, stream)
            cuda.record_event(event, stream)
            while not cuda.event_is_done(event):
                pass
        was_over.append(bool(card.engine.poll()))
        card.engine.drain()
    with cuda.current():
        cuda.unregister_host(host.ctypes.data)
        cuda.destroy_event(event)
        cuda.destroy_stream(stream)
        cuda.free_device(device)
    assert not any(was_over), "it stood behind all of the long one"
