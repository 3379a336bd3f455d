"""Work for the card to do beside a copy: what a model does, in its two pure forms.

A large product of matrices keeps the multiprocessors busy (prefill); reading many weights for few
tokens keeps the memory busy (decode). This module needs torch and is imported only for measuring.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Load(Protocol):
    """Something to run again and again on torch's current stream."""

    name: str

    def step(self) -> None:
        """Queue one round."""


class MatmulLoad:
    """One square bf16 product per round, by default 8192 wide."""

    def __init__(self, size: int = 8192) -> None:
        self.name = f"{size}³ bf16 matmul"
        shape = (size, size)
        self._a: Any = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._b: Any = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._out: Any = torch.empty_like(self._a)

    def step(self) -> None:
        torch.mm(self._a, self._b, out=self._out)


class WeightLoad:
    """All weights times a few tokens per round, as one graph: 4 GiB of weights by default.

    A graph because that is how servers decode, and because sixteen launches per round from Python
    would measure how the copy's thread and this one share the interpreter.
    """

    def __init__(self, layers: int = 16, tokens: int = 16) -> None:
        shape = (layers, 8192, 16384)
        gib = layers * 8192 * 16384 * 2 / 2**30
        self.name = f"weight-streaming matmul, {gib:.0f} GiB of weights"
        self._weights: Any = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._tokens: Any = torch.randn((tokens, 8192), device="cuda", dtype=torch.bfloat16)
        self._out: Any = torch.empty((tokens, 16384), device="cuda", dtype=torch.bfloat16)
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
