"""The picture of ``kvferry simulate``: hit ratio by capacity, a line for each policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from kvferry.cli.plots import Series, legend, line_plot
from kvferry.errors import ConfigError
from kvferry.quantities import quoted

BOUND = "--bound"
COLOURS = ("--c1", "--c2", "--c3", "--c4", "--c5", "--c6")
STYLE = (
    ":root{--bound:#b9c4cc;--c1:#7f7f7f;--c2:#e09f3e;--c3:#5b6c9d;--c4:#c44536;--c5:#0b6e4f;"
    "--c6:#8a5a83}"
    "text{font:12px system-ui,sans-serif;fill:#444}.axis{fill:#222}.grid{stroke:#e4e4e4}"
    ".line{fill:none;stroke-width:2}.line.wide{stroke-width:7;stroke-linecap:round}"
)
PAGE_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;"
    "color:#222}svg{width:100%;height:auto}table{border-collapse:collapse;width:100%;"
    "font-size:.9rem}td,th{text-align:right;padding:.2rem .6rem;border-bottom:1px solid #e4e4e4}"
    "td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}"
    ".legend{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:0}"
    ".legend span{display:inline-block;width:1.4rem;height:.3rem;margin-right:.4rem;"
    "vertical-align:middle}.scroll{overflow-x:auto}.dim{color:#666}"
)


def drawer(file: Path) -> Callable[[dict[str, Any]], str]:
    """What draws a file of this name. ConfigError where nothing does: nobody could open it."""
    kinds = {".svg": plot, ".html": report, ".htm": report}
    found = kinds.get(file.suffix.lower())
    if found is None:
        raise ConfigError(
            f"--plot: {quoted(file.name)} must end in .svg, for a picture, or "
            ".html, for a page with tables"
        )
    return found


def plot(data: dict[str, Any]) -> str:
    """One SVG that needs nothing else."""
    drawn = _drawn(data)
    names = "".join(
        f'<text x="{86 + 118 * (at % 3)}" y="{278 + 18 * (at // 3)}">'
        f'<tspan style="fill:var({line.colour})" font-weight="bold">&#9632; </tspan>'
        f"{escape(line.name)}</text>"
        for at, line in enumerate(_lines(data))
    )
    height = 284 + 18 * ((len(_lines(data)) - 1) // 3)
    head, _, rest = drawn.partition(">")
    head = head.replace('viewBox="0 0 460 260"', f'viewBox="0 0 460 {height}"')
    back = f'<rect width="460" height="{height}" fill="#fff"/>'
    return f"{head}><style>{STYLE}</style>{back}{rest.removesuffix('</svg>')}{names}</svg>\n"


def report(data: dict[str, Any]) -> str:
    """One page with the picture and all figures, that needs nothing else."""
    lines = [(line.name, line.colour) for line in _lines(data)]
    title = f"kvferry simulate: {', '.join(path.rsplit('/', 1)[-1] for path in data['trace'])}"
    hints = f" Hints for {data['hints']:.0%} of the conversations." if data["hints"] else ""
    partial = " Partial last blocks are stored, too." if data["keep_partial"] else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}{PAGE_STYLE}</style><h1>{escape(title)}</h1>"
        f"<p>{data['requests']:,} requests, {data['blocks']:,} blocks of {data['block_tokens']} "
        f"tokens, {data['tokens']:,} prompt tokens.{hints}{partial}</p>"
        f"{_drawn(data)}{legend(lines)}{_rows(data)}"
        '<p class="dim">A block hits if it is there and all before it in its request are. The '
        "all-knowing one sees the whole trace ahead and may refuse what comes.</p></html>\n"
    )


def _lines(data: dict[str, Any]) -> list[Series]:
    bounds = sorted((_x(score["capacity_blocks"]), score["hit_ratio"]) for score in data["bound"])
    lines = [Series("all-knowing", BOUND, bounds, wide=True)] if bounds else []
    policies = dict.fromkeys(score["policy"] for score in data["scores"])
    for policy, colour in zip(policies, cycle(COLOURS), strict=False):
        points = sorted(
            (_x(score["capacity_blocks"]), score["hit_ratio"])
            for score in data["scores"]
            if score["policy"] == policy
        )
        lines.append(Series(policy, colour, points))
    return lines


def _x(capacity: list[int]) -> float:
    return math.log2(sum(capacity))


def _drawn(data: dict[str, Any]) -> str:
    labels = {_x(score["capacity_blocks"]): score["capacity"] for score in data["scores"]}
    return line_plot(
        _lines(data),
        x_label="capacity in blocks, on a logarithmic scale",
        y_label="hit ratio",
        show_y="{:.2f}".format,
        show_x=lambda x: escape(_short(labels.get(x, ""))),
        x_ticks=sorted(labels),
    )


def _short(text: str) -> str:
    return text if len(text) <= 12 else f"{text[:11]}…"


def _rows(data: dict[str, Any]) -> str:
    head = "<tr><th>capacity<th>policy<th>hit ratio<th>of bound<th>tokens saved<th>evicted</tr>"
    rows = [head]
    for score in data["scores"]:
        bound = score["bound_hit_ratio"]
        share = f"{score['hit_ratio'] / bound:.0%}" if bound else ""
        rows.append(
            f"<tr><td>{escape(score['capacity'])}<td>{escape(score['policy'])}"
            f"<td>{score['hit_ratio']:.4f}<td>{share}"
            f"<td>{score['tokens_saved']:,} ({score['token_ratio']:.1%})"
            f"<td>{score['evicted']:,}</tr>"
        )
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'
