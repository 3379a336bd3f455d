"""One connector on one shape, in a process of its own: what is measured, in which order.

The result is written after every section, so that a process that is cut short leaves what it has.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from connectors.engine import BLOCK_TOKENS, Engine, shape_of
from connectors.loads import Load, difference, new_tokens, run_load

GB = 1e9

HANGS_AFTER = 60.0
"""Seconds without a result after which every thread's place goes to the log."""

ANSWER = 8
"""Tokens of an answer that is compared."""


@dataclass(frozen=True)
class Case:
    """What one process is asked to do. Lengths are in tokens."""

    connector: str
    shape: str
    pool_bytes: int
    device_bytes: int
    graphs: bool
    sections: tuple[str, ...]
    prompt_tokens: int
    num_prompts: int
    rounds: int
    over: Load
    fits: Load
    fits_rounds: int
    over_rounds: int = 1


def run_case(case: Case, out: str) -> None:
    """Measure and write to ``out``; never returns normally from a broken engine."""
    result: dict[str, Any] = {"case": asdict(case)}
    faulthandler.dump_traceback_later(HANGS_AFTER, repeat=True)

    def note(name: str, value: Any) -> None:
        result[name] = value
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback_later(HANGS_AFTER, repeat=True)
        with open(out + ".part", "w", encoding="utf-8") as file:
            json.dump(result, file)
        os.replace(out + ".part", out)

    began = time.perf_counter()
    import vllm  # noqa: F401  counted apart from the engine's own start

    note("import_s", time.perf_counter() - began)
    engine = Engine(
        shape_of(case.shape),
        case.connector,
        pool_bytes=case.pool_bytes,
        device_bytes=case.device_bytes,
        graphs=case.graphs,
    )
    note("start_s", engine.start_seconds)
    note("num_gpu_blocks", engine.num_blocks)
    note("host_memory_at_start", engine.host_memory())
    warm_up(engine)
    sections: dict[str, Callable[[], Any]] = {
        "ttft": lambda: time_to_first_token(engine, case),
        "bytes": lambda: check_bytes(engine, case),
        "over": lambda: [
            run_load(engine, case.over, seed=7 + i, fills=True) for i in range(case.over_rounds)
        ],
        "fits": lambda: fitting(engine, case),
    }
    for name in case.sections:
        began = time.perf_counter()
        note(name, sections[name]())
        note(f"{name}_took_s", time.perf_counter() - began)
    note("host_memory", engine.host_memory())
    note("counters", engine.counters())
    note("done", True)


def warm_up(engine: Engine) -> None:
    """Every kernel and graph that is used later has run once, and a load too."""
    others = _others(3)
    for _ in range(2):
        for prompt in others:
            engine.run(prompt, 4)
        engine.settle(_others(2))
        engine.forget(_others(1))
    rng = random.Random(99)
    lives = [engine.add(new_tokens(rng, 700), 8) for _ in range(8)]
    while not all(live.done for live in lives):
        engine.step()


_OTHER = random.Random(5)


def _others(count: int) -> list[list[int]]:
    """Short prompts that were never asked before."""
    return [new_tokens(_OTHER, 64) for _ in range(count)]


# -- one request at a time ----------------------------------------------------------------------


def time_to_first_token(engine: Engine, case: Case) -> dict[str, Any]:
    """Cold, from the GPU's own cache, and from host memory after that cache was dropped."""
    prompts = _prompts(case)
    link = Link()
    cold, device, host = [], [], []
    answers: list[dict[str, list[int]]] = []
    for prompt in prompts:
        first = engine.run(prompt, ANSWER)
        again = engine.run(prompt, ANSWER)
        cold.append(_ttft(first))
        device.append(_ttft(again))
        answers.append({"cold": first.tokens, "device": again.tokens})
    engine.settle(_others(3))
    before = engine.counters()
    loaded = 0
    if case.connector != "none":
        device = []  # those that alternate with the host's count
        for number in range(case.rounds):
            link.measure()
            for prompt, answer in zip(prompts, answers, strict=True):
                engine.forget(_others(1))
                back = engine.run(prompt, ANSWER)
                again = engine.run(prompt, ANSWER)
                host.append(_ttft(back))
                device.append(_ttft(again))
                loaded += back.cached_tokens // BLOCK_TOKENS
                answer |= {f"host{number}": back.tokens, f"device{number}": again.tokens}
                engine.settle(_others(1))
    link.measure()
    kv_bytes = case.prompt_tokens // BLOCK_TOKENS * engine.shape.block_bytes
    found = {
        "cold_ms": cold,
        "device_ms": device,
        "host_ms": host,
        "kv_bytes": kv_bytes,
        "link_gb_per_s": link.rate / GB,
        "floor_ms": statistics.median(device) + 1e3 * kv_bytes / link.rate,
        "loaded_blocks": loaded,
        "answers": answers,
        "counted": difference(before, engine.counters()),
    }
    link.close()
    return found


def _ttft(live: Any) -> float:
    return 1e3 * (live.first - live.added)


def _prompts(case: Case) -> list[list[int]]:
    rng = random.Random(1)
    return [new_tokens(rng, case.prompt_tokens) for _ in range(case.num_prompts)]


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
        engine.settle(_others(3))
        engine.forget(_others(1))
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
        engine.forget(_others(1))
    return found


# -- many at a time -----------------------------------------------------------------------------


def fitting(engine: Engine, case: Case) -> list[dict[str, Any]]:
    """The load that needs no host memory, again and again with other conversations."""
    rounds = []
    for number in range(case.fits_rounds):
        engine.forget(_others(1))
        rounds.append(run_load(engine, case.fits, seed=100 + number, fills=False))
    return rounds
