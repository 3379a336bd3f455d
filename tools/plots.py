"""Draw the plots of the benchmark pages from their data: docs/benchmarks/plot-*.svg.

python tools/plots.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median
from typing import Any
from xml.sax.saxutils import escape

DATA = Path(__file__).parents[1] / "docs" / "benchmarks"
WIDTH, LABELS, BAR, TOP = 720, 250, 26, 74
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#24292f}.title{font-size:17px;font-weight:600}"
    ".note{font-size:12px;fill:#57606a}.ours{fill:#0969da}.other{fill:#b6c2cf}"
)
VLLM = "NVIDIA H200, vLLM 0.26.0, a model of Qwen2.5-7B's shape, "

Bars = list[tuple[str, float]]


def chart(title: str, note: str, unit: str, bars: Bars, digits: int = 0) -> str:
    """Horizontal bars, ours in color."""
    height = TOP + BAR * len(bars) + 10
    longest = max(value for _, value in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="28" class="title">{escape(title)}</text>',
        f'<text x="16" y="50" class="note">{escape(note)}</text>',
    ]
    for at, (label, value) in enumerate(bars):
        y = TOP + BAR * at
        long = value / longest * (WIDTH - LABELS - 130)
        kind = "ours" if label.startswith("kvferry") else "other"
        parts += [
            f'<text x="{LABELS - 10}" y="{y + 13}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{long:.1f}" height="18" rx="2" class="{kind}"/>',
            f'<text x="{LABELS + long + 8:.1f}" y="{y + 14}">{value:.{digits}f} {unit}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def data(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def plots() -> dict[str, str]:
    """Every plot by the name of its file."""
    runs = [run for run in data("vllm-h200")["runs"] if run["case"]["shape"] == "qwen7b"]
    runs = [run for run in runs if not run["only_starts"]]
    none = next(run for run in runs if run["case"]["connector"] == "none")
    named = {
        run["case"]["connector"].removesuffix("ConnectorV1"): run for run in runs if run is not none
    }
    date = "2026-11-19"
    host = {name: median(run["ttft"]["host_ms"]) for name, run in named.items()}
    rounds = {
        name: mean(each["requests_per_s"] for each in run["over"])
        for name, run in [*named.items(), ("no connector", none)]
    }
    starts = {name: run["start"]["seconds"] for name, run in named.items()}
    copies = {
        row["path"]: row["gbps"]
        for row in data("copy-h200")["rows"]
        if (row["direction"], row["segment_bytes"], row["host_slots"]) == ("load", 16384, "run")
        and row["num_blocks"] == 256
    }
    disk = data("vllm-disk-h200")["shapes"]["qwen7b"]["restart"]
    return {
        "plot-first-token.svg": chart(
            "First token when a conversation of 16,000 tokens returns",
            f"{VLLM}918 MB of KV in host memory, {date}",
            "ms",
            [
                ("computed again", median(none["ttft"]["cold_ms"])),
                *sorted(host.items(), key=lambda item: -item[1]),
            ],
        ),
        "plot-throughput.svg": chart(
            "Conversations that need three times the GPU's cache",
            f"{VLLM}4 clients, {date}; more is better",
            "requests/s",
            sorted(rounds.items(), key=lambda item: item[1]),
            digits=1,
        ),
        "plot-copies.svg": chart(
            "Copy of 256 MiB from host memory to the GPU, in pieces of 16 KiB",
            "NVIDIA H200, PCIe Gen5 x16, 2026-11-19; more is better",
            "GB/s",
            [
                ("one copy for each piece", copies["loop"]),
                ("one batched driver call", copies["dma"]),
                ("kvferry", copies["auto"]),
                ("one large copy (the limit)", data("copy-h200")["ceiling"]["load"]),
            ],
        ),
        "plot-start.svg": chart(
            "Start of the engine with 32 GiB of host memory",
            f"{VLLM}{date}",
            "s",
            sorted(starts.items(), key=lambda item: -item[1]),
            digits=1,
        ),
        "plot-restart.svg": chart(
            "First token of 16,000 tokens after the server was killed and restarted",
            f"{VLLM}blocks on one local drive, 2026-11-16",
            "ms",
            [
                ("computed again", median(each["cold_ms"] for each in disk["computed"])),
                ("kvferry, from disk", median(each["disk_ms"] for each in disk["came"])),
            ],
        ),
    }


if __name__ == "__main__":
    for name, text in plots().items():
        (DATA / name).write_text(text)
        print(f"docs/benchmarks/{name}")
