"""Asynchronous scheduling on the CPU, where vLLM turns it off because it brings nothing there.

The scheduler, the queue of batches and the runner's own bookkeeping are vLLM's; only the streams
and events of a GPU, which order nothing on a CPU, are replaced.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from tests.integration.vllm.engine import FERRY, Engine, make_prompts


class _Nothing:
    """A stream or an event that nobody has to wait for."""

    device = "cpu"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...


def allow() -> None:
    """For this process, for good: make engines afterwards."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    real = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        real(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(check)
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = lambda *args: _Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()


def is_asynchronous(engine: Engine) -> bool:
    core = engine.llm.llm_engine.engine_core.engine_core
    return type(core.scheduler).__name__ == "AsyncScheduler" and core.batch_queue is not None


def crowd(
    model: Path, prompts: list[list[int]], num_blocks: int
) -> tuple[list[list[int]], int, int]:
    """More requests than the device holds, twice; answers, preemptions and blocks loaded."""
    allow()
    engine = Engine(
        model,
        ferry=FERRY,
        async_scheduling=True,
        num_gpu_blocks_override=num_blocks,
        max_model_len=256,
    )
    assert is_asynchronous(engine)
    with pytest.MonkeyPatch.context() as monkeypatch:
        preempted = engine.note_preemptions(monkeypatch)
        answers = engine.generate(prompts, max_tokens=120)
    # A preempted request found its first blocks still on the device; others take them now.
    engine.generate(make_prompts(84, 200, 200), max_tokens=2)
    assert engine.generate(prompts, max_tokens=120) == answers
    engine.check_idle()
    return answers, len(preempted), engine.loaded_blocks
