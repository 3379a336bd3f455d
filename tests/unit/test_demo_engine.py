"""The demo's serving loop, alone and with kvferry: what changes is time, never a token.

Random lives with faults, aborts and lower tiers are in ``tests/integration/test_demo_soak.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvferry.config import Config
from kvferry.errors import InputError
from kvferry.tools.demo import engine as engine_module
from kvferry.tools.demo.blocks import ServedRequest, ServedState
from kvferry.tools.demo.engine import Engine, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.transfer.engine.cpu import CpuEngine
from kvferry.types import DEVICE, Transfer

FULL = ModelShape(
    vocab=97, width=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, hidden=48, seed=3
)
MEBIBYTE = 1 << 20

Build = Callable[..., Engine]


@pytest.fixture
def build() -> Iterator[Build]:
    """Engines, with kvferry if ``host_bytes`` are given, proven to have leaked nothing."""
    with ExitStack() as stack:

        def make(num_blocks: int, *, host_bytes: int = 0) -> Engine:
            runner = stack.enter_context(Runner(Decoder(FULL), num_blocks=num_blocks))
            offloader = None
            if host_bytes:
                config = Config(load_policy="always", max_storing_blocks=100)
                offloader = Offloader(runner, host_bytes=host_bytes, config=config)
                stack.enter_context(offloader)
            loop = Engine(runner, offloader=offloader)
            stack.callback(loop.memory.check_integrity)
            stack.callback(loop.drain)
            return loop

        yield make


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 97, length).tolist())


def test_a_prompt_fully_cached_still_computes_its_last_token(build: Build) -> None:
    loop = build(40)
    first, second = ServedRequest("a", prompt(64), 2), ServedRequest("b", prompt(64), 2)
    for request in (first, second):
        loop.submit(request)
        loop.run()
    assert second.num_device_hits == 48
    assert second.generated == first.generated


class Slow(CpuEngine):
    """Takes its time over loads."""

    def _move(self, transfer: Transfer) -> None:
        if transfer.dst == DEVICE:
            time.sleep(0.02)
        super()._move(transfer)


def test_others_run_while_a_request_loads(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CpuEngine", Slow)
    loop = build(12, host_bytes=MEBIBYTE)
    first = ServedRequest("first", prompt(80), 2)
    loop.submit(first)
    loop.run()
    for number in range(3):  # push it off the device
        loop.submit(ServedRequest(f"other-{number}", prompt(80, seed=number + 1), 2))
        loop.run()
        loop.drain()
    again = ServedRequest("again", prompt(80), 4)
    beside = ServedRequest("beside", prompt(10, seed=9), 4)
    loop.submit(again)
    loop.submit(beside)
    loop.step()
    assert again.state is ServedState.LOADING
    assert len(beside.generated) == 1
    loop.run()
    assert again.num_loaded == 64
    assert again.generated[:2] == first.generated


def test_closing_with_copies_in_flight_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CpuEngine", Slow)
    with (
        Runner(Decoder(FULL), num_blocks=12) as runner,
        Offloader(runner, host_bytes=MEBIBYTE) as offloader,
    ):
        loop = Engine(runner, offloader=offloader)
        for number in (0, 1, 2, 3, 0):
            loop.submit(ServedRequest(f"r{number}", prompt(80, seed=number), 2))
            loop.step()
        offloader.close()
        assert offloader.scheduler.pool.num_leases == 0


def test_refuses_what_cannot_be_served(build: Build) -> None:
    loop = build(4)
    with pytest.raises(
        InputError, match=r"may grow to 70 tokens; .* 4 device blocks of 16 hold 64"
    ):
        loop.submit(ServedRequest("big", prompt(60), 10))
    with pytest.raises(InputError, match="a block has 6144 bytes, host memory of 100 bytes"):
        build(4, host_bytes=100)
