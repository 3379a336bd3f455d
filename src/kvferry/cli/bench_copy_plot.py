"""The plot of ``kvferry bench copy``: one SVG that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import cycle
from typing import Any

from kvferry.cli.bench_copy_tables import NAMES, num_bytes, paths_of, size
from kvferry.copy_paths import AUTO_PATH, BY_NAME

MiB = 1 << 20

WIDTH, HEIGHT = 960, 760
PANEL_W, PANEL_H = 380, 250
OURS = "#0b6e4f"
COLOURS = ("#c44536", "#e09f3e", "#7f7f7f", "#74a892", "#5b6c9d", "#8a5a83")
"""For all others, in turn."""
DASHES = ("", "6 3", "2 3")

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}"
    ".title{font-size:15px;font-weight:600}.big{font-size:18px;font-weight:600}"
    ".small{font-size:11px;fill:#555}.grid{stroke:#ddd}.axis{stroke:#888}"
    ".ceiling{stroke:#222;stroke-dasharray:8 4;stroke-width:1.5}"
)


def plot(data: dict[str, Any]) -> str:
    """GB/s by segment size in both directions, and what each path costs the model."""
    p = data["provenance"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="Copy benchmark on one {escape(p["gpu"])}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(40, 34, f"Copying KV blocks on one {p['gpu']}", kind="big"),
        _text(
            40,
            54,
            f"{p['link']}, driver {p['driver']}, {p['date']}; 256 MiB per transfer, "
            "64 segments per block, random block ids",
            kind="small",
        ),
    ]
    for number, direction in enumerate(NAMES):
        parts += _bandwidth(data, direction, 70 + number * 460, 100)
    parts += _legend(data, 70, 425)
    parts += _costs(data, 70, 515)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bandwidth(data: dict[str, Any], direction: str, left: float, top: float) -> list[str]:
    rows = [
        r
        for r in data["rows"]
        if r["direction"] == direction and r["host_slots"] == "run" and num_bytes(r) == 256 * MiB
    ]
    segments = sorted({r["segment_bytes"] for r in rows})
    ceiling = data["ceiling"][direction]
    high = 60.0 if ceiling <= 60 else ceiling * 1.1
    step = PANEL_W / max(1, len(segments) - 1)

    def y(gbps: float) -> float:
        return top + PANEL_H * (1 - gbps / high)

    parts = [_text(left, top - 12, f"{NAMES[direction]}, GB/s by segment", kind="title")]
    for tick in range(0, int(high) + 1, 10):
        parts.append(_line(left, y(tick), left + PANEL_W, y(tick), "grid"))
        parts.append(_text(left - 8, y(tick) + 4, str(tick), anchor="end"))
    for number, segment in enumerate(segments):
        label = size(segment).replace(" KiB", "K").replace(" MiB", "M")
        parts.append(_text(left + number * step, top + PANEL_H + 18, label, anchor="middle"))
    parts.append(_line(left, y(ceiling), left + PANEL_W, y(ceiling), "ceiling"))
    for path, _, colour, width, dash in reversed(_lines(data)):
        points = [
            (left + segments.index(r["segment_bytes"]) * step, y(r["gbps"]))
            for r in rows
            if r["path"] == path
        ]
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in sorted(points))
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" '
            f'stroke-width="{width}" stroke-dasharray="{dash}"/>'
        )
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
    return parts


def _lines(data: dict[str, Any]) -> list[tuple[str, str, str, float, str]]:
    """Path, words, colour, width and dashes: the planner's choice, then what it stands beside.

    Other designs, and our paths that pay per segment. The others are what the planner picks.
    """
    lines = [(AUTO_PATH, "kvferry, planner's choice", OURS, 3.0, "")]
    for (name, colour), dash in zip(_colours(data).items(), cycle(DASHES), strict=False):
        path = BY_NAME.get(name)
        if path is None or path.pays_per_segment:
            lines.append((name, path.title if path is not None else name, colour, 2.0, dash))
    return lines


def _colours(data: dict[str, Any]) -> dict[str, str]:
    """One for each path but the planner's choice, the same wherever it is shown."""
    timed = [path for path in paths_of([*data["rows"], *data["slowdown"]]) if path != AUTO_PATH]
    others = [name for name in timed if name not in BY_NAME]
    ours = sorted(
        (name for name in reversed(BY_NAME) if name in timed),
        key=lambda name: not BY_NAME[name].pays_per_segment,
    )
    return dict(zip([*others, *ours], cycle(COLOURS), strict=False))


def _legend(data: dict[str, Any], left: float, top: float) -> list[str]:
    parts = [
        _line(left, top - 4, left + 26, top - 4, "ceiling"),
        _text(left + 32, top, "one large copy"),
    ]
    at = left + 150
    for _, name, colour, width, dash in _lines(data):
        parts.append(
            f'<line x1="{at}" y1="{top - 4}" x2="{at + 26}" y2="{top - 4}" stroke="{colour}" '
            f'stroke-width="{width}" stroke-dasharray="{dash}"/>'
        )
        parts.append(_text(at + 32, top, name))
        at += 52 + 6.6 * len(name)
    return parts


def _costs(data: dict[str, Any], left: float, top: float) -> list[str]:
    """Bars of lost milliseconds per GB, a group per load and direction."""
    rows = data["slowdown"]
    groups: Sequence[tuple[str, str]] = list(
        dict.fromkeys((r["load"], r["direction"]) for r in rows)
    )
    if not groups:
        return []
    high, height, width = 10.0, 170.0, 840.0
    parts = [
        _text(left, top - 36, "Model time lost, ms per GB moved", kind="title"),
        _text(left + 320, top - 36, "above each bar: GB/s of the copy", kind="small"),
    ]
    for tick in (0, 2, 4, 6, 8, 10):
        y = top + height * (1 - tick / high)
        parts.append(_line(left, y, left + width, y, "grid"))
        parts.append(_text(left - 8, y + 4, str(tick), anchor="end"))
    colours = {AUTO_PATH: OURS, **_colours(data)}
    shown = paths_of(rows)
    bars = [(path, colour) for path, colour in colours.items() if path in shown]
    group_width = width / len(groups)
    bar = group_width / (len(bars) + 1.5)
    for number, (load, direction) in enumerate(groups):
        start = left + number * group_width + bar * 0.75
        cells = {r["path"]: r for r in rows if (r["load"], r["direction"]) == (load, direction)}
        for place, (path, colour) in enumerate(bars):
            if path not in cells:
                continue
            parts += _bar(cells[path], start + place * bar, top, bar, height, high, colour)
        middle = start + bar * len(bars) / 2
        parts.append(_text(middle, top + height + 20, NAMES[direction], anchor="middle"))
        parts.append(
            _text(middle, top + height + 36, load.split(",")[0], anchor="middle", kind="small")
        )
    at = left + 540
    for path, colour in bars:
        parts.append(f'<rect x="{at}" y="{top - 47}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(at + 18, top - 36, path))
        at += 80
    return parts


def _bar(
    row: dict[str, Any], x: float, top: float, width: float, height: float, high: float, colour: str
) -> list[str]:
    lost = max(0.0, row["lost_ms_per_gb"])
    shown = min(lost, high)
    y = top + height * (1 - shown / high)
    label = f"{row['gbps']:.0f}" if lost <= high else f"{row['gbps']:.0f} ↑{lost:.0f} ms"
    return [
        f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{width - 4:.1f}" '
        f'height="{max(1.5, height * shown / high):.1f}" fill="{colour}"/>',
        _text(x + width / 2, y - 4, label, anchor="middle", kind="small"),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
