"""One request and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.keys import Keys
from kvferry.playground.model import Span
from kvferry.playground.tables import Tables
from kvferry.scheduler import Request
from kvferry.types import RequestId


class ServedState(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # has no blocks
    LOADING = "loading"  # has blocks, a transfer is filling them
    RUNNING = "running"  # has blocks, is computed
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(eq=False)
class ServedRequest:
    """A prompt, what was generated so far, and the tables of the blocks with its KV.

    ::

        tokens   | prompt ................ | generated ... |
        computed | on device | loaded | computed here |    ^ next token to feed
        tables   | b0 | b1 | b2 | ...                 |    one per group
    """

    id: RequestId
    prompt: Sequence[int]
    max_new_tokens: int
    arrival: float = 0.0
    """When it may first be looked at, on the engine's clock."""

    hints: Hints | None = None
    """What is known of it by whoever sends it."""

    state: ServedState = ServedState.WAITING
    tokens: list[int] = field(default_factory=list)
    tables: Tables = field(default_factory=list)
    keys: Keys = field(default_factory=Keys.empty)
    ferried: Request | None = None
    """The same request as kvferry knows it."""

    num_computed: int = 0
    num_loading: int = 0
    """Tokens its load will bring."""

    num_published: int = 0
    """Blocks, from the first, whose content the device prefix cache has been told."""

    first_token_at: float | None = None
    finished_at: float | None = None
    num_device_hits: int = 0
    num_loaded: int = 0
    num_prefilled: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise InputError(f"request {self.id} has an empty prompt")
        if self.max_new_tokens < 1:
            raise InputError(
                f"request {self.id} must generate at least 1 token, got {self.max_new_tokens}"
            )
        self.tokens = [int(token) for token in self.prompt]

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def is_decoding(self) -> bool:
        """Whether its next step feeds only the token sampled last."""
        return self.num_uncomputed == 1 and len(self.tokens) > len(self.prompt)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) - len(self.prompt) >= self.max_new_tokens

    def told(self) -> dict[str, Any]:
        """What a server that is a process says of it once it is answered, for JSON."""
        assert self.first_token_at is not None
        return {
            "id": self.id,
            "answer": self.generated,
            "prompt_tokens": len(self.prompt),
            "device_tokens": self.num_device_hits,
            "host_tokens": self.num_loaded,
            "prefilled_tokens": self.num_prefilled,
            "first_token_seconds": self.first_token_at - self.arrival,
        }

    def span(self, count: int) -> Span:
        """Its next ``count`` tokens, for the model."""
        start = self.num_computed
        tokens = np.array(self.tokens[start : start + count], dtype=np.int64)
        tables = tuple(np.array(table, dtype=np.int64) for table in self.tables)
        return Span(tokens, start, tables)
