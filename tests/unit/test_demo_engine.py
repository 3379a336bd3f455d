"""The demo's serving loop. ``test_traps.py`` has it with failing copies."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.tools.demo.engine import Engine, ServedRequest, serve
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.tools.demo.workload import Chat

SHAPE = ModelShape(
    vocab=97, width=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, hidden=48, seed=3
)


def prompt(length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, 97, length).tolist()
    return tokens


def test_a_prompt_fully_cached_still_computes_its_last_token() -> None:
    engine = Engine(Decoder(SHAPE), 40)
    first, second = (ServedRequest(name, prompt(64), 2) for name in "ab")
    for request in (first, second):
        engine.submit(request)
        engine.run()
    assert second.device_tokens == 48
    assert second.generated == first.generated


def test_a_small_host_and_a_tier_below_it_change_no_token() -> None:
    chat = Chat(num_conversations=6, num_turns=3, opening_tokens=60, vocab=97)
    truth = serve(Engine(Decoder(SHAPE), chat.num_blocks(16)), chat)
    settings = {
        "host": f"{12 * SHAPE.block_bytes}B",
        "tiers": "memory:1MiB",
        "load_policy": "always",
    }
    with Engine(Decoder(SHAPE), 22, settings) as engine:
        assert serve(engine, chat) == truth
        engine.pool.check_integrity()
        assert engine.ferry is not None
        moved = engine.ferry.stats().bytes_moved
        assert moved["memory", "host"] > 0 < moved["host", "device"]


def test_refuses_what_cannot_be_served() -> None:
    with pytest.raises(InputError, match=r"may grow to 70 tokens; .* of 16 hold 64"):
        Engine(Decoder(SHAPE), 4).submit(ServedRequest("big", prompt(60), 10))
