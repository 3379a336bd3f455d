"""Tables and plot of a run of ``copy_paths.py``: Markdown, and one SVG that needs nothing else."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from itertools import cycle
from typing import Any

from _tables import table
from kvferry.settings.copy_paths import AUTO_PATH, BY_NAME

KiB, MiB = 1 << 10, 1 << 20

NAMES = {"load": "Host to GPU", "store": "GPU to host"}

NOTES = """\
**auto**: the planner's choice, in brackets. **Ceiling**: one copy of 256 MiB between pinned
and GPU memory, timed in turn with `auto`. Blocks have 64 segments and random block ids; host slots
are one run or, where called scattered, every second slot in random order: no two neighbours. Times
are medians on the device, from an idle stream to the copy's end, the call that queues it included
(the runs that its host slots make up are counted before, as its path is picked): of 11, of 33 for
`auto` and its ceiling, of 25 for small transfers (fewer with `--quick`), of 2 for paths that pay
per segment with more than 4096 segments.
"""


def report(data: dict[str, Any]) -> str:
    """Everything a run found, as one Markdown page."""
    parts = [_title(data), _notes(data)]
    for direction in NAMES:
        parts += _large(data, direction)
    if data["planner"]:
        parts.append(_one_copy(data))
        parts += [_small(data, direction) for direction in NAMES]
        parts += [_submit(data), _both_ways(data), _slowdown(data), _planner(data)]
    return "\n\n".join(part for part in parts if part) + "\n"


def paths_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The paths timed in ``rows``: the planner's choice last, other designs than ours before it."""
    timed = dict.fromkeys(row["path"] for row in rows)
    ours = [name for name in BY_NAME if name in timed]
    others = [name for name in timed if name not in (*BY_NAME, AUTO_PATH)]
    return [*ours, *others, *([AUTO_PATH] if AUTO_PATH in timed else [])]


def _notes(data: dict[str, Any]) -> str:
    words = {name: path.how for name, path in BY_NAME.items()} | data.get("designs", {})
    timed = [name for name in paths_of(data["rows"]) if name in words]
    text = " ".join([*(f"**{name}**: {words[name]}." for name in timed), NOTES])
    return textwrap.fill(text, 100, break_on_hyphens=False)


def size(num_bytes: int) -> str:
    if num_bytes % KiB:
        return f"{num_bytes:,} B"
    return f"{num_bytes // MiB} MiB" if num_bytes >= MiB else f"{num_bytes // KiB} KiB"


def num_bytes(row: dict[str, Any]) -> int:
    """The transfer's size: whole blocks of odd segments make up a little more than 64 MiB."""
    exact = row["segment_bytes"] * row["segments_per_block"] * row["num_blocks"]
    return round(exact / (64 * MiB)) * 64 * MiB


def _title(data: dict[str, Any]) -> str:
    p = data["provenance"]
    return (
        f"# Copying KV blocks on one {p['gpu']}\n\n"
        f"{p['gpu']}, {p['link']}, driver {p['driver']}, torch {p['torch']}, "
        f"Triton {p['triton']}, Python {p['python']}, kvferry {p['kvferry']}, {p['date']}. "
        f"One run of `{p['command']}`; its calibration took {p['calibration_seconds']} s."
    )


def _large(data: dict[str, Any], direction: str) -> list[str]:
    rows = [r for r in data["rows"] if r["direction"] == direction]
    parts = []
    for slots in ("run", "scattered"):
        for total in sorted({num_bytes(r) for r in rows if r["host_slots"] == slots}):
            here = [r for r in rows if num_bytes(r) == total and r["host_slots"] == slots]
            paths = paths_of(here)
            lines = []
            for segment in sorted({r["segment_bytes"] for r in here}):
                cells = {r["path"]: r for r in here if r["segment_bytes"] == segment}
                auto = cells["auto"]
                lines.append(
                    [
                        size(segment),
                        *(_gbps(cells.get(path)) for path in paths),
                        f"{auto['ceiling_gbps']:.1f}",
                        f"{auto['fraction_of_ceiling']:.3f}",
                        *([f"{auto['alone_gbps']:.1f}"] if auto["in_flight"] > 1 else []),
                    ]
                )
            where = ", scattered host slots" if slots == "scattered" else ""
            queued = here[0]["in_flight"]
            how = f", {queued} transfers queued one after another" if queued > 1 else ""
            last = ["auto, one alone"] if queued > 1 else []
            parts.append(
                f"## {NAMES[direction]}, {size(total)} per transfer{where}\n\n"
                f"GB/s by segment{how}.\n\n"
                + table(["Segment", *paths, "Ceiling", "auto / ceiling", *last], lines)
            )
    return parts


def _one_copy(data: dict[str, Any]) -> str:
    if not data.get("one_copy"):
        return ""
    lines = [
        [
            f"{NAMES[c['direction']]}, {size(c['num_bytes'])}",
            f"{c['gbps']:.1f}" if c["in_flight"] > 1 else "–",
            f"{c['alone_gbps']:.1f}",
            f"{c['ceiling_gbps']:.1f}",
            f"{c['alone_gbps'] / c['ceiling_gbps']:.3f}",
        ]
        for c in data["one_copy"]
    ]
    return (
        "## One pinned copy by its size\n\nGB/s of a single copy, timed as the paths are. "
        "All shares in the tables above are of the ceiling, not of these.\n\n"
        + table(["Copy", "queued", "alone", "Ceiling", "alone / ceiling"], lines)
    )


def _gbps(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    chosen = f" ({row['chosen']})" if row["chosen"] else ""
    return f"{row['gbps']:.1f}{chosen}"


def _small(data: dict[str, Any], direction: str) -> str:
    rows = [r for r in data["small"] if r["direction"] == direction]
    paths = paths_of(rows)
    lines = []
    for segment in sorted({r["segment_bytes"] for r in rows}):
        for blocks in sorted({r["num_blocks"] for r in rows}):
            cells = {
                r["path"]: r
                for r in rows
                if r["segment_bytes"] == segment and r["num_blocks"] == blocks
            }
            auto = cells["auto"]
            lines.append(
                [
                    f"{blocks} x 64 x {size(segment)}",
                    *(_micros(cells[path]) for path in paths),
                    f"{cells['dma']['seconds'] / auto['seconds']:.1f}x",
                ]
            )
    return (
        f"## {NAMES[direction]}, small transfers\n\nMicroseconds by blocks x segments.\n\n"
        + table(["Transfer", *paths, "dma / auto"], lines)
    )


def _micros(row: dict[str, Any]) -> str:
    chosen = f" ({row['chosen']})" if row["chosen"] else ""
    return f"{1e6 * row['seconds']:.0f}{chosen}"


def _submit(data: dict[str, Any]) -> str:
    rows = data["submit"]
    paths = list(dict.fromkeys(r["path"] for r in rows))
    lines = []
    for direction, name in NAMES.items():
        for blocks in sorted({r["num_blocks"] for r in rows}):
            cells = {
                r["path"]: f"{r['submit_us']:.0f}"
                for r in rows
                if r["direction"] == direction and r["num_blocks"] == blocks
            }
            raw = [
                r["submit_us"]
                for r in data["small"]
                if r["direction"] == direction
                and r["num_blocks"] == blocks
                and r["segment_bytes"] == 16 * KiB
                and r["path"] == "dma"
            ]
            called = f"{raw[0]:.0f}" if raw else "–"
            lines.append(
                [f"{name}, {blocks} x 64 x 16 KiB", *(cells[path] for path in paths), called]
            )
    return (
        "## Host time of submit\n\nMicroseconds that `submit` holds its caller, median; "
        "last, the batch call itself for comparison.\n\n"
        + table(["Transfer", *paths, "bare batch call"], lines)
    )


def _both_ways(data: dict[str, Any]) -> str:
    lines = [
        ["one large copy" if what == "ceiling" else what, *(f"{way[d]:.1f}" for d in NAMES)]
        for what, way in data["both_ways"].items()
    ]
    return (
        "## Both directions at once\n\nGB/s each, 256 MiB transfers of 16 KiB segments.\n\n"
        + table(["Path", *NAMES.values()], lines)
    )


def _slowdown(data: dict[str, Any]) -> str:
    lines = [
        [
            f"{r['load']}, {NAMES[r['direction']].lower().replace('gpu', 'GPU')}",
            r["path"] + (f" ({r['chosen']})" if r["chosen"] else ""),
            f"{r['gbps']:.1f}",
            f"x{r['factor']:.3f}",
            f"{r['lost_ms_per_gb']:.2f}",
        ]
        for r in data["slowdown"]
    ]
    return (
        "## What the copy costs the model\n\n"
        "Copies of 256 MiB in 16 KiB segments, without a pause, beside a load; the load's rounds "
        "are timed alone and beside the copies in turn. What `dma` costs here is its call: while "
        "the driver works through the descriptors, it launches nothing for the model.\n\n"
        + table(["Load, direction", "Path", "Copy GB/s", "Load time", "ms lost per GB"], lines)
    )


def _planner(data: dict[str, Any]) -> str:
    cells = data["planner"]
    if not cells:
        return ""
    worst = sorted(cells, key=lambda c: -c["times_best"])[:5]
    text = (
        "## The planner where calibration did not measure\n\n"
        f"Within 5% of the best path in {data['planner_within_5_percent']:.1%} of {len(cells)} "
        "transfers of sizes the calibration did not time. The five worst:\n\n"
    )
    return text + table(
        ["Transfer", "Chosen", "Best", "Time / best"],
        [
            [
                f"{NAMES[c['direction']]}, {size(c['segment_bytes'])}, "
                f"{c['num_bytes'] / MiB:.4g} MiB"
                + (", scattered" if c.get("host_slots") == "scattered" else ""),
                c["chosen"],
                c["best"],
                f"{c['times_best']:.3f}",
            ]
            for c in worst
        ],
    )


# -- the plot ----

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
        if path is None or not path.needs_kernels:
            lines.append((name, path.title if path is not None else name, colour, 2.0, dash))
    return lines


def _colours(data: dict[str, Any]) -> dict[str, str]:
    """One for each path but the planner's choice, the same wherever it is shown."""
    timed = [path for path in paths_of([*data["rows"], *data["slowdown"]]) if path != AUTO_PATH]
    others = [name for name in timed if name not in BY_NAME]
    ours = sorted(
        (name for name in reversed(BY_NAME) if name in timed),
        key=lambda name: BY_NAME[name].needs_kernels,
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
