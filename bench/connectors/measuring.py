"""What every measured process has: an engine of its own, and orders that it answers."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from connectors.child import serve
from connectors.engine import Engine


class Measuring:
    """Owns the engine of this process; each method named in ``ORDERS`` is an order's answer."""

    ORDERS: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._engine: Any = None  # an Engine, or one without a model

    def serve(self, descriptor: int) -> None:
        serve({name: getattr(self, name) for name in ("load", *self.ORDERS)}, descriptor)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "no order to start"
        return self._engine

    def load(self, _: None) -> float:
        """Import vLLM: counted apart from the engine's own start."""
        began = time.perf_counter()
        from vllm import LLM  # noqa: F401

        return time.perf_counter() - began
