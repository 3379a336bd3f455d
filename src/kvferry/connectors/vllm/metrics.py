"""kvferry's figures as vLLM logs and exports them: subclasses of vLLM's own classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.connectors.common import reports as figures
from kvferry.connectors.common.reports import EXPORTED, SEPARATOR
from kvferry.telemetry.catalog import IDLE, MetricKind

PREFIX = "vllm:"

_CLASSES: dict[MetricKind, tuple[Any, dict[str, str]]] = {
    MetricKind.COUNTER: (Counter, {}),
    # Without this mode there would be one gauge from each of vLLM's API servers.
    MetricKind.GAUGE: (Gauge, {"multiprocess_mode": "mostrecent"}),
}


@dataclass
class FerryStats(KVConnectorStats):  # type: ignore[misc]
    """One interval's figures, which vLLM's engine sends to its front end."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: FerryStats) -> FerryStats:
        figures.add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return figures.log_line(self.data)

    def is_empty(self) -> bool:
        return not any(
            value
            for key, value in self.data.items()
            if figures.adds_up(key) or key.startswith(IDLE.name)
        )


class FerryMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Exports the figures on vLLM's metrics endpoint, with our labels after vLLM's."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: metric_types[_CLASSES[metric.kind][0]](
                name=PREFIX + name.removesuffix("_total"),
                documentation=metric.help,
                labelnames=[*labelnames, *(label.name for label in metric.labels)],
                **_CLASSES[metric.kind][1],
            )
            for name, metric in EXPORTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        vllms = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, *labels = key.split(SEPARATOR)
            if name not in self._metrics:
                continue
            child = self._metrics[name].labels(*vllms, *labels)
            if EXPORTED[name].kind is MetricKind.COUNTER:
                child.inc(max(0.0, value))
            else:
                child.set(value)
