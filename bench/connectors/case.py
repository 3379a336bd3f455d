"""One connector on one shape: what is measured, in the process that runs its engine."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from connectors.engine import BLOCK_TOKENS, Engine, shape_of
from connectors.first_tokens import FirstTokens, others
from connectors.hooks import summary, thread_seconds, timed_hooks
from connectors.loads import Load, difference, new_tokens, run_load
from connectors.measuring import Measuring
from connectors.toggled import toggled

GROWN_AFTER = 30.0
"""Seconds after which host memory that has not grown whole is measured as it is."""


@dataclass(frozen=True)
class Case:
    """What one process is about. Lengths are in tokens."""

    connector: str
    shape: str
    pool_bytes: int
    device_bytes: int
    prompt_tokens: int
    num_prompts: int
    rounds: int
    over: Load
    fits: Load


class Measurer(Measuring):
    """Owns the engine of this process; each method is an order's answer."""

    ORDERS = (
        "start",
        "warm",
        "forget",
        "fits",
        "hooks",
        "toggled",
        "ttft_begin",
        "ttft_round",
        "ttft_end",
        "bytes",
        "over",
        "counted",
    )

    def __init__(self, case: Case) -> None:
        self._case = case
        super().__init__()
        self._first_tokens: FirstTokens | None = None

    def start(self, _: None) -> dict[str, Any]:
        case = self._case
        engine = self._engine = Engine(
            shape_of(case.shape),
            case.connector,
            pool_bytes=case.pool_bytes,
            device_bytes=case.device_bytes,
        )
        return {
            "seconds": engine.start_seconds,
            "num_gpu_blocks": engine.num_blocks,
            "host_memory": engine.host_memory(),
        }

    def warm(self, _: None) -> str:
        """Everything has run once, and host memory is whole; returns how far that is."""
        warm_up(self.engine)
        end = time.monotonic() + GROWN_AFTER
        while not self.engine.has_grown and time.monotonic() < end:
            time.sleep(0.1)
        return self.engine.host_memory()

    def ttft_begin(self, _: None) -> None:
        case = self._case
        self._first_tokens = FirstTokens(self.engine, case.prompt_tokens, case.num_prompts)

    def ttft_round(self, number: int) -> None:
        assert self._first_tokens is not None, "no order to begin"
        self._first_tokens.run(number)

    def ttft_end(self, _: None) -> dict[str, Any]:
        assert self._first_tokens is not None, "no order to begin"
        found, self._first_tokens = self._first_tokens.found(), None
        return found

    def bytes(self, _: None) -> dict[str, Any]:
        return check_bytes(self.engine, self._case)

    def over(self, number: int) -> dict[str, Any]:
        """Conversations that need host memory, others in every round."""
        return run_load(self.engine, self._case.over, seed=7 + number, fills=True)

    def forget(self, _: None) -> None:
        """Drop the GPU's prefix cache; a connector stores what it still holds before."""
        self.engine.forget(others(1))

    def fits(self, number: int) -> dict[str, Any]:
        """Conversations that need none, others in every round; after ``forget``."""
        return run_load(self.engine, self._case.fits, seed=100 + number, fills=False)

    def hooks(self, number: int) -> dict[str, Any]:
        """As ``fits``, with the connector's hooks timed."""
        self.engine.forget(others(1))
        before = thread_seconds()
        with timed_hooks(self.engine) as times:
            found = run_load(self.engine, self._case.fits, seed=100 + number, fills=False)
        threads = difference(before, thread_seconds())
        return {"seconds": found["seconds"], "hooks": summary(times), "threads": threads}

    def toggled(self, rounds: int) -> dict[str, list[dict[str, Any]]]:
        """As ``fits``, in this engine alone: with its connector's hooks and without."""

        def run(number: int) -> dict[str, Any]:
            return run_load(self.engine, self._case.fits, seed=2000 + number, fills=False)

        return toggled(self.engine, rounds, prepare=lambda: self.engine.forget(others(1)), run=run)

    def counted(self, _: None) -> dict[str, float]:
        return self.engine.counters()


def warm_up(engine: Engine) -> None:
    """Every kernel and graph that is used later has run once, and a load too."""
    prompts = others(3)
    for _ in range(2):
        for prompt in prompts:
            engine.run(prompt, 4)
        engine.settle(others(2))
        engine.forget(others(1))
    rng = random.Random(99)
    lives = [engine.add(new_tokens(rng, 700), 8) for _ in range(8)]
    while not all(live.done for live in lives):
        engine.step()


# -- are the bytes right ------------------------------------------------------------------------


def check_bytes(engine: Engine, case: Case) -> dict[str, Any]:
    """Digests of every layer of every block, before the blocks left the GPU and after they came.

    In between the whole KV cache on the GPU is overwritten. At last it is overwritten under a valid
    prefix cache: answers that stay the same then would mean that nothing here could ever fail.
    """
    rng = random.Random(2)
    found: dict[str, Any] = {"blocks": 0, "wrong_blocks": 0, "answers": 0, "wrong_answers": 0}
    for _ in range(2):
        prompt = new_tokens(rng, case.prompt_tokens)
        engine.run(prompt, 1)
        kept = engine.digests(prompt)
        answer = engine.run(prompt, 16).tokens
        engine.settle(others(3))
        engine.forget(others(1))
        engine.poison()
        live = engine.run(prompt, 16)
        loaded = engine.digests(prompt)
        # The last token is computed again, and with it a value in the last block.
        num_loaded = min(live.cached_tokens, case.prompt_tokens - 1) // BLOCK_TOKENS
        pairs = list(zip(kept, loaded, strict=False))[:num_loaded]
        found["blocks"] += num_loaded
        found["wrong_blocks"] += num_loaded - sum(a == b for a, b in pairs)
        found["answers"] += len(answer)
        found["wrong_answers"] += sum(a != b for a, b in zip(answer, live.tokens, strict=True))
        engine.poison()
        broken = engine.run(prompt, 16)
        found["control_wrong_blocks"] = sum(
            a != b for a, b in zip(kept, engine.digests(prompt), strict=False)
        )
        found["control_wrong_answers"] = sum(
            a != b for a, b in zip(answer, broken.tokens, strict=True)
        )
        engine.forget(others(1))
    return found
