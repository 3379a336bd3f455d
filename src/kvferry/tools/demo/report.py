"""The figures of one run of a chat, of several runs beside each other, and the report of both.

The report is one HTML page that needs no other file and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from kvferry.telemetry.catalog import installed_version
from kvferry.tools.demo.blocks import Turn
from kvferry.tools.plots import Series, bars, figure, legend, line_plot, page, table
from kvferry.tools.words import show_seconds

OnTurn = Callable[[str, int, Turn], None]
"""Called after every turn with the title of the run, its number of turns, and the turn."""


def ignore_turn(title: str, num_turns: int, turn: Turn) -> None:
    """Show no progress."""


def hit_rate(turns: Sequence[Turn], *tiers: str) -> float:
    """The share of prompt tokens found on these tiers. A preempted request counts again."""
    found = sum(getattr(turn, f"{tier}_tokens") for turn in turns for tier in tiers)
    everything = sum(t.device_tokens + t.host_tokens + t.prefilled_tokens for t in turns)
    return found / max(1, everything)


@dataclass(frozen=True)
class Run:
    """The turns of one run in the order they ended. ``facts`` are further figures for JSON."""

    title: str
    turns: Sequence[Turn]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, kind: str) -> int:
        """Sum of one kind of tokens: prompt, device, host or prefilled."""
        return sum(getattr(turn, f"{kind}_tokens") for turn in self.turns)

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
        tiers = ("device", "host")
        return {
            "turns": len(self.turns),
            "ttft_p50_seconds": self.first_token_seconds(),
            "ttft_p95_seconds": self.first_token_seconds(95),
            "ttft_p50_seconds_by_turn": self.first_token_by_round(),
            "generated_tokens": self.generated_tokens,
            "prompt_tokens": self.tokens("prompt"),
            "prefill_tokens_computed": self.tokens("prefilled"),
            "hit_rate": {tier: hit_rate(self.turns, tier) for tier in tiers},
            "hit_tokens": {tier: self.tokens(tier) for tier in tiers},
            **self.facts,
        }


Row = tuple[str, Callable[[Run], str]]
FIRST_TOKEN: Row = ("First token p50", lambda run: show_seconds(run.first_token_seconds()))
PREFILL: Row = ("Prefill tokens computed", lambda run: f"{run.tokens('prefilled'):,}")


@dataclass(frozen=True)
class Part:
    """One part of the demo: the same turns in several runs. The answers of all must be equal.

    ``runs`` are by their names in JSON, the most interesting first. ``where`` ends the sentence
    about equal answers. ``gain`` has the result in words, ``cards`` in large figures: each is a
    figure, its subject, and a detail. ``rows`` are the lines of the table.
    """

    title: str
    runs: Mapping[str, Run]
    where: str
    gain: str
    cards: Sequence[tuple[str, str, str]]
    rows: Sequence[Row]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_different_turns(self) -> int:
        """Turns whose answers differ between the runs, or that a run lacks."""
        answers = [{turn.id: turn.answer for turn in run.turns} for run in self.runs.values()]
        names = set().union(*answers)
        return sum(any(each.get(n) != answers[0].get(n) for each in answers) for n in names)

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
        runs = {name: run.to_dict() for name, run in self.runs.items()}
        return {"tokens_equal": self.tokens_equal, **self.facts, **runs}


_COLOURS = ("--teal", "--orange", "--grey")
_SOURCES = (("found on the device", "--grey"), ("loaded", "--teal"), ("computed", "--orange"))


def render(title: str, setting: str, parts: list[Part]) -> str:
    """The whole page: each part with its figures, the setting last."""
    body = "".join(map(_part, parts))
    footer = (
        f"{setting} kvferry {installed_version()}. Times are from this one run on this machine. On "
        "a shared machine they vary."
    )
    return page(title, f"{body}<footer><p>{escape(footer)}</p></footer>")


def _part(part: Part) -> str:
    cards = "".join(
        f'<div class="card"><b>{escape(big)}</b><span>{escape(what)}</span>'
        f"<small>{escape(detail)}</small></div>"
        for big, what, detail in part.cards
    )
    kinds = ("device", "host", "prefilled")
    sources = {run.title: [run.tokens(kind) for kind in kinds] for run in part.runs.values()}
    words = "Loading a block is a copy. Computing it takes the whole model."
    title = "Sources of the prompt tokens"
    plots = [figure(title, words, bars(sources, _SOURCES), legend(_SOURCES))]
    if len(part.runs) == len(_COLOURS):  # the three ways
        plots.insert(0, _by_turn(part))
    numbers = figure("All figures", "", table(part.table()))
    kind = "good" if part.tokens_equal else "bad"
    return (
        f"<section><h2>{escape(part.title)}</h2><p>{escape(part.gain)}</p>"
        f'<p class="verdict {kind}">{escape(part.verdict)}</p><div class="cards">{cards}</div>'
        f'<div class="plots">{"".join(plots)}</div>{numbers}</section>'
    )


def _by_turn(part: Part) -> str:
    series = [
        Series(
            run.title,
            colour,
            [(n, seconds * 1000) for n, seconds in enumerate(run.first_token_by_round(), 1)],
            wide=colour == _COLOURS[-1],
        )
        for run, colour in zip(part.runs.values(), _COLOURS, strict=True)
    ]
    return figure(
        "Time to first token by turn",
        "Without kvferry the small device computes whole conversations again.",
        line_plot(
            series,
            x_label="turn of the conversation",
            y_label="median time to first token",
            show_y=lambda y: f"{y:,.10g} ms",
        ),
        legend([(line.name, line.colour) for line in series]),
    )
