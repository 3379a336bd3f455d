"""Work for the card to do beside a copy: what a model does, in its two pure forms.

A large product of matrices keeps the multiprocessors busy (prefill); reading many weights for few
tokens keeps the memory busy (decode). This module needs torch and is imported only for measuring.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

WIDTH = 8192
LAYERS, TOKENS = 16, 16
"""Of the weights: 4 GiB in bf16, for few tokens."""


class Load(Protocol):
    """Something to run again and again on torch's current stream."""

    name: str

    def step(self) -> None:
        """Queue one round."""


class MatmulLoad:
    """One square bf16 product per round."""

    def __init__(self) -> None:
        self.name = f"{WIDTH}³ bf16 matmul"
        shape = (WIDTH, WIDTH)
        self._a: Any = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._b: Any = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._out: Any = torch.empty_like(self._a)

    def step(self) -> None:
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


def release() -> None:
    """Hand the memory of loads that are gone back to the card: a server has its own use for it."""
    torch.cuda.empty_cache()
