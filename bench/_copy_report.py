"""Tables of a run of ``copy_paths.py``, in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from _tables import table

KiB, MiB = 1 << 10, 1 << 20

OURS = "auto"
"""The path by which the engine copies in that direction."""

HOW = {
    "loop": "one driver call per segment",
    "dma": "one batch call for all segments",
    "kernel": "threads of the card read or write host memory",
    "staged": "a kernel gathers blocks into a ring in device memory, large copies do the rest",
}
"""What the paths of a run are, also of older ones."""

NAMES = {"load": "Host to GPU", "store": "GPU to host"}

NOTES = """\
**auto**: the engine's path, in brackets. **Ceiling**: one copy of 256 MiB between pinned
and GPU memory, timed in turn with `auto`. Blocks have 64 segments and random block ids; host slots
are one run or, where called scattered, every second slot in random order: no two neighbours. Times
are medians on the device, from an idle stream to the copy's end, the call that queues it included:
of 11, of 33 for `auto` and its ceiling, of 25 for small transfers (fewer with `--quick`), of 2 for
paths that pay per segment with more than 4096 segments.
"""


def report(data: dict[str, Any]) -> str:
    """Everything a run found, as one Markdown page."""
    parts = [_title(data), _notes(data)]
    for direction in NAMES:
        parts += _large(data, direction)
    if data["small"]:
        parts += [_small(data, direction) for direction in NAMES]
        parts += [_both_ways(data), _slowdown(data)]
    return "\n\n".join(part for part in parts if part) + "\n"


def paths_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The paths timed in ``rows``: the engine's last, other designs than ours before it."""
    timed = dict.fromkeys(row["path"] for row in rows)
    ours = [name for name in HOW if name in timed]
    others = [name for name in timed if name not in (*HOW, OURS)]
    return [*ours, *others, *([OURS] if OURS in timed else [])]


def _notes(data: dict[str, Any]) -> str:
    words = HOW | data.get("designs", {})
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
        f"One run of `{p['command']}`."
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
