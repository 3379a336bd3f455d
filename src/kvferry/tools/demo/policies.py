"""Hit ratios of eviction policies on a made chat service, beside an all-knowing policy.

Most conversations end after one turn. The more turns a conversation has had, the likelier is one
more, about two minutes later. A policy must keep the conversations that return.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.sim.simulation import Simulated, Simulation, Trial, simulate
from kvferry.tools.plots import Series, hit_ratio_lines

POLICIES = ("returns", "lru")
CAPACITIES = (50, 100, 200, 400)
NUM_TURNS = 4000
BLOCK_TOKENS = 16

_RETURN_CHANCES = (0.28, 0.41, 0.54, 0.62, 0.68, 0.74, 0.79, 0.83)
"""The chance of one more turn, by the number of turns so far."""

_NEW_SECONDS = 6.25
"""Mean time between two new conversations."""

_PAUSE_MEDIAN, _PAUSE_SPREAD = 123.0, 0.9
"""Seconds between two turns of a conversation, log-normal."""

_TEXT_TOKENS, _TURN_TOKENS, _ANSWER_TOKENS = 96, 40, 64


@dataclass(frozen=True)
class Policies:
    """The hit ratio of each policy by capacity in blocks, and that of the all-knowing policy."""

    num_turns: int
    ratios: dict[str, list[tuple[int, float]]]
    bounds: list[tuple[int, float]]

    title = "Which blocks are kept"

    @property
    def gain(self) -> str:
        """The comparison in words, at the third capacity."""
        at = min(2, len(self.bounds) - 1)
        ours, lru = (self.ratios[name][at][1] for name in POLICIES)
        return (
            f"{self.num_turns:,} turns of a made chat service, where most conversations never "
            f"return. With host memory for {self.bounds[at][0]:,} blocks the default policy hits "
            f"{ours:.1%} of the blocks, LRU {lru:.1%}, an all-knowing one {self.bounds[at][1]:.1%}."
        )

    def table(self) -> list[list[str]]:
        """The table's head and its lines."""
        columns = [*self.ratios.values(), self.bounds]
        head = ["Blocks of host memory", "returns (default)", "lru", "all-knowing"]
        rows = zip(*columns, strict=True)
        return [head, *([f"{row[0][0]:,}", *(f"{ratio:.1%}" for _, ratio in row)] for row in rows)]

    def lines(self) -> list[Series]:
        """The lines of the plot."""
        return hit_ratio_lines(self.bounds, self.ratios)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        ratios = {**self.ratios, "all-knowing": self.bounds}
        return {"turns": self.num_turns, "hit_ratio": {name: dict(r) for name, r in ratios.items()}}


def run_policies(
    seed: int = 0,
    *,
    num_turns: int = NUM_TURNS,
    capacities: Sequence[int] = CAPACITIES,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Policies:
    """Make a trace and simulate each policy at each capacity."""
    trials = tuple(Trial(policy, (blocks,)) for policy in POLICIES for blocks in capacities)
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_text("\n".join(map(json.dumps, made_requests(num_turns, seed))))
        asked = Simulation(paths=(trace,), trials=trials, block_tokens=BLOCK_TOKENS, jobs=1)
        simulated = simulate(asked, on_progress)
    return _policies(num_turns, simulated)


def _policies(num_turns: int, simulated: Simulated) -> Policies:
    ratios: dict[str, list[tuple[int, float]]] = {}
    for score in simulated.scores:
        pair = score.trial.capacity[0], score.whole.hit_ratio
        ratios.setdefault(score.trial.policy, []).append(pair)
    bounds = [(score.trial.capacity[0], score.whole.hit_ratio) for score in simulated.bounds]
    return Policies(num_turns, ratios, bounds)


def made_requests(num_turns: int, seed: int) -> list[dict[str, Any]]:
    """The first requests of the service in order of time, in the Mooncake format."""
    rng = np.random.default_rng((seed, 5))
    numbers, begin = count(), 0.0
    requests: list[dict[str, Any]] = []
    for _ in range(num_turns):  # enough conversations even if none returned
        begin += float(rng.exponential(_NEW_SECONDS))
        at, tokens, blocks = begin, _TEXT_TOKENS, list[int]()
        for chance in (*_RETURN_CHANCES, 0.0):
            tokens += int(rng.integers(_TURN_TOKENS // 2, 2 * _TURN_TOKENS))
            blocks += [next(numbers) for _ in range(-(-tokens // BLOCK_TOKENS) - len(blocks))]
            request = {"timestamp": int(at * 1000), "hash_ids": list(blocks)}
            requests.append(request | {"input_length": tokens, "output_length": _ANSWER_TOKENS})
            if rng.random() >= chance:
                break
            blocks = blocks[: tokens // BLOCK_TOKENS]
            tokens += _ANSWER_TOKENS
            at += float(rng.lognormal(math.log(_PAUSE_MEDIAN), _PAUSE_SPREAD))
    return sorted(requests, key=lambda request: request["timestamp"])[:num_turns]
