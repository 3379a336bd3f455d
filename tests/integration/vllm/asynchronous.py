"""Asynchronous scheduling on the CPU, where vLLM turns it off because it brings nothing there.

The scheduler, the queue of batches and the runner's own bookkeeping are vLLM's; only the streams
and events of a GPU, which order nothing on a CPU, are replaced.
"""

from __future__ import annotations

import contextlib
from typing import Any


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


def is_asynchronous(engine: Any) -> bool:
    core = engine.llm.llm_engine.engine_core.engine_core
    return type(core.scheduler).__name__ == "AsyncScheduler" and core.batch_queue is not None
