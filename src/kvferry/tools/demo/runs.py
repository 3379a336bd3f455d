"""The figures of one run of the workload, and of several runs beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.tools.demo.blocks import Turn

OnTurn = Callable[[str, int, Turn], None]
"""Called after every turn with the title of the run, its number of turns, and the turn."""


def ignore_turn(title: str, num_turns: int, turn: Turn) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Run:
    """The turns of one run in the order they ended. ``moved`` has the bytes by route.

    ``facts`` are further figures of its part of the demo, by their names in JSON.
    """

    title: str
    turns: Sequence[Turn]
    seconds: float = 0.0
    moved: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, kind: str) -> int:
        """Sum of one kind of tokens: prompt, device, host or prefilled."""
        return sum(getattr(turn, f"{kind}_tokens") for turn in self.turns)

    def hit_rate(self, kind: str) -> float:
        """Share of the looked up tokens, where a preempted request looks up its prompt again."""
        return self.tokens(kind) / sum(map(self.tokens, ("device", "host", "prefilled")))

    @property
    def generated_tokens(self) -> int:
        return sum(len(turn.answer) for turn in self.turns)

    def first_token_seconds(self, percentile: float = 50) -> float:
        return float(np.percentile([turn.first_token_seconds for turn in self.turns], percentile))

    def first_token_by_round(self) -> list[float]:
        """The median time to first token of each round."""
        rounds: dict[str, list[float]] = {}
        for turn in self.turns:
            rounds.setdefault(turn.id.rpartition("-")[2], []).append(turn.first_token_seconds)
        return [float(np.median(rounds[number])) for number in sorted(rounds)]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "turns": len(self.turns),
            "seconds": self.seconds,
            "ttft_p50_seconds": self.first_token_seconds(),
            "ttft_p95_seconds": self.first_token_seconds(95),
            "ttft_p50_seconds_by_turn": self.first_token_by_round(),
            "generated_tokens": self.generated_tokens,
            "prompt_tokens": self.tokens("prompt"),
            "prefill_tokens_computed": self.tokens("prefilled"),
            "hit_rate": {tier: self.hit_rate(tier) for tier in ("device", "host")},
            "hit_tokens": {tier: self.tokens(tier) for tier in ("device", "host")},
            "bytes_moved": dict(self.moved),
            **self.facts,
        }


@dataclass(frozen=True)
class Part:
    """One part of the demo: the same turns in several runs. The answers of all must be equal.

    ``runs`` are by their names in JSON, the most interesting first. ``where`` ends the sentence
    about equal answers, ``gain`` says in words what the part shows, ``rows`` has the lines of its
    table, and ``facts`` has further figures for JSON.
    """

    title: str
    runs: Mapping[str, Run]
    where: str
    gain: str
    rows: Sequence[tuple[str, Callable[[Run], str]]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_different_turns(self) -> int:
        """Turns whose answers differ between the runs, or that a run lacks."""
        answers = [{turn.id: turn.answer for turn in run.turns} for run in self.runs.values()]
        first = answers[0]
        names = set().union(*answers)
        return sum(any(each.get(name) != first.get(name) for each in answers) for name in names)

    @property
    def tokens_equal(self) -> bool:
        return self.num_different_turns == 0

    @property
    def verdict(self) -> str:
        """Whether all answers are equal, in a sentence."""
        run = next(iter(self.runs.values()))
        if self.tokens_equal:
            tokens = f"{run.generated_tokens:,} tokens"
            return f"All {len(run.turns)} answers ({tokens}) are identical {self.where}."
        return (
            f"{self.num_different_turns} of {len(run.turns)} answers differ {self.where}. kvferry "
            "or the demo is broken: please report it."
        )

    def table(self) -> list[list[str]]:
        """The table's head and its lines."""
        head = ["", *(run.title for run in self.runs.values())]
        return [head, *([name, *map(show, self.runs.values())] for name, show in self.rows)]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "tokens_equal": self.tokens_equal,
            "different_turns": self.num_different_turns,
            **self.facts,
            **{name: run.to_dict() for name, run in self.runs.items()},
        }
