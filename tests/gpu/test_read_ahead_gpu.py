"""Hits that are read before their load is ordered, on a real card: exact bytes, then as always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.gpu.card import Card
from tests.gpu.test_engine_gpu import (
    LAYOUTS,
    NUM_BLOCKS,
    RACE_BYTES,
    RACE_LAYOUT,
    driver,
    make_card,
    random_bytes,
)

from kvferry.transfer.engine import gpu as reading_ahead
from kvferry.types import as_slots

__all__ = ["driver", "make_card"]  # fixtures

pytestmark = pytest.mark.gpu

CASES = {**LAYOUTS, "large": (RACE_BYTES, RACE_LAYOUT)}


def ring_of(card: Card) -> Any:
    return card.engine._paths["staged"]._ring  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", CASES)
@pytest.mark.parametrize("then", ["load", "store, load", "another hit", "the same slots again"])
def test_bytes_arrive_exactly(
    then: str, layout: str, make_card: Callable[..., Card], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_ahead, "LEAST_BYTES", 0)
    device_bytes, make = CASES[layout]
    card = make_card("staged", device_bytes, make)
    card.load([0], [0])  # what is made at first is made
    card.drain()
    num_read = 0
    for _ in range(4):
        order = card.rng.permutation(NUM_BLOCKS)
        half = NUM_BLOCKS // 2
        slots, others, blocks = as_slots(order[:half]), order[half:].tolist(), order[:half].tolist()
        device = random_bytes(card, device_bytes)
        card.write(device)
        card.host[...] = random_bytes(card, card.host.size).reshape(card.host.shape)
        before = card.engine._ahead._newest
        card.engine.read_ahead(0, slots)
        ahead = card.engine._ahead._newest
        num_read += ahead is not before
        if then == "store, load":
            card.store(others, others)
            card.drain()
        elif then == "another hit":
            slots = as_slots(np.roll(slots, 1))
        elif then == "the same slots again":
            with card.driver.current():
                card.driver.synchronize_stream(ring_of(card).inbound)
            card.host[...] = random_bytes(card, card.host.size).reshape(card.host.shape)
            slots = as_slots(slots)
        for block, slot in zip(blocks, slots.tolist(), strict=True):
            for here, there in card.ranges(block):
                device[here] = card.host[slot, there]
        card.load(slots, blocks)
        card.drain()
        assert np.array_equal(card.read(), device)
        if then == "load":
            assert ahead is not None
            assert ahead.is_used
    assert num_read == 4
