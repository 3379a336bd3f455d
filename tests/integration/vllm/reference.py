"""vLLM without kvferry, in a process of its own, so that it can stay while other engines come."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Reference:
    """Says what the model says. Owns its process."""

    def __init__(self, model: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(model, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        self._pipe.send((prompts, max_tokens))
        answer, failure = self._pipe.recv()
        assert not failure, failure
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20)
        self._process.kill()


def _serve(model: Path, pipe: Connection[Any, Any]) -> None:
    engine: Any = None
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        try:
            if engine is None:
                from tests.integration.vllm.engine import Engine

                engine = Engine(model, num_gpu_blocks_override=512)
            pipe.send((engine.generate(*asked), ""))
        except Exception:  # the next question may find the machine in a better state
            pipe.send(([], traceback.format_exc()))


def in_a_process(work: Callable[..., Any], *args: Any) -> Any:
    """What ``work`` returns, from a process that ends with it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(work, args, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        result, failure = ours.recv()
    finally:
        process.join(20)
        process.kill()
    assert not failure, failure
    return result


def _work(work: Callable[..., Any], args: Any, pipe: Connection[Any, Any]) -> None:
    try:
        pipe.send((work(*args), ""))
    except Exception:
        pipe.send((None, traceback.format_exc()))
