"""What a copy costs the model: rounds of a load timed alone and beside copies, in turn.

The two are interleaved because a card under load changes its clock within a second: measured one
after the other, the drift would exceed the result::

    load   ▏alone ▏ … ▏ beside copies ▏ … ▏alone ▏   and again
    copies            ▏▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▏

This module needs torch and is imported only for measuring.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from _copy_rig import GB, CopyRig
from kvferry.errors import DeadlineError
from kvferry.transfer.job import CopyJob
from kvferry.transfer.paths.contract import Path

WIDTH = 8192
LAYERS, TOKENS = 16, 16
"""Of the weights: 4 GiB in bf16, for few tokens."""


class MatmulLoad:
    """A model load on torch's current stream: one square bf16 product per round."""

    def __init__(self) -> None:
        self.name = f"{WIDTH}³ bf16 matmul"
        shape = (WIDTH, WIDTH)
        self._a: Any = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._b: Any = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._out: Any = torch.empty_like(self._a)

    def step(self) -> None:
        """Queue one round."""
        torch.mm(self._a, self._b, out=self._out)


class WeightLoad:
    """All weights times a few tokens per round, as one graph.

    A graph because that is how servers decode, and because sixteen launches per round from Python
    would measure how the copy's thread and this one share the interpreter.
    """

    def __init__(self) -> None:
        shape = (LAYERS, WIDTH, 2 * WIDTH)
        gib = math.prod(shape) * 2 / 2**30
        self.name = f"weight-streaming matmul, {gib:.0f} GiB of weights"
        self._weights: Any = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._tokens: Any = torch.randn((TOKENS, WIDTH), device="cuda", dtype=torch.bfloat16)
        self._out: Any = torch.empty((TOKENS, 2 * WIDTH), device="cuda", dtype=torch.bfloat16)
        self._round()
        torch.cuda.synchronize()
        self._graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._round()

    def step(self) -> None:
        self._graph.replay()

    def _round(self) -> None:
        for weights in self._weights:
            torch.mm(self._tokens, weights, out=self._out)


IN_FLIGHT = 3
"""Copies queued at a time: enough that the link never waits for the host."""


@dataclass(frozen=True)
class Slowdown:
    """A load beside copies: how fast they went, and what they took from it."""

    alone_ms: float
    beside_ms: float
    gbps: float
    lost_ms_per_gb: float

    @property
    def factor(self) -> float:
        return self.beside_ms / self.alone_ms


class _Copier(threading.Thread):
    """Keeps copies in flight from its start until ``stopping`` is set."""

    def __init__(self, rig: CopyRig, path: Path, job: CopyJob) -> None:
        super().__init__(name="kvferry-copier", daemon=True)
        self._rig = rig
        self._path = path
        self._job = job
        self._stream: Any = torch.cuda.ExternalStream(rig.streams[job.direction])
        self.stopping = False
        self.ends: list[Any] = []
        self.fault: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with self._rig.driver.current():
                self._copy()
        except BaseException as fault:  # raised by close(), after the load was stopped
            self.fault = fault

    def close(self) -> None:
        """End the copies; raises their fault."""
        self.stopping = True
        self.join()
        if self.fault is not None:
            raise self.fault

    def _copy(self) -> None:
        while not self.stopping:
            stream = self._rig.streams[self._job.direction]
            self._path.enqueue(self._job, stream, self._rig.ready)
            end: Any = torch.cuda.Event(enable_timing=True)
            end.record(self._stream)
            self.ends.append(end)
            if len(self.ends) >= IN_FLIGHT:
                self.ends[-IN_FLIGHT].synchronize()
        self._stream.synchronize()


class _Rounds:
    """Runs the load without a gap and keeps the end of every round."""

    def __init__(self, load: MatmulLoad | WeightLoad) -> None:
        self._load = load
        self.ends: list[Any] = []
        self._round()

    def run(self, count: int) -> tuple[int, int]:
        """``count`` rounds; returns the numbers of the first and one past the last."""
        first = len(self.ends)
        for _ in range(count):
            self._round()
        return first, len(self.ends)

    def run_until(self, done: Callable[[], bool], timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                raise DeadlineError(f"the copies beside {self._load.name} did not go on")
            self._round()

    def _round(self) -> None:
        self._load.step()
        end: Any = torch.cuda.Event(enable_timing=True)
        end.record()
        self.ends.append(end)
        if len(self.ends) > 3:
            self.ends[-3].synchronize()  # two rounds ahead of the card, no more


def measure_slowdown(
    rig: CopyRig,
    load: MatmulLoad | WeightLoad,
    path: Path,
    job: CopyJob,
    *,
    rounds: int = 16,
    phases: int = 3,
    warm_up: int = 8,
) -> Slowdown:
    """Time ``rounds`` of ``load`` beside copies of ``job``, and as many alone, ``phases`` times."""
    stream = rig.streams[job.direction]
    path.enqueue(job, stream, rig.ready)  # compile and upload before anything is timed
    rig.driver.synchronize_stream(stream)
    clock = _Rounds(load)
    alone: list[tuple[int, int]] = []
    beside: list[tuple[int, int, list[Any]]] = []
    try:
        clock.run(warm_up)
        for _ in range(phases):
            alone.append(clock.run(rounds // 2))
            beside.append(_run_beside(clock, _Copier(rig, path, job), rounds))
            clock.run(3)
            alone.append(clock.run(rounds // 2))
    finally:
        torch.cuda.synchronize()
    return _evaluate(clock.ends, alone, beside, job.num_bytes)


def _run_beside(clock: _Rounds, copier: _Copier, rounds: int) -> tuple[int, int, list[Any]]:
    try:
        clock.run_until(lambda: len(copier.ends) > IN_FLIGHT or not copier.is_alive())
        first, last = clock.run(rounds)
        # Until a copy has ended that is queued from now on: the rate is then known up to here.
        queued = len(copier.ends)
        clock.run_until(lambda: len(copier.ends) > queued or not copier.is_alive())
        copier.stopping = True
        clock.run_until(lambda: not copier.is_alive())
    finally:
        copier.close()
    return first, last, copier.ends


def _evaluate(
    ends: list[Any],
    alone: list[tuple[int, int]],
    beside: list[tuple[int, int, list[Any]]],
    job_bytes: int,
) -> Slowdown:
    origin = ends[0]

    def times(events: list[Any]) -> Any:
        return np.array([origin.elapsed_time(event) for event in events])

    at = times(ends)
    alone_ms = sum(at[b - 1] - at[a - 1] for a, b in alone) / sum(b - a for a, b in alone)
    total_ms, moved, count = 0.0, 0.0, 0
    for first, last, copies in beside:
        begin, end = at[first - 1], at[last - 1]
        copied = times(copies)
        bytes_by = np.arange(1, len(copies) + 1) * job_bytes
        moved += float(np.interp(end, copied, bytes_by) - np.interp(begin, copied, bytes_by)) / GB
        total_ms += end - begin
        count += last - first
    beside_ms = total_ms / count
    lost = total_ms - count * alone_ms
    return Slowdown(
        alone_ms=float(alone_ms),
        beside_ms=float(beside_ms),
        gbps=moved / (total_ms / 1e3),
        lost_ms_per_gb=float(lost / moved) if moved else float("inf"),
    )
