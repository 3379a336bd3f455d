"""A request as both schedulers know it."""

from __future__ import annotations

import time
from typing import Any

from kvferry.scheduler import Request


class Tracked:
    """One vLLM request and ours of the same name. Owns neither; ours knows how it stands."""

    __slots__ = (
        "_began",
        "claimed_tokens",
        "computed_tokens",
        "ferried",
        "is_timed",
        "preemptions",
        "request",
    )

    def __init__(self, request: Any, ferried: Request) -> None:
        self.request = request
        self.ferried = ferried
        self.preemptions = request.num_preemptions
        self.computed_tokens = 0  # vLLM had when it last asked
        self.claimed_tokens = 0  # that it was promised more
        self.is_timed = False
        self._began: tuple[float, int] | None = None

    def asks(self, computed_tokens: int, hash_tokens: int) -> None:
        """vLLM asks for what is behind so many tokens, which it has."""
        self.computed_tokens, self.claimed_tokens = computed_tokens, 0
        past = computed_tokens // hash_tokens
        self.ferried.chain.num_past = past  # type: ignore[attr-defined]  # ours are RequestKeys

    def note_preemption(self) -> None:
        """vLLM may preempt and resume a request before it tells us: its own count tells earlier."""
        self.preemptions = self.request.num_preemptions
        self.ferried.preempt()

    def time_prefill(self) -> tuple[int, float] | None:
        """Call in every step it runs: once, the prompt tokens it computed and how long that took.

        From its first step to the one after its first token, with whatever else ran meanwhile:
        that is what computing costs here.
        """
        request = self.request
        if self.is_timed:
            return None
        if self._began is None:
            self._began = (time.monotonic(), request.num_computed_tokens)
            self.is_timed = request.num_output_tokens > 0  # resumed: its prompt was timed before
            return None
        if not request.num_output_tokens:
            return None
        self.is_timed = True
        start, had_tokens = self._began
        return request.num_prompt_tokens - had_tokens, time.monotonic() - start
