"""Random lives of the engine: faults, delays, deadlines, aborts, resets. Tokens stay equal."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from kvferry.config import Config
from kvferry.errors import TransferError
from kvferry.tools.demo import engine as offload
from kvferry.tools.demo.blocks import ServedRequest, ServedState
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.transfer.engine.cpu import CpuEngine
from kvferry.types import DEVICE, Transfer

FULL = ModelShape(
    vocab=97, width=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, hidden=48, seed=3
)
SHAPES = (
    FULL,
    replace(FULL, windows=(20, None, 20)),
    replace(FULL, windows=(None, 1, 40)),
    replace(FULL, windows=(20, 20, 20)),
    replace(FULL, windows=(33, None, 5)),
)
SETTINGS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("store_mode", ("lazy",)),
    ("store_threshold", (2,)),
    ("max_storing_blocks", (1, 3, 8)),
    ("max_loading_blocks", (1, 3, 8)),
    ("load_deadline", (0.0005, 0.005)),
    ("store_deadline", (0.0005, 0.005)),
    ("match_deadline", (0.001,)),
)
HANG_SECONDS = 30


def live(seed: int, monkeypatch: pytest.MonkeyPatch, num_requests: int = 24) -> None:
    """One engine's life from birth to a proof that nothing is left and no token changed."""
    chance = random.Random(seed)
    shape = chance.choice(SHAPES)
    block_tokens = chance.choice((4, 8, 16))
    num_blocks = chance.choice((9, 12, 16, 24)) * 16 // block_tokens
    limits = Limits(chance.choice((7, 16, 64, 256)), chance.choice((1, 3, 6)))
    config = Config.from_dict(
        {name: chance.choice(values) for name, values in SETTINGS if chance.random() < 0.3}
    )
    monkeypatch.setattr(offload, "CpuEngine", bad_day(seed, chance))
    with (
        Runner(Decoder(shape), num_blocks=num_blocks, block_tokens=block_tokens) as runner,
        Offloader(
            runner, host_bytes=chance.choice((20_000, 60_000, 1 << 20)), config=config
        ) as offloader,
    ):
        loop = Engine(runner, limits=limits, offloader=offloader)
        survivors = serve_and_disturb(loop, offloader, chance, num_requests)
        loop.drain()
        loop.memory.check_integrity(num_held=0)
        offloader.scheduler.check_integrity()
        assert offloader.scheduler.pool.num_leases == 0
    assert [request.generated for request in survivors] == undisturbed(shape, survivors)


def bad_day(seed: int, chance: random.Random) -> type[CpuEngine]:
    """A copy engine with this day's failure rate and delays; failed loads leave rubbish."""
    weather = random.Random(seed)
    failure_rate = chance.choice((0.0, 0.1, 0.5))
    slowness = chance.choice((0.0, 0.0, 0.003, 0.01))

    class BadDay(CpuEngine):
        def _move(self, transfer: Transfer) -> None:
            if slowness and weather.random() < 0.3:
                time.sleep(weather.random() * slowness)
            if weather.random() >= failure_rate:
                super()._move(transfer)
                return
            if transfer.dst == DEVICE:
                for view, _ in self._views_of(self._jobs.layouts[transfer.group]).segments:
                    view[transfer.dst_slots] = 0xFF
            raise TransferError("it rains in")

    return BadDay


def serve_and_disturb(
    loop: Engine, offloader: Offloader, chance: random.Random, num_requests: int
) -> list[ServedRequest]:
    texts = [[chance.randrange(97) for _ in range(96)] for _ in range(3)]
    survivors = []
    for number in range(num_requests):
        shared = chance.choice(texts)[: chance.choice((32, 64, 96, chance.randint(1, 96)))]
        own = [chance.randrange(97) for _ in range(chance.randint(1, 20))]
        request = ServedRequest(f"r{number:02d}", (*shared, *own), chance.randint(1, 20))
        loop.submit(request)
        for _ in range(chance.randint(0, 6)):
            loop.step()
            loop.memory.check_integrity()
            offloader.scheduler.check_integrity()
        if chance.random() < 0.25 and request.state is not ServedState.FINISHED:
            loop.abort(request.id)
        else:
            survivors.append(request)
        if chance.random() < 0.05:
            offloader.scheduler.reset()
    give_up = time.monotonic() + HANG_SECONDS
    while loop.has_work:
        loop.step()
        assert time.monotonic() < give_up, "the engine makes no progress"
    return survivors


def undisturbed(shape: ModelShape, requests: list[ServedRequest]) -> list[list[int]]:
    """What the same requests generate on a device with room for all of them."""
    with Runner(Decoder(shape), num_blocks=1000) as runner:
        loop = Engine(runner, limits=Limits(max_running=len(requests) + 1))
        copies = [ServedRequest(r.id, r.prompt, r.max_new_tokens) for r in requests]
        for copy in copies:
            loop.submit(copy)
        loop.run()
    return [copy.generated for copy in copies]


@pytest.mark.parametrize("seed", range(6))
def test_a_life(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    live(seed, monkeypatch)


@pytest.mark.soak
def test_many_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000, 1400):
        live(seed, monkeypatch, num_requests=40)
