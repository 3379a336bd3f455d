"""The figures of one run of a chat, the comparison of several runs, and the report.

The report is one HTML page that needs no other file and no network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

import numpy as np

from kvferry.telemetry.catalog import installed_version
from kvferry.tools.demo.workload import Turn
from kvferry.tools.words import show_seconds, show_share

OnTurn = Callable[[str, int, Turn], None]
"""Called after every turn with the title of the run, its number of turns, and the turn."""


def hit_rate(turns: Sequence[Turn]) -> str:
    """Return the share of prompt tokens that were found instead of computed."""
    prompts = sum(turn.prompt_tokens for turn in turns)
    return show_share(1 - sum(turn.computed_tokens for turn in turns) / max(1, prompts))


@dataclass
class Run:
    """The turns of one run in the order they ended, and what its servers did."""

    title: str
    device_blocks: int
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    bytes_moved: Counter[str] = field(default_factory=Counter)
    """Bytes copied, by routes such as ``host->device``."""

    restored_blocks: int = 0
    turns_by_server: Counter[int] = field(default_factory=Counter)
    killed_server: int | None = None
    turns_before_kill: int = 0
    resent_turns: list[str] = field(default_factory=list)

    def tokens(self, kind: str) -> int:
        """Sum of one kind of tokens: prompt, device, host or computed."""
        return sum(getattr(turn, f"{kind}_tokens") for turn in self.turns)

    @property
    def generated_tokens(self) -> int:
        return sum(len(turn.answer) for turn in self.turns)

    def first_token_seconds(self, percentile: float = 50) -> float:
        return float(np.percentile([turn.first_token_seconds for turn in self.turns], percentile))


Row = tuple[str, Callable[[Run], str]]
FIRST_TOKEN: Row = ("First token p50", lambda run: show_seconds(run.first_token_seconds()))
COMPUTED: Row = ("Prompt tokens computed", lambda run: f"{run.tokens('computed'):,}")
HITS: Row = ("Hit rate", lambda run: hit_rate(run.turns))


@dataclass(frozen=True)
class Part:
    """One part of the demo: the same turns in several runs. The answers of all must be equal.

    ``runs`` are by name, the most interesting first. ``where`` ends the sentence about equal
    answers. ``cards`` have the result: each is a figure, its subject, and a detail. ``rows`` are
    the lines of the table.
    """

    title: str
    runs: Mapping[str, Run]
    where: str
    cards: Sequence[tuple[str, str, str]]
    rows: Sequence[Row]
    note: str = ""

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

    @property
    def gain(self) -> str:
        """The cards and the note as sentences."""
        told = [f"{figure} {subject} ({detail})." for figure, subject, detail in self.cards]
        return " ".join([*told, self.note]).strip()

    def table(self) -> list[list[str]]:
        """The table's head and its lines."""
        head = ["", *(run.title for run in self.runs.values())]
        return [head, *([name, *map(show, self.runs.values())] for name, show in self.rows)]


_SOURCES = {
    "device": ("found on the device", "grey"),
    "host": ("loaded", "teal"),
    "computed": ("computed", "orange"),
}


def render(title: str, setting: str, parts: Sequence[Part]) -> str:
    """Return the page as HTML: the figures of each part, then the setting."""
    style = (files("kvferry.tools.demo") / "report.css").read_text()
    footer = (
        f"{setting} kvferry {installed_version()}. Times are from this one run on this machine. On "
        "a shared machine they vary."
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{''.join(map(_part, parts))}"
        f"<footer><p>{escape(footer)}</p></footer></main></body></html>\n"
    )


def _part(part: Part) -> str:
    cards = "".join(
        f'<div class="card"><b>{escape(big)}</b><span>{escape(what)}</span>'
        f"<small>{escape(detail)}</small></div>"
        for big, what, detail in part.cards
    )
    kind = "good" if part.tokens_equal else "bad"
    return (
        f"<section><h2>{escape(part.title)}</h2><p>{escape(part.note)}</p>"
        f'<p class="verdict {kind}">{escape(part.verdict)}</p><div class="cards">{cards}</div>'
        f"<figure>{_bars(part.runs)}</figure><figure>{_table(part.table())}</figure></section>"
    )


def _bars(runs: Mapping[str, Run]) -> str:
    most = max(run.tokens("prompt") for run in runs.values()) or 1
    out = []
    for run in runs.values():
        parts = ""
        for source, (name, colour) in _SOURCES.items():
            count = run.tokens(source)
            words = f"{count / 1000:,.1f}k" if count > most / 8 else ""
            parts += (
                f'<i class="{colour}" style="width:{100 * count / most:.2f}%" '
                f'title="{name}: {count:,}">{words}</i>'
            )
        out.append(f'{escape(run.title)}<div class="bar">{parts}</div>')
    legend = "".join(
        f'<li><span class="{colour}"></span>{name}</li>' for name, colour in _SOURCES.values()
    )
    return (
        "<h3>Sources of the prompt tokens</h3><p>Loading a block is a copy. Computing it takes the "
        f'whole model.</p><div class="bars">{"".join(out)}</div><ul class="legend">{legend}</ul>'
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    """An HTML table. The first row and the first column are headings."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows[1:]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
