"""The serving loop with kvferry in it: faults, aborts and windows cost time, never tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from kvferry.config import Config
from kvferry.errors import InputError
from kvferry.tools.demo import engine as offload
from kvferry.tools.demo.blocks import ServedRequest, ServedState
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.tools.demo.workload import Chat, serve
from kvferry.transfer.engine.cpu import CpuEngine
from kvferry.types import DEVICE, Transfer

FULL = ModelShape(
    vocab=97, width=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, hidden=48, seed=3
)
SHAPES = {
    "full": FULL,
    "hybrid": replace(FULL, windows=(20, None, 20)),
    "two windows": replace(FULL, windows=(None, 1, 40)),
    "windows only": replace(FULL, windows=(20, 20, 20)),
}
CHAT = Chat(
    num_conversations=6,
    num_turns=4,
    opening_tokens=50,
    question_tokens=13,
    answer_tokens=9,
    num_users=3,
    vocab=97,
)
MEBIBYTE = 1 << 20
EVERY_BLOCK = 100
"""More than there are on any device here: stores that wait for others to land may come too late."""

Build = Callable[..., Engine]


@pytest.fixture
def build() -> Iterator[Build]:
    """Engines with kvferry, proven to have leaked nothing when the test is over."""
    with ExitStack() as stack:

        def make(
            num_blocks: int,
            *,
            shape: ModelShape = FULL,
            host_bytes: int = MEBIBYTE,
            config: Config | None = None,
            **limits: int,
        ) -> Engine:
            runner = stack.enter_context(Runner(Decoder(shape), num_blocks=num_blocks))
            config = config or Config(load_policy="always", max_storing_blocks=EVERY_BLOCK)
            offloader = stack.enter_context(Offloader(runner, host_bytes=host_bytes, config=config))
            loop = Engine(runner, limits=Limits(**limits), offloader=offloader)
            stack.callback(prove_clean, loop)
            return loop

        yield make


def prove_clean(loop: Engine) -> None:
    assert loop.offloader is not None
    loop.drain()
    loop.memory.check_integrity(num_held=0)
    loop.offloader.scheduler.check_integrity()
    assert loop.offloader.scheduler.num_in_flight == 0
    assert loop.offloader.scheduler.pool.num_leases == 0


def truth(chat: Chat, shape: ModelShape = FULL) -> dict[str, list[int]]:
    with Runner(Decoder(shape), num_blocks=chat.num_blocks(16)) as runner:
        return serve(Engine(runner), chat).answers()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 97, length).tolist())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("step_tokens", [7, 64])
def test_loaded_blocks_give_the_same_tokens(build: Build, name: str, step_tokens: int) -> None:
    loop = build(20, shape=SHAPES[name], step_tokens=step_tokens)
    assert serve(loop, CHAT).answers() == truth(CHAT, SHAPES[name])
    assert loop.counts.num_loaded_tokens > 0
    assert loop.counts.num_failed_load_tokens == 0


class Slow(CpuEngine):
    """Takes its time over loads."""

    def _move(self, transfer: Transfer) -> None:
        if transfer.dst == DEVICE:
            time.sleep(0.02)
        super()._move(transfer)


class Careless(CpuEngine):
    """Loads the right number of bytes from the wrong slots, and says it went well."""

    def _move(self, transfer: Transfer) -> None:
        if transfer.dst == DEVICE:
            wrong = (transfer.src_slots + 1) % len(self._host)
            transfer = Transfer(
                transfer.id, transfer.src, transfer.dst, wrong, transfer.dst_slots, transfer.group
            )
        super()._move(transfer)


def test_wrong_bytes_would_be_seen(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that tokens are equal can fail: bytes from a wrong slot change them."""
    monkeypatch.setattr(offload, "CpuEngine", Careless)
    loop = build(20)
    assert serve(loop, CHAT).answers() != truth(CHAT)


def test_others_run_while_a_request_loads(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CpuEngine", Slow)
    loop = build(12)
    first = ServedRequest("first", prompt(80), 2)
    loop.submit(first)
    loop.run()
    for number in range(3):  # push it off the device
        loop.submit(ServedRequest(f"other-{number}", prompt(80, seed=number + 1), 2))
        loop.run()
        loop.drain()
    again, beside = (
        ServedRequest("again", prompt(80), 4),
        ServedRequest("beside", prompt(10, seed=9), 4),
    )
    loop.submit(again)
    loop.submit(beside)
    loop.step()
    assert again.state is ServedState.LOADING
    assert len(beside.generated) == 1
    loop.run()
    assert again.num_loaded == 64
    assert again.generated[:2] == first.generated


def test_closing_with_copies_under_way_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CpuEngine", Slow)
    with (
        Runner(Decoder(FULL), num_blocks=12) as runner,
        Offloader(runner, host_bytes=MEBIBYTE) as offloader,
    ):
        loop = Engine(runner, offloader=offloader)
        for number in (0, 1, 2, 3, 0):
            loop.submit(ServedRequest(f"r{number}", prompt(80, seed=number), 2))
            loop.step()
        pool = offloader.scheduler.pool
        offloader.close()
        assert pool.num_leases == 0


def test_refuses_a_host_without_room_for_a_block() -> None:
    with (
        Runner(Decoder(FULL), num_blocks=4) as runner,
        pytest.raises(InputError, match="a block has 6144 bytes, host memory of 100 bytes"),
    ):
        Offloader(runner, host_bytes=100)
