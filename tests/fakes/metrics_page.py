"""docs/METRICS.md as it should be, made of the catalog."""

from __future__ import annotations

from kvferry.telemetry.catalog import catalog


def page() -> str:
    """The documentation page of all metrics, as Markdown."""
    rows = [
        f"| `{m.name}` | {m.kind.value} | {', '.join(f'`{x.name}`' for x in m.labels) or '–'} "
        f"| {m.help} |"
        for m in catalog()
    ]
    labels: dict[tuple[str, str], list[str]] = {}
    for metric in catalog():
        for label in metric.labels:
            labels.setdefault((label.name, label.values), []).append(metric.name)
    names = [name for name, _ in labels]
    return "\n".join(
        [
            "# Metrics",
            "",
            "A kvferry endpoint serves these under `/metrics` (see [operations](operations.md)). "
            "Every label has few values: no request or key becomes one. "
            "vLLM's own endpoint has them as `vllm:kvferry_…`, with vLLM's labels too. "
            "They are updated once a second while requests run.",
            "",
            "| metric | kind | labels | what it says |",
            "|---|---|---|---|",
            *rows,
            "",
            "| label | values |",
            "|---|---|",
            *(
                f"| `{name}`{_of(metrics) if names.count(name) > 1 else ''} | {values} |"
                for (name, values), metrics in labels.items()
            ),
            "",
            "Useful figures made of them:",
            "",
            "| figure | query |",
            "|---|---|",
            *(f"| {words} | `{query}` |" for words, query in FIGURES.items()),
            "",
        ]
    )


def _of(metrics: list[str]) -> str:
    """The metrics of a label that has other values with other metrics."""
    return f" of {', '.join(f'`{name}`' for name in metrics)}"


FIGURES = {
    "Hit rate of the host, in tokens": (
        "rate(kvferry_hit_tokens_total[5m]) / rate(kvferry_lookup_tokens_total[5m])"
    ),
    "Speed of copies while they ran": (
        "rate(kvferry_moved_bytes_total[5m]) / rate(kvferry_moved_seconds_total[5m])"
    ),
    "Bytes moved per second of wall time": "rate(kvferry_moved_bytes_total[1m])",
    "Mean time of a copy": (
        "rate(kvferry_moved_seconds_total[5m]) / rate(kvferry_moved_copies_total[5m])"
    ),
    "Speed of the drives": ("sum by (tier, operation) (rate(kvferry_drive_bytes_total[5m]))"),
    "Bytes of blocks in each tier": (
        'kvferry_slots{state=~"cached\\|leased"} '
        "* on (instance, tier) group_left kvferry_slot_bytes"
    ),
}
