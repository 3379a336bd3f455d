"""Servers that share a store in every kind of weather: not one token differs, and it ends well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from itertools import count

import pytest
from tests.fakes import remote, s3_servers
from tests.fakes.demo_chat import serve

from kvferry.errors import TransferError
from kvferry.tools.demo.engine import Engine
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.tools.demo.workload import Chat
from kvferry.types import HOST, TierName

SHAPE = ModelShape(
    vocab=97, width=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, hidden=48, seed=3
)
CHAT = Chat(
    num_conversations=6,
    num_turns=4,
    opening_tokens=50,
    question_tokens=13,
    answer_tokens=9,
    num_users=3,
    vocab=97,
)
NUM_TURNS = CHAT.num_conversations * CHAT.num_turns
REMOTE = TierName("remote")
Answers = dict[str, list[int]]


class Weather:
    """What lies between the servers and their store."""

    def __init__(self, server: s3_servers.S3Server) -> None:
        self._door = s3_servers.Door(server)
        self._wire = s3_servers.Wire(int(self._door.endpoint.rpartition(":")[2]))
        self.endpoint = self._wire.endpoint

    def fair(self) -> None:
        self._door.fault = self._door.garble = self._door.clock = None
        self._wire.is_held, self._wire.delay = False, 0.0

    def garbage(self) -> None:
        self._door.garble = lambda content: bytes(len(content))

    def slow(self) -> None:
        self._wire.delay = 0.02

    def clock_skewed(self) -> None:
        self._door.clock = lambda: datetime.now(timezone.utc) + timedelta(hours=5)

    def cut(self) -> None:
        self._wire.cut()

    def held(self) -> None:
        self._wire.is_held = True

    def broken(self) -> None:
        def fault(*_: object) -> None:
            raise TransferError("injected: the server's disk is full")

        self._door.fault = fault

    def close(self) -> None:
        self.fair()
        self._wire.close()
        self._door.close()


def answers_of(
    weather: Weather, after: Callable[[int], None], deadline: float = 20.0
) -> tuple[Answers, int]:
    """What a new server says, and how many bytes it had from the store.

    ``after`` is told how many turns have been answered. Host memory holds hardly two conversations,
    so every turn looks for its beginning in the store.
    """
    settings = {
        "host": f"{16 * SHAPE.block_bytes}B",
        "remote": f"s3://{s3_servers.BUCKET}/weather?endpoint={weather.endpoint}",
        "tier_write": "through",
        "load_policy": "always",
        "lookup_deadline": deadline,
        "promote_deadline": deadline,
    }
    numbers = count(1)
    with (
        remote.environment(remote.CREDENTIALS),
        Engine(Decoder(SHAPE), 24, settings) as engine,
    ):
        said = serve(engine, CHAT, lambda _: after(next(numbers)))
        engine.pool.check_integrity()
        assert engine.ferry is not None
        return said, engine.ferry.stats().bytes_moved.get((REMOTE, HOST), 0)


@pytest.fixture(scope="module", autouse=True)
def begun_with_the_store() -> Iterator[None]:
    """A server waits for its store's first answer, also on a machine that is busy."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("kvferry.tiers.remote.tier.OPEN_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module")
def truth() -> Answers:
    return serve(Engine(Decoder(SHAPE), CHAT.num_blocks(16)), CHAT)


@pytest.fixture(scope="module")
def weather(truth: Answers) -> Iterator[Weather]:
    """Before a store that a first server has filled."""
    server = s3_servers.S3Server("rclone")
    server.start()
    made = Weather(server)
    first, _ = answers_of(made, lambda _: None)
    assert first == truth
    yield made
    made.close()
    server.close()


@pytest.mark.parametrize(
    "fault", ["fair", "garbage", "slow", "clock_skewed", "cut", "held", "broken"]
)
def test_not_one_token_differs(fault: str, weather: Weather, truth: Answers) -> None:
    """The fault comes after a third of the turns and goes after two."""

    def after(number: int) -> None:
        if number == NUM_TURNS // 3:
            getattr(weather, fault)()
        elif number == 2 * NUM_TURNS // 3:
            weather.fair()

    # Where the store says nothing the whole deadline passes, once.
    said, num_read = answers_of(weather, after, 3.0 if fault == "held" else 20.0)
    assert said == truth
    assert num_read > 0
