"""The demo's serving loop. Lives with faults and aborts are in ``test_demo_soak.py``."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.engine import Engine, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape

SHAPE = ModelShape(
    vocab=97, width=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, hidden=48, seed=3
)


def prompt(length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, 97, length).tolist()
    return tokens


def test_a_prompt_fully_cached_still_computes_its_last_token() -> None:
    with Runner(Decoder(SHAPE), num_blocks=40) as runner:
        engine = Engine(runner)
        first, second = (ServedRequest(name, prompt(64), 2) for name in "ab")
        for request in (first, second):
            engine.submit(request)
            engine.run()
    assert second.num_device_hits == 48
    assert second.generated == first.generated


def test_refuses_what_cannot_be_served() -> None:
    with Runner(Decoder(SHAPE), num_blocks=4) as runner:
        with pytest.raises(InputError, match=r"may grow to 70 tokens; .* of 16 hold 64"):
            Engine(runner).submit(ServedRequest("big", prompt(60), 10))
        with pytest.raises(InputError, match="a block has 6144 bytes, host memory of 100 bytes"):
            Offloader(runner, host_bytes=100)
