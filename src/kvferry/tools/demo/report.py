"""The demo's report: one HTML page that needs no other file and no network."""

from __future__ import annotations

from html import escape

from kvferry.telemetry.catalog import installed_version
from kvferry.tools.demo.policies import Policies
from kvferry.tools.demo.runs import Part
from kvferry.tools.plots import (
    Series,
    bar_plot,
    figure,
    hit_ratio_plot,
    legend,
    line_plot,
    page,
    table,
)
from kvferry.tools.words import show_bytes, show_seconds

_WAY_COLOURS = {"kvferry": "--teal", "small": "--orange", "roomy": "--grey"}
_SOURCES = (("found on the device", "--grey"), ("loaded", "--teal"), ("computed", "--orange"))


def render(setting: str, ways: Part, parts: list[Part], policies: Policies | None) -> str:
    """The whole page: the three ways first, then the other parts, the setting last."""
    body = (
        "<p>The same conversations, served three ways. A device too small for them forgets and "
        "computes again. With kvferry it loads instead.</p>"
        f'{_verdict(ways)}<div class="cards">{_cards(ways)}</div>'
        f'<div class="plots">{_by_turn(ways)}{_sources(ways)}</div>'
    )
    for part in parts:
        body += figure(part.title, part.gain, _verdict(part) + _bars(part), "", table(part.table()))
    if policies is not None:
        lines = policies.lines()
        names = legend([(line.name, line.colour) for line in lines])
        plot = hit_ratio_plot(lines, {blocks: f"{blocks:,}" for blocks, _ in policies.bounds})
        body += figure(policies.title, policies.gain, plot, names, table(policies.table()))
    body += figure("All figures of the three ways", "", table(ways.table()))
    version = installed_version()
    footer = (
        f"{setting} kvferry {version}. Times are from this one run on this one "
        "machine. On a shared machine they vary."
    )
    return page("kvferry demo", f"{body}<footer><p>{escape(footer)}</p></footer>")


def _verdict(part: Part) -> str:
    kind = "good" if part.tokens_equal else "bad"
    return f'<p class="verdict {kind}">{escape(part.verdict)}</p>'


def _cards(ways: Part) -> str:
    small, kvferry = ways.runs["small"], ways.runs["kvferry"]
    waits = [show_seconds(run.first_token_seconds()) for run in (small, kvferry)]
    cards = (
        (
            f"{ways.facts['prefill_ratio']:.1f}×",
            "fewer prefill tokens computed",
            f"{small.tokens('prefilled'):,} → {kvferry.tokens('prefilled'):,}",
        ),
        (f"{ways.facts['ttft_p50_ratio']:.1f}×", "sooner first token, median", " → ".join(waits)),
        (
            f"{kvferry.hit_rate('host'):.0%}",
            "of prompt tokens loaded from host",
            f"{show_bytes(kvferry.moved['host->device'])} loaded, "
            f"{show_bytes(kvferry.moved['device->host'])} stored",
        ),
    )
    return "".join(
        f'<div class="card"><b>{big}</b><span>{what}</span><small>{detail}</small></div>'
        for big, what, detail in cards
    )


def _by_turn(ways: Part) -> str:
    series = [
        Series(
            run.title,
            _WAY_COLOURS[way],
            [(n, seconds * 1000) for n, seconds in enumerate(run.first_token_by_round(), 1)],
            wide=way == "roomy",
        )
        for way, run in ways.runs.items()
    ]
    return figure(
        "Time to first token, turn by turn",
        "Without kvferry every turn computes the whole conversation again.",
        line_plot(
            series,
            x_label="turn of the conversation",
            y_label="median time to first token",
            show_y=lambda y: f"{y:,.10g} ms",
        ),
        legend([(line.name, line.colour) for line in series]),
    )


def _sources(ways: Part) -> str:
    words = "Loading a block is a copy. Computing it is the whole model."
    return figure("Where the prompt tokens came from", words, _bars(ways))


def _bars(part: Part) -> str:
    bars = {
        run.title: [run.tokens(kind) for kind in ("device", "host", "prefilled")]
        for run in part.runs.values()
    }
    return bar_plot(bars, _SOURCES, x_label="prompt tokens") + legend(_SOURCES)
