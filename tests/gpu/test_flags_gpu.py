"""Compute behind a load that is still being queued, on a real card and through the library.

Needs torch and Triton: only the staged path queues in pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import util
from typing import Any

import numpy as np
import pytest

import kvferry

pytestmark = pytest.mark.gpu
if util.find_spec("torch") is None or util.find_spec("triton") is None:
    pytest.skip("needs torch and triton", allow_module_level=True)

LAYERS, PAGE, BLOCKS, TOKENS = 28, 32 << 10, 600, 16
ROUNDS = 4


class Model:
    """KV tensors of half a gigabyte, a ferry for them, and the same request again and again."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        shape = (BLOCKS, PAGE // 2)
        self.kv = [torch.zeros(shape, dtype=torch.int16, device="cuda") for _ in range(LAYERS)]
        self.ferry = kvferry.attach(
            self.kv,
            model="flags",
            host="2GiB",
            block_tokens=TOKENS,
            copy_path="staged",
            policy="lru",  # which refuses nobody
        )
        while self.ferry.host_stats().ready_slots < self.ferry.host_stats().num_slots:
            self.ferry.poll(0.01)
        self.engine: Any = self.ferry._rank.engine
        self.blocks = torch.arange(BLOCKS)
        self.rng = np.random.default_rng()

    def is_right(self) -> bool:
        """Whether compute queued right after ``load`` returned saw every byte of it."""
        torch = self.torch
        keys = self.ferry.keys(self.rng.integers(0, 1 << 40, BLOCKS * TOKENS))
        for layer in self.kv:
            layer.random_(-30000, 30000)
        wanted = torch.stack([layer.to(torch.int64).sum(1) for layer in self.kv])
        torch.cuda.synchronize()
        assert self.ferry.wait(self.ferry.store(keys, np.arange(BLOCKS))).num_blocks == BLOCKS
        for layer in self.kv:
            layer.fill_(7)
        torch.cuda.synchronize()
        ticket = self.ferry.load(self.ferry.match(keys), np.arange(BLOCKS))
        seen = torch.stack([layer.to(torch.int64).sum(1) for layer in self.kv])
        torch.cuda.synchronize()
        done = self.ferry.wait(ticket, timeout=20)
        assert done.ok, done.reason
        return bool((seen == wanted).all())


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.ferry.close()


def test_compute_on_the_default_stream_waits_for_flags(model: Model) -> None:
    model.engine._flagged = None
    assert all(model.is_right() for _ in range(ROUNDS))
    assert model.engine._flagged is not None, "no flag was used"


def test_without_its_flag_compute_comes_too_early_and_is_seen(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.is_right()
    monkeypatch.setattr(model.engine._flags, "hold", lambda flag, stream: None)
    assert not all(model.is_right() for _ in range(ROUNDS))


def test_on_whatever_stream_compute_runs_nothing_hangs(model: Model) -> None:
    torch = model.torch
    flagged = []
    for number in range(16):
        stream = torch.cuda.Stream(priority=-(number % 2))
        with torch.cuda.stream(stream):
            assert all(model.is_right() for _ in range(2)), number
        flagged.append(model.engine._probe.is_safe(stream.cuda_stream))
    print(f"{sum(flagged)} of {len(flagged)} side streams may wait for flags")


def test_a_graph_replayed_right_after_a_load_sees_it(model: Model) -> None:
    torch = model.torch
    seen = torch.zeros(LAYERS, BLOCKS, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for number, layer in enumerate(model.kv):
            seen[number] = layer.to(torch.int64).sum(1)
    for _ in range(ROUNDS):
        keys = model.ferry.keys(model.rng.integers(0, 1 << 40, BLOCKS * TOKENS))
        for layer in model.kv:
            layer.random_(-30000, 30000)
        wanted = torch.stack([layer.to(torch.int64).sum(1) for layer in model.kv])
        torch.cuda.synchronize()
        model.ferry.wait(model.ferry.store(keys, np.arange(BLOCKS)))
        for layer in model.kv:
            layer.fill_(7)
        torch.cuda.synchronize()
        ticket = model.ferry.load(model.ferry.match(keys), np.arange(BLOCKS))
        graph.replay()
        torch.cuda.synchronize()
        assert model.ferry.wait(ticket, timeout=20).ok
        assert bool((seen == wanted).all())


def test_loads_are_awaited(model: Model) -> None:
    async def life() -> None:
        keys = [model.ferry.keys(model.rng.integers(0, 1 << 40, 32 * TOKENS)) for _ in range(8)]
        tables = np.arange(8 * 32).reshape(8, 32)
        stored = await asyncio.gather(
            *(
                model.ferry.ended(model.ferry.store(*each))
                for each in zip(keys, tables, strict=True)
            )
        )
        loaded = await asyncio.gather(
            *(
                model.ferry.ended(model.ferry.load(model.ferry.match(each), table))
                for each, table in zip(keys, tables, strict=True)
            )
        )
        assert all(done.ok and done.num_blocks == 32 for done in (*stored, *loaded))

    asyncio.run(life())
