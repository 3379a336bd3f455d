"""What kvferry counts as one flat dict of numbers, as it travels through vLLM.

A labelled value is keyed by its name and labels, with a character between them that no label has:
whoever sends a request may name a tenant. A histogram's are keyed by the part, too: how many values
each bucket got, by its number, and their sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from kvferry.metrics import catalog as names
from kvferry.metrics.catalog import Metric, MetricKind, catalog
from kvferry.metrics.samples import Snapshot, idle, samples
from kvferry.metrics.source import installed_version
from kvferry.stats import SIZE_BOUNDS, TIME_BOUNDS, Distribution
from kvferry.types import DEVICE, HOST

EXPORTED = {metric.name: metric for metric in catalog()}
BOUNDS = {names.TRANSFER_BYTES.name: SIZE_BOUNDS, names.TRANSFER_SECONDS.name: TIME_BOUNDS}
SEPARATOR = "\x1f"

_SUM = "sum"

Figures = dict[str, float]


def figures(snapshot: Snapshot) -> Figures:
    """A snapshot as flat numbers."""
    flat: Figures = {}
    for metric, labels, value in samples(snapshot):
        key = SEPARATOR.join((metric.name, *labels))
        if isinstance(value, Distribution):
            flat |= {f"{key}{SEPARATOR}{i}": float(n) for i, n in enumerate(value.counts) if n}
            flat[f"{key}{SEPARATOR}{_SUM}"] = value.total
        else:
            flat[key] = float(value)
    return flat


def idle_figures(why: str) -> Figures:
    """All that is to be said of a kvferry that serves nothing."""
    told: Figures = {SEPARATOR.join((names.INFO.name, installed_version())): 1.0}
    for metric, labels, value in idle(why):
        assert not isinstance(value, Distribution)
        told[SEPARATOR.join((metric.name, *labels))] = value
    return told


def between(before: Figures, now: Figures) -> Figures:
    """One interval: differences for counters, the latest value for gauges."""
    return {
        key: value - before.get(key, 0) if adds_up(key) else value for key, value in now.items()
    }


def add(figures: Figures, others: Figures) -> None:
    """Put another interval's into these."""
    for key, value in others.items():
        figures[key] = figures.get(key, 0) + value if adds_up(key) else value


def log_line(figures: Figures) -> dict[str, int | float]:
    """The few figures worth a line in a log."""
    loaded, load_seconds = _moved(figures, HOST, DEVICE)
    stored, store_seconds = _moved(figures, DEVICE, HOST)
    return {
        "kvferry_queries": _sum(figures, names.QUERIES),
        "kvferry_asked_tokens": _sum(figures, names.ASKED_TOKENS),
        "kvferry_hit_tokens": _sum(figures, names.HIT_TOKENS),
        "kvferry_loaded_bytes": loaded,
        "kvferry_load_gb_per_s": _rate(loaded, load_seconds),
        "kvferry_stored_bytes": stored,
        "kvferry_store_gb_per_s": _rate(stored, store_seconds),
        "kvferry_failed_transfers": _sum(figures, names.FAILED),
        "kvferry_transfers_in_flight": _sum(figures, names.IN_FLIGHT),
    }


@lru_cache(maxsize=4096)  # once a second for every figure there is
def adds_up(key: str) -> bool:
    """Whether a figure counts on, rather than saying how something is."""
    metric = EXPORTED.get(key.split(SEPARATOR, 1)[0])
    return metric is not None and metric.kind is not MetricKind.GAUGE


def values_of(bounds: Sequence[float], parts: Mapping[str, float]) -> list[tuple[float, int]]:
    """Values, and how often, that fill a histogram's buckets as counted and have the counted sum.

    A metric in vLLM takes one value at a time, and only how many fell into each bucket is known.
    The real sum is between that of all lower bounds and that of all upper ones: so is ours, with
    every value at the same point of its bucket.
    """
    counts = {int(i): round(n) for i, n in parts.items() if i != _SUM and n > 0}
    total = parts.get(_SUM, 0.0)
    edges = (0.0, *bounds)
    low = sum(n * edges[i] for i, n in counts.items())
    width = sum(n * (edges[i + 1] - edges[i]) for i, n in counts.items() if i < len(bounds))
    above = counts.get(len(bounds), 0)
    share = min(1.0, max(0.0, (total - low) / width)) if width else 0.0
    rest = max(0.0, total - low - share * width)
    found = []
    for i, n in counts.items():
        if i == len(bounds):
            value = edges[i] + rest / above
        else:
            value = min(edges[i] + share * (edges[i + 1] - edges[i]), edges[i + 1])
        # A bucket begins right after its lower bound: on it, a value would count one too low.
        found.append((max(value, math.nextafter(edges[i], math.inf)), n))
    return found


def _sum(figures: Figures, metric: Metric, *labels: str) -> float:
    start = SEPARATOR.join((metric.name, *labels))
    return sum(
        value for key, value in figures.items() if key == start or key.startswith(start + SEPARATOR)
    )


def _moved(figures: Figures, src: str, dst: str) -> tuple[float, float]:
    return _sum(figures, names.MOVED_BYTES, src, dst), _sum(figures, names.MOVED_SECONDS, src, dst)


def _rate(num_bytes: float, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 3) if seconds else 0.0
