"""vLLM without kvferry, in a process of its own, so that it can stay while other engines come."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

Tokens = list[list[int]]


class Reference:
    """Says what the model says. Owns its process."""

    def __init__(self, model: Path | None = None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._model = model
        self._process = ProcessPoolExecutor(1, mp_context=spawn)

    def generate(self, prompts: Tokens, max_tokens: int) -> Tokens:
        return self.call(_generate, self._model, prompts, max_tokens)

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """What ``work`` returns there; it raises what that raises."""
        return self._process.submit(work, *args).result()

    def close(self) -> None:
        for process in list((self._process._processes or {}).values()):
            process.kill()  # vLLM may take its time to end
        self._process.shutdown()


def _generate(model: Path, prompts: Tokens, max_tokens: int) -> Tokens:
    return _engine(model).generate(prompts, max_tokens)


@cache
def _engine(model: Path) -> Any:
    from tests.integration.vllm.engine import Engine

    return Engine(model, num_gpu_blocks_override=512)


def in_a_process(work: Callable[..., Any], *args: Any) -> Any:
    """What ``work`` returns, from a process that ends with it."""
    reference = Reference()
    try:
        return reference.call(work, *args)
    finally:
        reference.close()
