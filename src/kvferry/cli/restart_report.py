"""The part of the demo's report about a restart: in a sentence, as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from kvferry.cli.plots import Part, bar_plot, legend
from kvferry.playground.restart import LifeFigures, Restart
from kvferry.watch.words import show_bytes

LIVES = {
    "before": "Before the restart",
    "warm": "Restarted, with disk",
    "cold": "Restarted, no disk",
}

Row = tuple[str, Callable[[LifeFigures], str]]

ROWS: tuple[Row, ...] = (
    ("First token p50", lambda life: _seconds(life.first_token_seconds)),
    ("Prefill tokens computed", lambda life: f"{life.prefill_tokens:,}"),
    ("Blocks found at the start", lambda life: f"{life.restored_blocks:,}"),
    ("Read from disk", lambda life: show_bytes(life.read_bytes) if life.read_bytes else "–"),
)


def restart_verdict(result: Restart) -> str:
    """Whether the disk gave back what was stored, in one sentence."""
    if result.tokens_equal:
        return (
            f"After the restart all {len(result.cold.answers)} answers are identical with the disk "
            "and without."
        )
    return (
        f"After the restart {result.num_different_turns} of {len(result.cold.answers)} answers "
        "differ with the disk: kvferry or the playground is broken, please report it."
    )


def restart_gain(result: Restart) -> str:
    """What the disk bought, in one sentence."""
    return (
        f"The server stopped, a new process found {result.warm.restored_blocks:,} blocks on disk "
        f"and its first turns hit {result.hit_rate:.0%} of their prompts: the median first token "
        f"came {result.first_token_ratio:.1f}x sooner than in a process that had to compute it all."
    )


def columns(result: Restart) -> tuple[tuple[str, LifeFigures], ...]:
    return ((LIVES["warm"], result.warm), (LIVES["cold"], result.cold))


def restart_section(result: Restart) -> str:
    """A figure for the page."""
    kinds = (("from disk", "--host"), ("computed", "--computed"))
    bars = [
        (
            name,
            [
                Part(kinds[0][0], kinds[0][1], sum(turn.host_tokens for turn in life.turns)),
                Part(kinds[1][0], kinds[1][1], life.prefill_tokens),
            ],
        )
        for name, life in columns(result)
    ]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in columns(result))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(show(life))}</td>" for _, life in columns(result))
        + "</tr>"
        for name, show in ROWS
    )
    style = "good" if result.tokens_equal else "bad"
    plot = bar_plot(bars, show=lambda value: f"{value:,.0f}", x_label="prompt tokens")
    return (
        f"<figure><h2>After a restart</h2><p>{escape(restart_gain(result))}</p>"
        f'<p class="verdict {style}">{escape(restart_verdict(result))}</p>'
        f"{plot}{legend(list(kinds))}"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
