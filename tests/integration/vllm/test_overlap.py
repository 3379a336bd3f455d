"""Requests that run while their loads land: the same tokens, whatever happens to the load."""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import Any

import pytest
from tests.fakes.overlap import overlap_every_load
from tests.integration.vllm import asynchronous
from tests.integration.vllm.engine import FERRY as COPIES
from tests.integration.vllm.engine import Engine, make_prompts, tampering
from tests.integration.vllm.reference import in_a_process

from kvferry.connectors.common.overlap import LayerwiseLoads
from kvferry.transfer.engine.cpu import CpuEngine

FERRY = {
    **COPIES,
    "overlap_loads": "auto",
}
ENOUGH = 1000 if os.environ.get("KVFERRY_TEST_PROFILE") == "soak" else 60
"""Right answers in a life at random."""

PART_SECONDS = 0.03
"""How long each part of a load takes here: long after its request has begun to run."""

LATE_SECONDS = 0.3
"""The same where a test must see what is read too early, also on a machine that is busy."""


@pytest.fixture(autouse=True)
def every_load(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap_every_load(monkeypatch)


@pytest.fixture
def slow_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that land part by part take their time, so that who does not wait reads old bytes."""
    _slow_down(monkeypatch)


@pytest.fixture
def late_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    _slow_down(monkeypatch, LATE_SECONDS)


def _slow_down(monkeypatch: Any, seconds: float = PART_SECONDS) -> None:
    real = CpuEngine._move

    def late(self: Any, part: Any) -> None:
        if part.layout not in self._jobs.layouts:
            time.sleep(seconds)
        real(self, part)

    monkeypatch.setattr(CpuEngine, "_move", late)


def told_early(engine: Engine, monkeypatch: Any) -> list[str]:
    """The requests that vLLM is told of before their loads have landed."""
    told: list[str] = []
    real = LayerwiseLoads.tell

    def noted(self: Any, load: Any) -> None:
        told.append(load.request_id)
        real(self, load)

    monkeypatch.setattr(LayerwiseLoads, "tell", noted)
    return told


def poison(engine: Engine) -> None:
    """Whoever reads a block before its load lands finds this."""
    for tensor in engine.worker._cache.tensors.values():
        tensor.fill_(7.0)


def test_a_prompt_comes_back_while_it_is_computed(start, expect, llama, slow_parts, monkeypatch):
    prompts = make_prompts(1, 100, 200, 300, 33, 31)
    expected = expect(llama, prompts)
    engine = start(llama, ferry=FERRY)
    told = told_early(engine, monkeypatch)
    assert engine.generate(prompts) == expected
    for _ in range(2):
        engine.forget_device()
        poison(engine)
        assert engine.generate(prompts) == expected
    assert told
    engine.check_idle()


@pytest.mark.parametrize("breaks", ["no layer waits", "for the part before"])
def test_it_is_the_waiting_that_keeps_tokens_right(
    start, expect, llama, late_parts, monkeypatch, breaks
):
    prompts = make_prompts(2, 300)
    expected = expect(llama, prompts)
    engine = start(llama, ferry=FERRY)
    assert engine.generate(prompts) == expected
    engine.forget_device()
    poison(engine)
    real = CpuEngine.order_compute_after_part

    def wrong(self: Any, ids: Any, number: int) -> None:
        if breaks == "for the part before" and number > 0:
            real(self, ids, number - 1)

    monkeypatch.setattr(CpuEngine, "order_compute_after_part", wrong)
    assert engine.generate(prompts) != expected


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_load_that_fails_is_computed(start, expect, llama, slow_parts, monkeypatch, every):
    prompts = make_prompts(11, 300, 200, 300, 100)
    expected = expect(llama, prompts)
    count = itertools.count(1)
    fails = lambda transfer: transfer.dst == "device" and next(count) % every == 0  # noqa: E731
    with tampering(monkeypatch, fails=fails) as tampers:
        engine = start(llama, ferry=FERRY)
    told = told_early(engine, monkeypatch)
    assert engine.generate(prompts) == expected
    for _ in range(3):
        engine.forget_device()
        poison(engine)
        assert engine.generate(prompts) == expected
    assert tampers[0].num_failed > 0
    assert told or every == 1
    engine.check_idle()


def test_with_asynchronous_scheduling(expect, llama):
    prompts = make_prompts(15, 100, 200, 300, 33)
    answers, num_failed, num_told = in_a_process(asynchronously, llama, prompts)
    assert all(answer == expect(llama, prompts) for answer in answers)
    assert num_failed > 0
    assert num_told > 0


def asynchronously(model, prompts):
    asynchronous.allow()
    count = itertools.count(1)
    fails = lambda transfer: transfer.dst == "device" and next(count) % 3 == 0  # noqa: E731
    with pytest.MonkeyPatch.context() as monkeypatch:
        _slow_down(monkeypatch)
        overlap_every_load(monkeypatch)
        with tampering(monkeypatch, fails=fails) as tampers:
            engine = Engine(model, ferry=FERRY, async_scheduling=True)
        assert asynchronous.is_asynchronous(engine)
        told = told_early(engine, monkeypatch)
        answers = [engine.generate(prompts)]
        for _ in range(4):
            engine.forget_device()
            poison(engine)
            answers.append(engine.generate(prompts))
        engine.check_idle()
    return answers, tampers[0].num_failed, len(told)


def test_at_random(start, expect, llama, monkeypatch):
    """Aborts, resets, failures and receipts that come late, while loads land at any pace."""
    chooser = random.Random(16)
    prompts = make_prompts(16, *[chooser.randrange(20, 400) for _ in range(16)])
    expected = expect(llama, prompts)
    real = CpuEngine._move

    def late(self: Any, part: Any) -> None:
        if part.layout not in self._jobs.layouts:
            time.sleep(chooser.choice((0, 0, 0.002, 0.01)))
        real(self, part)

    monkeypatch.setattr(CpuEngine, "_move", late)
    with tampering(monkeypatch, fails=lambda transfer: chooser.random() < 0.1) as tampers:
        engine = start(llama, ferry=FERRY, num_gpu_blocks_override=34)
    told = told_early(engine, monkeypatch)
    running: dict[str, int] = {}
    num_right = num_left = 0
    while num_right < ENOUGH or running:
        while len(running) < 4 and num_right < ENOUGH:
            number = chooser.randrange(len(prompts))
            running[engine.add(prompts[number])] = number
        for name, tokens in engine.step().items():
            number = running.pop(name, -1)
            if number >= 0:
                assert tokens == expected[number], f"wrong after {num_right} right ones"
                num_right += 1
        tampers[0].holds_receipts = chooser.random() < 0.3
        if running and chooser.random() < 0.02:
            name = chooser.choice(list(running))
            del running[name]
            engine.abort(name)
            num_left += 1
        if chooser.random() < 0.01:
            engine.llm.reset_prefix_cache(reset_connector=chooser.random() < 0.3)
    tampers[0].holds_receipts = False
    engine.check_idle()
    assert told
    assert num_left
    assert tampers[0].num_failed
