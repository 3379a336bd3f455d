"""A request as both schedulers know it."""

from __future__ import annotations

import time
from typing import Any

from kvferry.identity import Namespace
from kvferry.vllm.request_keys import RequestKeys


class Tracked:
    """What we remember of one vLLM request. Owns its keys; the request is vLLM's."""

    def __init__(self, request: Any, namespace: Namespace) -> None:
        self.request = request
        self.chain = RequestKeys(request, namespace)
        self.preemptions = request.num_preemptions
        self.computed_tokens = 0
        self.claimed_tokens = 0
        self.next_store = 0  # with fewer tokens computed nothing is stored yet
        self.past_tokens = 0  # it had, on the device or with us, when it came
        self._began: tuple[float, int] | None = None
        self.is_timed = False

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
