"""The part of the demo's report about eviction policies: in words, as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from kvferry.cli.plots import Part, bar_plot, legend
from kvferry.playground.policies import PoliciesResult, PolicyFigures
from kvferry.playground.returning import GAP_MEDIAN_SECONDS

Row = tuple[str, Callable[[PolicyFigures], str]]

ROWS: tuple[Row, ...] = (
    ("First token p50", lambda policy: _seconds(policy.first_token_seconds(50))),
    ("First token p95", lambda policy: _seconds(policy.first_token_seconds(95))),
    (
        "Processor's time to the first token of returns, mean",
        lambda policy: _seconds(policy.return_seconds),
    ),
    ("Prefill tokens computed", lambda policy: f"{policy.prefill_tokens:,}"),
    ("Host hit rate", lambda policy: f"{policy.host_hit_rate:.1%}"),
    ("Returns found in host memory", lambda policy: f"{policy.found_rate:.0%}"),
)

_SAME = 0.005
"""A difference below this share is none."""


def policies_verdict(result: PoliciesResult) -> str:
    """Whether what is kept changed any answer, in one sentence."""
    num_turns = result.trial.chat.num_turns
    names = " and ".join(result.figures)
    if result.tokens_equal:
        return f"All {num_turns:,} answers are identical with the policies {names}."
    return (
        f"{result.num_different_turns:,} of {num_turns:,} answers differ between the policies "
        f"{names}: kvferry or the playground is broken, please report it."
    )


def policies_gain(result: PoliciesResult) -> str:
    """What came out, the last policy against the first, whichever is better."""
    first, *_, last = result.figures.values()
    computed = _change(last.prefill_tokens, first.prefill_tokens)
    worked = _change(last.return_seconds, first.return_seconds)
    return (
        f"Conversations returned after {GAP_MEDIAN_SECONDS:.0f} s in the median, or never; host "
        f"memory held {result.trial.host_blocks} blocks. With the policy {last.policy} it had "
        f"{last.host_hit_rate:.1%} of the prompt tokens, with {first.policy} "
        f"{first.host_hit_rate:.1%}: {last.prefill_tokens:,} prefill tokens were computed instead "
        f"of {first.prefill_tokens:,}, {computed}. Until the first token of a conversation that "
        f"returned the processor worked {worked} in the mean."
    )


def columns(result: PoliciesResult) -> tuple[tuple[str, PolicyFigures], ...]:
    """The last policy first: as in the report's other tables, what is compared with the rest."""
    return tuple(reversed(result.figures.items()))


def policies_section(result: PoliciesResult) -> str:
    """A figure for the page."""
    kinds = (
        ("found on the device", "--device"),
        ("loaded from host memory", "--host"),
        ("computed", "--computed"),
    )
    bars = [
        (
            name,
            [
                Part(*kinds[0], sum(turn.device_tokens for turn in figures.turns)),
                Part(*kinds[1], sum(turn.host_tokens for turn in figures.turns)),
                Part(*kinds[2], figures.prefill_tokens),
            ],
        )
        for name, figures in columns(result)
    ]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in columns(result))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(show(figures))}</td>" for _, figures in columns(result))
        + "</tr>"
        for name, show in ROWS
    )
    style = "good" if result.tokens_equal else "bad"
    plot = bar_plot(bars, show=lambda value: f"{value:,.0f}", x_label="prompt tokens")
    return (
        f"<figure><h2>Which blocks are kept</h2><p>{escape(policies_gain(result))}</p>"
        f"<p>{escape(_how(result))}</p>"
        f'<p class="verdict {style}">{escape(policies_verdict(result))}</p>'
        f"{plot}{legend(list(kinds))}"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def _how(result: PoliciesResult) -> str:
    trial = result.trial
    return (
        f"Each policy, on a server of its own, answered the same {trial.chat.num_turns:,} turns, "
        "both in turn, one request at a time and the pauses between them skipped; the first "
        f"{trial.num_uncounted:,}, in which memory fills and a policy learns, are in no figure."
    )


def _change(new: float, old: float) -> str:
    share = new / old - 1
    if abs(share) < _SAME:
        return "about as much"
    return f"{abs(share):.0%} {'less' if share < 0 else 'more'}"


def _seconds(seconds: float) -> str:
    """Short ones: a model of this size answers in milliseconds."""
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
