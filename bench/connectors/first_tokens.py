"""One request at a time: how soon its first token comes, cold, from the GPU and from the host."""

from __future__ import annotations

import random
import statistics
from typing import Any

from connectors.engine import BLOCK_TOKENS, Engine, Live
from connectors.loads import difference, new_tokens

GB = 1e9

ANSWER = 8
"""Tokens of an answer that is compared."""

_OTHER = random.Random(5)


def others(count: int) -> list[list[int]]:
    """Short prompts that were never asked before."""
    return [new_tokens(_OTHER, 64) for _ in range(count)]


class FirstTokens:
    """Knows the times of long prompts so far. Made, it has asked each twice: cold, and again.

    The rounds are few and short, so that several engines can take turns at them: a machine whose
    processors are slow for a minute is slow for all.
    """

    def __init__(self, engine: Engine, prompt_tokens: int, num_prompts: int) -> None:
        rng = random.Random(1)
        self._engine = engine
        self._prompts = [new_tokens(rng, prompt_tokens) for _ in range(num_prompts)]
        self._kv_bytes = prompt_tokens // BLOCK_TOKENS * engine.shape.block_bytes
        self._link = Link()
        self._cold: list[float] = []
        self._device: list[float] = []
        self._beside: list[float] = []
        self._host: list[float] = []
        self._answers: list[dict[str, list[int]]] = []
        self._loaded = 0
        for prompt in self._prompts:
            first = engine.run(prompt, ANSWER)
            again = engine.run(prompt, ANSWER)
            self._cold.append(_ttft(first))
            self._device.append(_ttft(again))
            self._answers.append({"cold": first.tokens, "device": again.tokens})
        engine.settle(others(3))
        self._before = engine.counters()

    def run(self, number: int) -> None:
        """Each prompt from host memory after the GPU's cache was dropped, and then from the GPU."""
        engine = self._engine
        self._link.measure()
        for prompt, answer in zip(self._prompts, self._answers, strict=True):
            engine.forget(others(1))
            back = engine.run(prompt, ANSWER)
            again = engine.run(prompt, ANSWER)
            self._host.append(_ttft(back))
            self._beside.append(_ttft(again))
            self._loaded += back.cached_tokens // BLOCK_TOKENS
            answer |= {f"host{number}": back.tokens, f"device{number}": again.tokens}
            engine.settle(others(1))

    def found(self) -> dict[str, Any]:
        self._link.measure()
        rate = self._link.rate
        self._link.close()
        device = self._beside or self._device  # those that alternate with the host's count
        return {
            "cold_ms": self._cold,
            "device_ms": device,
            "host_ms": self._host,
            "kv_bytes": self._kv_bytes,
            "link_gb_per_s": rate / GB,
            "floor_ms": statistics.median(device) + 1e3 * self._kv_bytes / rate,
            "loaded_blocks": self._loaded,
            "answers": self._answers,
            "counted": difference(self._before, self._engine.counters()),
        }


def _ttft(live: Live) -> float:
    return 1e3 * (live.first - live.added)


class Link:
    """One large copy from pinned host memory to the GPU, timed now and then: the best counts."""

    def __init__(self, num_bytes: int = 1 << 29) -> None:
        import torch

        self._torch = torch
        self._source: Any = torch.full((num_bytes,), 3, dtype=torch.uint8).pin_memory()
        self._target: Any = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self.rate = 0.0

    def measure(self) -> None:
        torch = self._torch
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            self._target.copy_(self._source, non_blocking=True)
            end.record()
            torch.cuda.synchronize()
            rate = self._source.nbytes / (1e-3 * start.elapsed_time(end))
            self.rate = max(self.rate, rate)

    def close(self) -> None:
        self._source = self._target = None
