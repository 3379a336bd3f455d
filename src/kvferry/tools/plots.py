"""Plots as inline SVG: lines, steps and stacked bars, coloured by the page's own variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 72, 28, 14, 46

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line: its name, the page variable of its colour, its points.

    A ``wide`` line is a pale band: a reference that stays visible under a line that follows it.
    """

    name: str
    colour: str
    points: Sequence[Point]
    wide: bool = False


@dataclass(frozen=True)
class Part:
    """One piece of a bar."""

    name: str
    colour: str
    value: float


def line_plot(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    show_y: Callable[[float], str],
    show_x: Callable[[float], str] = "{:g}".format,
    markers: bool = True,
    x_ticks: Sequence[float] | None = None,
) -> str:
    """Lines over common axes that start at zero on the y axis; ``x_ticks`` where they should be."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    x_ticks = x_ticks if x_ticks is not None else ticks(min(xs), max(xs), 6)
    y_ticks = ticks(0, max(ys), 5)
    low, high = min(min(xs), x_ticks[0]), max(max(xs), x_ticks[-1])
    top = max(max(ys), y_ticks[-1])

    def place(x: float, y: float) -> Point:
        across = (x - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)
        up = y / (top or 1) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    parts = [_open(f"{y_label} by {x_label}")]
    for tick in y_ticks:
        x, y = place(low, tick)
        parts.append(f'<line class="grid" x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{show_y(tick)}</text>')
    for tick in x_ticks:
        x, y = place(tick, 0)
        parts.append(f'<text x="{x}" y="{y + 17}" text-anchor="middle">{show_x(tick)}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    for line in series:
        placed = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x},{y}" for x, y in placed)
        kind = "line wide" if line.wide else "line"
        parts.append(
            f'<polyline class="{kind}" style="stroke:var({line.colour})" points="{path}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )
        if markers and not line.wide:
            parts += [
                f'<circle cx="{x}" cy="{y}" r="3.5" style="fill:var({line.colour})">'
                f"<title>{escape(line.name)}: {show_y(value)}</title></circle>"
                for (x, y), (_, value) in zip(placed, line.points, strict=True)
            ]
    return "".join([*parts, "</svg>"])


def bar_plot(
    bars: Sequence[tuple[str, Sequence[Part]]], *, show: Callable[[float], str], x_label: str
) -> str:
    """Horizontal stacked bars with a common scale."""
    height = 26
    pitch = 64
    total_height = TOP + pitch * len(bars) + BOTTOM
    longest = max(sum(part.value for part in parts) for _, parts in bars)
    scale_ticks = ticks(0, longest, 4)
    right = max(longest, scale_ticks[-1])
    left = 14

    def place(value: float) -> float:
        return round(left + value / (right or 1) * (WIDTH - left - RIGHT - 10), 1)

    out = [_open(x_label, total_height)]
    base = TOP + pitch * len(bars)
    for tick in scale_ticks:
        x = place(tick)
        out.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{base}"/>')
        anchor = "start" if tick == 0 else "middle"
        out.append(f'<text x="{x}" y="{base + 15}" text-anchor="{anchor}">{show(tick)}</text>')
    for row, (name, parts) in enumerate(bars):
        y = TOP + row * pitch + 24
        out.append(f'<text class="name" x="{left}" y="{y - 7}">{escape(name)}</text>')
        at = 0.0
        for part in parts:
            if not part.value:
                continue
            x, end = place(at), place(at + part.value)
            out.append(
                f'<rect x="{x}" y="{y}" width="{max(0.5, round(end - x, 1))}" height="{height}" '
                f'style="fill:var({part.colour})">'
                f"<title>{escape(part.name)}: {show(part.value)}</title></rect>"
            )
            if end - x > 44:
                out.append(
                    f'<text class="inside" x="{(x + end) / 2}" y="{y + 17}" '
                    f'text-anchor="middle">{show(part.value)}</text>'
                )
            at += part.value
    out.append(
        f'<text class="axis" x="{WIDTH / 2}" y="{total_height - 4}" text-anchor="middle">'
        f"{escape(x_label)}</text></svg>"
    )
    return "".join(out)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names with their colours, as the plots above use them."""
    items = "".join(
        f'<li><span style="background:var({colour})"></span>{escape(name)}</li>'
        for name, colour in entries
    )
    return f'<ul class="legend">{items}</ul>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers from ``low`` to at least ``high``."""
    span = (high - low) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    if low == int(low) and high == int(high) and span >= 1:
        step = max(1.0, math.ceil(step) if step < 10 else step)
    first = math.floor(low / step) * step if low == 0 else low
    last = math.ceil((high - first) / step - 1e-9)
    return [round(first + step * i, 10) for i in range(last + 1)]


def _open(label: str, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg">'
    )
