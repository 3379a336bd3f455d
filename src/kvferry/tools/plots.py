"""Plots as inline SVG, tables as HTML, and the page around them. A page needs no other file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 72, 28, 14, 46
COLOURS = ("--teal", "--orange", "--grey", "--blue", "--red", "--purple")

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named line in a colour of the page. A ``wide`` line is a pale reference band."""

    name: str
    colour: str
    points: Sequence[Point]
    wide: bool = False


def line_plot(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    show_y: Callable[[float], str],
    show_x: Callable[[float], str] = "{:g}".format,
    x_ticks: Sequence[float] | None = None,
) -> str:
    """Lines over common axes. The y axis starts at zero.

    Args:
        series: The lines.
        x_label: The text below the x axis.
        y_label: The subject of the y axis, for screen readers.
        show_y: Formats a value of the y axis.
        show_x: Formats a value of the x axis.
        x_ticks: The ticks of the x axis, else round numbers.
    """
    xs = [x for line in series for x, _ in line.points]
    x_ticks = x_ticks if x_ticks is not None else ticks(min(xs), max(xs), 6)
    y_ticks = ticks(0, max(y for line in series for _, y in line.points), 5)
    low, high = min(*xs, x_ticks[0]), max(*xs, x_ticks[-1])

    def place(x: float, y: float) -> Point:
        across = (x - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)
        up = y / (y_ticks[-1] or 1) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    parts = [_open(f"{y_label} by {x_label}", HEIGHT)]
    for tick in y_ticks:
        x, y = place(low, tick)
        parts.append(f'<line class="grid" x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
        parts.append(_text(x - 8, y + 4, show_y(tick), "end"))
    parts += [_text(place(tick, 0)[0], HEIGHT - BOTTOM + 17, show_x(tick)) for tick in x_ticks]
    parts.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 5, x_label, kind="axis"))
    for line in series:
        placed = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x},{y}" for x, y in placed)
        parts.append(
            f'<polyline class="line{" wide" * line.wide}" style="stroke:var({line.colour})" '
            f'points="{path}"><title>{escape(line.name)}</title></polyline>'
        )
        if not line.wide:
            parts += [
                f'<circle cx="{x}" cy="{y}" r="3.5" style="fill:var({line.colour})">'
                f"<title>{escape(line.name)}: {escape(show_y(value))}</title></circle>"
                for (x, y), (_, value) in zip(placed, line.points, strict=True)
            ]
    return "".join([*parts, "</svg>"])


def bars(rows: Mapping[str, Sequence[float]], kinds: Sequence[tuple[str, str]]) -> str:
    """Stacked horizontal bars with a common scale. Each kind of value has a name and a colour."""
    most = max(map(sum, rows.values())) or 1
    out = []
    for name, values in rows.items():
        parts = "".join(
            f'<i style="width:{100 * value / most:.2f}%;background:var({colour})" '
            f'title="{escape(kind)}: {value:,}">'
            f"{_thousands(value) if value > most / 8 else ''}</i>"
            for value, (kind, colour) in zip(values, kinds, strict=True)
        )
        out.append(f'{escape(name)}<div class="bar">{parts}</div>')
    return f'<div class="bars">{"".join(out)}</div>'


def picture(drawn: str, lines: Sequence[Series]) -> str:
    """A line plot with its legend as one SVG file."""
    height = HEIGHT + 24 + 18 * ((len(lines) - 1) // 3)
    names = "".join(
        f'<text x="{86 + 118 * (at % 3)}" y="{278 + 18 * (at // 3)}"><tspan style="fill:var('
        f'{line.colour})" font-weight="bold">&#9632; </tspan>{escape(line.name)}</text>'
        for at, line in enumerate(lines)
    )
    head, _, rest = drawn.partition(">")
    head = head.replace(f"0 0 {WIDTH} {HEIGHT}", f"0 0 {WIDTH} {height}")
    style = f"<style>{_style('plot.css')}</style>"
    back = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return f"{head}>{style}{back}{rest.removesuffix('</svg>')}{names}</svg>\n"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names and their colours in the plots."""
    items = "".join(
        f'<li><span style="background:var({colour})"></span>{escape(name)}</li>'
        for name, colour in entries
    )
    return f'<ul class="legend">{items}</ul>'


def table(rows: Sequence[Sequence[str]]) -> str:
    """An HTML table. The first row and the first column are headings."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0][1:])
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows[1:]
    )
    return (
        f'<div class="scroll"><table><thead><tr><th>{escape(rows[0][0])}</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(title: str, words: str, plot: str, names: str = "", rest: str = "") -> str:
    """A framed plot with its heading, its text, its legend, and further HTML."""
    return f"<figure><h2>{escape(title)}</h2><p>{escape(words)}</p>{plot}{names}{rest}</figure>"


def page(title: str, body: str) -> str:
    """A whole page around ``body``."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style('plot.css')}{_style('page.css')}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def _style(name: str) -> str:
    return (files("kvferry.tools") / "style" / name).read_text()


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers from ``low`` to at least ``high``."""
    span = (high - low) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    if low == int(low) and high == int(high) and span >= 1:
        step = max(1.0, math.ceil(step) if step < 10 else step)
    last = math.ceil((high - low) / step - 1e-9)
    return [round(low + step * i, 10) for i in range(last + 1)]


def _thousands(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.4g}M"
    return f"{value / 1000:,.3g}k" if value >= 1000 else f"{value:,.10g}"


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    style = f'class="{kind}" ' if kind else ""
    return f'<text {style}x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _open(label: str, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">'
    )
