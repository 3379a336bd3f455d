"""Conversations that come back: closed loops of clients over one engine."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from connectors.engine import VOCABULARY, Engine, Live


@dataclass(frozen=True)
class Load:
    """So many conversations in turn, ``num_clients`` requests at a time.

    The first turn of each brings ``first_tokens``, every later one the history and ``turn_tokens``.
    """

    num_conversations: int
    num_turns: int
    num_clients: int
    first_tokens: int
    turn_tokens: int
    answer_tokens: int

    @property
    def last_tokens(self) -> int:
        """A conversation's length at its end."""
        turns = self.num_turns - 1
        return self.first_tokens + turns * self.turn_tokens + self.num_turns * self.answer_tokens

    @property
    def working_set(self) -> int:
        return self.num_conversations * self.last_tokens


@dataclass(eq=False)
class Conversation:
    """One conversation so far: what its next request asks."""

    history: list[int]
    rng: random.Random
    turns: int = 0
    answers: list[list[int]] = field(default_factory=list)


def new_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCABULARY - 10) for _ in range(count)]


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was counted in between."""
    return {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}


def run_load(engine: Engine, load: Load, *, seed: int, fills: bool) -> dict[str, Any]:
    """Serve the load once. With ``fills`` the first turns come before the clock starts."""
    queue = deque(
        Conversation(new_tokens(rng, load.first_tokens), rng)
        for rng in (random.Random(seed * 1000 + i) for i in range(load.num_conversations))
    )
    if fills:
        _serve(engine, queue, load, until=1)
    before = engine.counters()
    engine.steps_ms.clear()
    began = time.perf_counter()
    served = _serve(engine, queue, load, until=load.num_turns)
    seconds = time.perf_counter() - began
    after = engine.counters()
    ttft = sorted(1e3 * (live.first - live.added) for live in served)
    return {
        "requests": len(served),
        "seconds": seconds,
        "requests_per_s": len(served) / seconds,
        "ttft_ms": {
            "p50": statistics.median(ttft),
            "p95": ttft[math.ceil(0.95 * len(ttft)) - 1],
            "mean": statistics.fmean(ttft),
        },
        "all_ttft_ms": [round(value, 2) for value in ttft],
        "prompt_tokens": sum(len(live.prompt) for live in served),
        "cached_tokens": sum(live.cached_tokens for live in served),
        "output_tokens": sum(len(live.tokens) for live in served),
        "counted": difference(before, after),
        "steps_ms": list(engine.steps_ms),
    }


def _serve(engine: Engine, queue: deque[Conversation], load: Load, *, until: int) -> list[Live]:
    """Until every conversation has had ``until`` turns."""
    of: dict[int, Conversation] = {}
    served: list[Live] = []
    waiting = deque(c for c in queue if c.turns < until)
    while waiting or of:
        while waiting and len(of) < load.num_clients:
            conversation = waiting.popleft()
            of[id(engine.add(conversation.history, load.answer_tokens))] = conversation
        for live in engine.step():
            conversation = of.pop(id(live))
            served.append(live)
            conversation.turns += 1
            conversation.answers.append(live.tokens)
            more = new_tokens(conversation.rng, load.turn_tokens)
            conversation.history = conversation.history + live.tokens + more
            if conversation.turns < until:
                waiting.append(conversation)
    return served
