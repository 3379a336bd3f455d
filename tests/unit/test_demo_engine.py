"""The serving loop: batching, chunks, the prefix cache, preemption. Tokens never change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.engine import Engine, Limits, Runner
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.tools.demo.workload import Chat, serve

SHAPE = ModelShape(
    vocab=97, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, hidden=48, seed=3
)
HYBRID = ModelShape(
    vocab=97,
    width=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden=48,
    windows=(20, None, 70),
    seed=3,
)
CHAT = Chat(
    num_conversations=5,
    num_turns=3,
    opening_tokens=50,
    question_tokens=13,
    answer_tokens=9,
    num_users=3,
    vocab=97,
)


@pytest.fixture
def runners() -> Iterator[list[Runner]]:
    made: list[Runner] = []
    yield made
    for runner in made:
        runner.close()


def engine(
    runners: list[Runner], num_blocks: int, *, shape: ModelShape = SHAPE, **limits: int
) -> Engine:
    runners.append(Runner(Decoder(shape), num_blocks=num_blocks))
    return Engine(runners[-1], limits=Limits(**limits))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 97, length).tolist())


@pytest.mark.parametrize("shape", [SHAPE, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("step_tokens", [5, 16, 1000])
def test_tokens_ignore_device_size_and_step_size(
    runners: list[Runner], shape: ModelShape, step_tokens: int
) -> None:
    roomy = engine(runners, CHAT.num_blocks(16), shape=shape)
    tight = engine(runners, 20, shape=shape, step_tokens=step_tokens)
    assert serve(roomy, CHAT).answers() == serve(tight, CHAT).answers()
    assert tight.counts.num_prefill_tokens > roomy.counts.num_prefill_tokens
    roomy.memory.check_integrity(num_held=0)
    tight.memory.check_integrity(num_held=0)


def test_a_prompt_fully_cached_still_computes_its_last_token(runners: list[Runner]) -> None:
    loop = engine(runners, 40)
    first, second = ServedRequest("a", prompt(64), 2), ServedRequest("b", prompt(64), 2)
    loop.submit(first)
    loop.run()
    loop.submit(second)
    loop.run()
    assert second.num_device_hits == 48
    assert second.generated == first.generated


def test_refuses_what_cannot_be_served(runners: list[Runner]) -> None:
    loop = engine(runners, 4)
    with pytest.raises(InputError, match="may grow to 70 tokens; 4 device blocks of 16"):
        loop.submit(ServedRequest("big", prompt(60), 10))
    loop.submit(ServedRequest("a", prompt(5), 3))
    with pytest.raises(InputError, match="already being served"):
        loop.submit(ServedRequest("a", prompt(5), 3))
    with pytest.raises(InputError, match="empty prompt"):
        ServedRequest("none", (), 1)
    with pytest.raises(InputError, match="at least 1 token, got 0"):
        ServedRequest("zero", (1,), 0)
    with pytest.raises(InputError, match="not being served"):
        loop.abort("unknown")
    with pytest.raises(InputError, match="step_tokens must be at least 1, got 0"):
        Limits(step_tokens=0)
    with pytest.raises(InputError, match="block_tokens must divide 64, got 24"):
        Runner(Decoder(SHAPE), num_blocks=4, block_tokens=24)
