"""One engine that is asked for rounds of a load from its first second on: in its own process."""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from connectors.disk_case import CPU_OPTIONS, TinyShape
from connectors.engine import Engine, Live, shape_of
from connectors.first_tokens import others
from connectors.hooks import thread_seconds
from connectors.loads import Load, difference, new_tokens, run_load
from connectors.measuring import Measuring
from connectors.modelless import Modelless, slow_copies

GROWN_AFTER = 60.0
TOKEN_SECONDS, BYTES_PER_SECOND = 25e-6, 51e9
"""Without a model: what a step takes for each token, and the speed of copies, on an H200."""

_collections: list[tuple[float, float]] = []
"""When Python's garbage collector began, and the milliseconds it took."""


@dataclass(frozen=True)
class RoundsCase:
    """What one process is about. Lengths are in tokens."""

    connector: str
    shape: str
    is_cpu: bool
    pool_bytes: int
    device_bytes: int
    load: Load
    prompt_tokens: int
    num_prompts: int
    is_modelless: bool = False
    step_seconds: float = 0.02
    """Without a model: what a step takes at least. More requests than CUDA graphs are for: 0.02."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class RoundsMeasurer(Measuring):
    """Owns the engine of this process; each method is an order's answer."""

    ORDERS = ("start", "grown", "round", "fill", "bound")

    def __init__(self, case: RoundsCase) -> None:
        self._case = case
        super().__init__()
        gc.callbacks.append(_note_collection)
        rng = random.Random(5)
        self._prompts = [new_tokens(rng, case.prompt_tokens) for _ in range(case.num_prompts)]
        self._answers: list[list[int]] = []

    def start(self, _: None) -> float:
        """As a server starts: nothing is warmed up but by vLLM itself."""
        case = self._case
        if case.is_modelless:
            block_bytes = shape_of(case.shape).block_bytes
            slow_copies(block_bytes / BYTES_PER_SECOND)
            self._engine = Modelless(
                case.connector,
                num_blocks=case.device_bytes // block_bytes,
                pool_bytes=case.pool_bytes,
                num_requests=case.load.num_clients,
                pace=lambda num_tokens: max(case.step_seconds, TOKEN_SECONDS * num_tokens),
            )
            return 0.0
        self._engine = Engine(
            TinyShape(case.shape) if case.is_cpu else shape_of(case.shape),
            case.connector,
            pool_bytes=case.pool_bytes,
            device_bytes=case.device_bytes,
            options=(CPU_OPTIONS if case.is_cpu else {})
            | {"max_num_seqs": max(16, case.load.num_clients)},
        )
        return self._engine.start_seconds

    def grown(self, _: None) -> str:
        """Once host memory is whole; returns how far it is."""
        end = time.monotonic() + GROWN_AFTER
        while not self.engine.has_grown and time.monotonic() < end:
            time.sleep(0.1)
        return self.engine.host_memory()

    def round(self, number: int) -> dict[str, Any]:
        """Conversations from their first turns on, others in every round."""
        before, worked = self.engine.host_memory(), thread_seconds()
        found = run_load(self.engine, self._case.load, seed=300 + number, fills=False)
        del found["steps_ms"], found["all_ttft_ms"]
        seconds = difference(worked, thread_seconds())
        return found | {
            "host_memory": [before, self.engine.host_memory()],
            "processor_s": {name: round(each, 2) for name, each in seconds.items()},
        }

    def fill(self, _: None) -> None:
        """Every prompt is computed once, and then in host memory."""
        self._answers = [self.engine.run(prompt, 4).tokens for prompt in self._prompts]
        self.grown(None)
        self.engine.settle(others(2))

    def bound(self, num_clients: int) -> dict[str, Any]:
        """Every prompt once more, ``num_clients`` at a time: nearly all of it must be loaded."""
        waiting = list(enumerate(self._prompts))
        live: dict[int, tuple[int, Live]] = {}
        served: list[Live] = []
        wrong = 0
        began = time.perf_counter()
        while waiting or live:
            while waiting and len(live) < num_clients:
                number, prompt = waiting.pop(0)
                one = self.engine.add(prompt, 4)
                live[id(one)] = (number, one)
            for one in self.engine.step():
                number, _ = live.pop(id(one))
                wrong += one.tokens != self._answers[number]
                served.append(one)
        seconds = time.perf_counter() - began
        cached = sum(one.cached_tokens for one in served)
        waits = [1e3 * (one.first - one.added) for one in served]
        steps = [self.engine.steps_ms[slice(*one.steps)] for one in served]
        return {
            "requests_per_s": len(served) / seconds,
            "gb_per_s": cached * shape_of(self._case.shape).token_bytes / seconds / 1e9,
            "cached": cached / sum(len(one.prompt) for one in served),
            "ttft_ms": statistics.median(waits),
            "all_ttft_ms": waits,
            "steps_ms": steps if num_clients == 1 else [],
            "collected": collected(began),
            "wrong_answers": wrong,
        }


def _note_collection(phase: str, _: dict[str, int]) -> None:
    if phase == "start":
        _collections.append((time.perf_counter(), 0.0))
    else:
        began, _ms = _collections.pop()
        _collections.append((began, round(1e3 * (time.perf_counter() - began), 3)))


def collected(since: float) -> list[float]:
    """Milliseconds of each garbage collection since then."""
    return [ms for began, ms in _collections if began >= since]
