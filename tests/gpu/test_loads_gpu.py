"""Compute queued right after a large load, on a real card and through the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """KV tensors of half a gigabyte and a ferry for them."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        shape = (BLOCKS, PAGE // 2)
        self.kv = [torch.zeros(shape, dtype=torch.int16, device="cuda") for _ in range(LAYERS)]
        self.ferry = kvferry.attach(
            self.kv,
            model="loads",
            host="2GiB",
            block_tokens=TOKENS,
            policy="lru",  # which refuses nobody
        )
        while self.ferry.host_stats().ready_slots < self.ferry.host_stats().num_slots:
            self.ferry.poll(0.01)
        self.rng = np.random.default_rng()

    def sums(self) -> Any:
        return self.torch.stack([layer.to(self.torch.int64).sum(1) for layer in self.kv])

    def is_right(self, compute: Callable[[], Any]) -> bool:
        """Whether ``compute``, queued right after ``load`` returned, saw every byte of it."""
        torch = self.torch
        keys = self.ferry.keys(self.rng.integers(0, 1 << 40, BLOCKS * TOKENS))
        for layer in self.kv:
            layer.random_(-30000, 30000)
        wanted = self.sums()
        torch.cuda.synchronize()
        assert self.ferry.wait(self.ferry.store(keys, np.arange(BLOCKS))).num_blocks == BLOCKS
        for layer in self.kv:
            layer.fill_(7)
        torch.cuda.synchronize()
        ticket = self.ferry.load(self.ferry.match(keys), np.arange(BLOCKS))
        seen = compute()
        torch.cuda.synchronize()
        done = self.ferry.wait(ticket, timeout=20)
        assert done.ok, done.reason
        return bool((seen == wanted).all())


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.ferry.close()


def test_compute_behind_a_load_sees_it_on_any_stream(model: Model) -> None:
    assert all(model.is_right(model.sums) for _ in range(ROUNDS))
    with model.torch.cuda.stream(model.torch.cuda.Stream()):
        assert all(model.is_right(model.sums) for _ in range(ROUNDS))


def test_without_the_wait_compute_comes_too_early_and_is_seen(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = model.ferry._rank.engine
    monkeypatch.setattr(engine, "order_compute_after_loads", lambda: None)
    assert not all(model.is_right(model.sums) for _ in range(ROUNDS))


def test_a_graph_replayed_right_after_a_load_sees_it(model: Model) -> None:
    graph = model.torch.cuda.CUDAGraph()
    model.torch.cuda.synchronize()
    with model.torch.cuda.graph(graph):
        seen = model.sums()

    def replay() -> Any:
        graph.replay()
        return seen

    assert all(model.is_right(replay) for _ in range(ROUNDS))
