"""The demo's report: one HTML page that needs no other file and no network."""

from __future__ import annotations

from html import escape

from kvferry.telemetry.catalog import installed_version
from kvferry.tools.demo.runs import Part
from kvferry.tools.plots import Series, bar_plot, figure, legend, line_plot, page, table

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
    kind = "good" if part.tokens_equal else "bad"
    cards = "".join(
        f'<div class="card"><b>{escape(big)}</b><span>{escape(what)}</span>'
        f"<small>{escape(detail)}</small></div>"
        for big, what, detail in part.cards
    )
    bars = {
        run.title: [run.tokens(kind) for kind in ("device", "host", "prefilled")]
        for run in part.runs.values()
    }
    plots = [
        figure(
            "Sources of the prompt tokens",
            "Loading a block is a copy. Computing it takes the whole model.",
            bar_plot(bars, _SOURCES, x_label="prompt tokens"),
            legend(_SOURCES),
        )
    ]
    if len(part.runs) == len(_COLOURS):  # the three ways
        plots.insert(0, _by_turn(part))
        numbers = figure("All figures", "", table(part.table()))
    else:
        plots.append(figure("All figures", "", table(part.table())))
        numbers = ""
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
