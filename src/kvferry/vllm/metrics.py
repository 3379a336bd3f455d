"""What kvferry counts, in the shapes vLLM logs and exports: the catalog's names on vLLM's endpoint.

Figures travel from vLLM's engine to its front end as one flat dict of numbers, so a labelled value
is keyed by its name and labels: ``kvferry_moved_bytes_total|host|device|kernel``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.metrics import catalog as names
from kvferry.metrics.catalog import Kind, Metric, catalog
from kvferry.metrics.samples import Snapshot, samples
from kvferry.stats import SchedulerStats
from kvferry.types import DEVICE, HOST

PREFIX = "vllm:"
EXPORTED = {
    metric.name: metric
    for metric in catalog()
    if metric.kind is not Kind.HISTOGRAM and metric is not names.INFO
}
"""Histograms would need each single value, and vLLM is told only how much was added."""

_SEPARATOR = "|"


def figures(stats: SchedulerStats, num_held: int) -> dict[str, float]:
    """A snapshot as flat numbers."""
    return {
        _SEPARATOR.join((metric.name, *labels)): float(value)
        for metric, labels, value in samples(Snapshot(stats, "", held_blocks=num_held))
        if metric.name in EXPORTED and isinstance(value, (int, float))
    }


@dataclass
class FerryStats(KVConnectorStats):  # type: ignore[misc]
    """One interval: differences for counters, the latest value for gauges."""

    @classmethod
    def between(cls, before: dict[str, float], now: dict[str, float]) -> FerryStats:
        return cls(
            data={
                key: value - before.get(key, 0) if _is_counter(key) else value
                for key, value in now.items()
            }
        )

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: FerryStats) -> FerryStats:
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value if _is_counter(key) else value
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
        return not any(value for key, value in self.data.items() if _is_counter(key))

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
            name: metric_types[Counter if metric.kind is Kind.COUNTER else Gauge](
                name=PREFIX + name.removesuffix("_total"),
                documentation=metric.help,
                labelnames=[*labelnames, *(label.name for label in metric.labels)],
            )
            for name, metric in EXPORTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            name, *labels = key.split(_SEPARATOR)
            if name not in self._metrics:
                continue
            child = self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], *labels)
            if _is_counter(key):
                child.inc(max(0.0, value))
            else:
                child.set(value)


def _is_counter(key: str) -> bool:
    metric = EXPORTED.get(key.split(_SEPARATOR, 1)[0])
    return metric is not None and metric.kind is Kind.COUNTER


def _rate(num_bytes: float, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 3) if seconds else 0.0
