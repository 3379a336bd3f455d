"""A request as both schedulers know it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.answers import DeviceBlocks
from kvferry.identity import Namespace
from kvferry.reach import Group
from kvferry.scheduler import NO_BLOCK, BlockTable
from kvferry.types import as_slots
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
        self.has_run = False  # with the blocks it has now: until then nothing in them is its own
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


@dataclass(frozen=True, eq=False)
class Unstored:
    """What of a request is to be stored: the blocks between ``stored_tokens`` and ``num_tokens``.

    The tables are its own of that moment: whoever keeps this for later holds the blocks as well.
    """

    tracked: Tracked
    tables: Sequence[BlockTable]
    num_tokens: int
    stored_tokens: int

    def blocks(self, groups: Sequence[Group]) -> tuple[DeviceBlocks, ...]:
        """The device blocks, by group."""
        found = []
        for number, group in enumerate(groups):
            table = np.asarray(self.tables[number])[self.stored_tokens // group.block_tokens :]
            found.append(DeviceBlocks(number, as_slots(table[table != NO_BLOCK])))
        return tuple(found)
