"""What kvferry counts, in the shapes vLLM logs and exports: the catalog's names on vLLM's endpoint.

Figures travel from vLLM's engine to its front end as one flat dict of numbers, so a labelled value
is keyed by its name and labels: ``kvferry_moved_bytes_total|host|device|kernel``. A histogram's
are keyed by the part, too: how many values each bucket got, by its number, and their sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.metrics import catalog as names
from kvferry.metrics.catalog import Kind, Metric, catalog
from kvferry.metrics.samples import Snapshot, samples
from kvferry.stats import SIZE_BOUNDS, TIME_BOUNDS, Distribution
from kvferry.types import DEVICE, HOST

PREFIX = "vllm:"
EXPORTED = {metric.name: metric for metric in catalog()}

_SEPARATOR = "|"
_SUM = "sum"


def figures(snapshot: Snapshot) -> dict[str, float]:
    """A snapshot as flat numbers."""
    flat: dict[str, float] = {}
    for metric, labels, value in samples(snapshot):
        key = _SEPARATOR.join((metric.name, *labels))
        if isinstance(value, Distribution):
            flat |= {f"{key}|{i}": float(n) for i, n in enumerate(value.counts) if n}
            flat[f"{key}|{_SUM}"] = value.total
        else:
            flat[key] = float(value)
    return flat


@dataclass
class FerryStats(KVConnectorStats):  # type: ignore[misc]
    """One interval: differences for counters, the latest value for gauges."""

    @classmethod
    def between(cls, before: dict[str, float], now: dict[str, float]) -> FerryStats:
        return cls(
            data={
                key: value - before.get(key, 0) if _adds_up(key) else value
                for key, value in now.items()
            }
        )

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: FerryStats) -> FerryStats:
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value if _adds_up(key) else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The few figures worth a line in a log."""
        loaded, load_seconds = self._moved(HOST, DEVICE)
        stored, store_seconds = self._moved(DEVICE, HOST)
        return {
            "kvferry_queries": self._sum(names.QUERIES),
            "kvferry_asked_tokens": self._sum(names.ASKED_TOKENS),
            "kvferry_hit_tokens": self._sum(names.HIT_TOKENS),
            "kvferry_loaded_bytes": loaded,
            "kvferry_load_gb_per_s": _rate(loaded, load_seconds),
            "kvferry_stored_bytes": stored,
            "kvferry_store_gb_per_s": _rate(stored, store_seconds),
            "kvferry_failed_transfers": self._sum(names.FAILED),
            "kvferry_transfers_in_flight": self._sum(names.IN_FLIGHT),
        }

    def is_empty(self) -> bool:
        return not any(value for key, value in self.data.items() if _adds_up(key))

    def _sum(self, metric: Metric, *labels: str) -> float:
        start = _SEPARATOR.join((metric.name, *labels))
        return sum(
            value
            for key, value in self.data.items()
            if key == start or key.startswith(start + _SEPARATOR)
        )

    def _moved(self, src: str, dst: str) -> tuple[float, float]:
        return self._sum(names.MOVED_BYTES, src, dst), self._sum(names.MOVED_SECONDS, src, dst)


class FerryMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same figures on vLLM's metrics endpoint, our labels after vLLM's."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: metric_types[_CLASSES[metric.kind]](
                name=PREFIX + name.removesuffix("_total"),
                documentation=metric.help,
                labelnames=[*labelnames, *(label.name for label in metric.labels)],
                **_options(metric),
            )
            for name, metric in EXPORTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        vllms = self.per_engine_labelvalues[engine_idx]
        spread: dict[tuple[str, ...], dict[str, float]] = {}
        for key, value in transfer_stats_data.items():
            name, *labels = key.split(_SEPARATOR)
            if name not in self._metrics:
                continue
            if name in _BOUNDS:
                *labels, part = labels
                spread.setdefault((name, *labels), {})[part] = value
                continue
            child = self._metrics[name].labels(*vllms, *labels)
            if EXPORTED[name].kind is Kind.COUNTER:
                child.inc(max(0.0, value))
            else:
                child.set(value)
        for (name, *labels), parts in spread.items():
            child = self._metrics[name].labels(*vllms, *labels)
            for value, count in values_of(_BOUNDS[name], parts):
                for _ in range(count):
                    child.observe(value)


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


_CLASSES = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
_BOUNDS = {names.TRANSFER_BYTES.name: SIZE_BOUNDS, names.TRANSFER_SECONDS.name: TIME_BOUNDS}


def _options(metric: Metric) -> dict[str, Any]:
    if metric.kind is Kind.HISTOGRAM:
        return {"buckets": _BOUNDS[metric.name]}
    if metric.kind is Kind.GAUGE:
        return {"multiprocess_mode": "mostrecent"}  # else one from each of vLLM's API servers
    return {}


def _adds_up(key: str) -> bool:
    metric = EXPORTED.get(key.split(_SEPARATOR, 1)[0])
    return metric is not None and metric.kind is not Kind.GAUGE


def _rate(num_bytes: float, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 3) if seconds else 0.0
