"""The part of the demo's report about servers that share a store: in words, a table, a plot."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from kvferry.cli.plots import Part, bar_plot, legend
from kvferry.cli.report import show_bytes, show_seconds
from kvferry.playground.fleet import FleetFigures, FleetResult

WAYS = {"shared": "One store for all", "alone": "Each for itself"}

Row = tuple[str, Callable[[FleetFigures], str]]

ROWS: tuple[Row, ...] = (
    ("First token p50", lambda fleet: show_seconds(fleet.first_token_seconds)),
    ("Prefill tokens computed", lambda fleet: f"{fleet.prefill_tokens:,}"),
    ("Read from the store", lambda fleet: show_bytes(fleet.read_bytes)),
    ("Turns by server", lambda fleet: _by_server(fleet)),
)


def fleet_verdict(result: FleetResult) -> str:
    """Whether sharing gave what each would have computed, in one sentence."""
    num_turns = len(result.alone.answers)
    if result.tokens_equal:
        return (
            f"All {num_turns} answers of {result.num_servers} servers are identical with the "
            "store and without."
        )
    return (
        f"{result.num_different_turns} of {num_turns} answers differ with the store: kvferry or "
        "the playground is broken, please report it."
    )


def fleet_gain(result: FleetResult) -> str:
    """What sharing bought, in a few sentences."""
    said = [f"Every turn went to one of {result.num_servers} servers, by chance."]
    if result.saved_share is None:
        said.append("Nothing was read from the store: this shows nothing of what sharing saves.")
    else:
        said.append(
            f"With one store for all they computed {result.shared.prefill_tokens:,} prefill tokens "
            f"instead of {result.alone.prefill_tokens:,}: sharing saved {result.saved_share:.0%}."
        )
    if result.shared.killed is not None:
        said.append(
            f"Server {result.shared.killed} was killed at half of the turns; what it had under "
            f"way ({len(result.shared.resent)}) the others answered, with the blocks that it had "
            "shared and the store still has."
        )
    if result.shared.ailment:
        said.append(f"The store was away for a while: {result.shared.ailment}.")
    return " ".join(said)


def columns(result: FleetResult) -> tuple[tuple[str, FleetFigures], ...]:
    return ((WAYS["shared"], result.shared), (WAYS["alone"], result.alone))


def fleet_section(result: FleetResult) -> str:
    """A figure for the page."""
    kinds = (
        ("found on the server's device", "--device"),
        ("loaded", "--host"),
        ("computed", "--computed"),
    )
    bars = [
        (
            name,
            [
                Part(*kinds[0], sum(turn.device_tokens for turn in fleet.turns)),
                Part(*kinds[1], sum(turn.host_tokens for turn in fleet.turns)),
                Part(*kinds[2], fleet.prefill_tokens),
            ],
        )
        for name, fleet in columns(result)
    ]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in columns(result))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(show(fleet))}</td>" for _, fleet in columns(result))
        + "</tr>"
        for name, show in ROWS
    )
    style = "good" if result.tokens_equal else "bad"
    plot = bar_plot(bars, show=lambda value: f"{value:,.0f}", x_label="prompt tokens")
    return (
        f"<figure><h2>{result.num_servers} servers, one store</h2>"
        f"<p>{escape(fleet_gain(result))}</p>"
        f'<p class="verdict {style}">{escape(fleet_verdict(result))}</p>'
        f"{plot}{legend(list(kinds))}"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def _by_server(fleet: FleetFigures) -> str:
    counts = (fleet.answered_by.get(n, 0) for n in range(max(fleet.answered_by) + 1))
    marks = (f"{count}†" if n == fleet.killed else f"{count}" for n, count in enumerate(counts))
    return " + ".join(marks)
