"""What kvferry counts, in the shapes vLLM logs and exports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.stats import SchedulerStats
from kvferry.types import DEVICE, HOST

# What grows, as differences since the last report; name, and what it is.
COUNTERS = {
    "queries": "Requests looked up.",
    "asked_tokens": "Tokens that looked-up requests lacked.",
    "hit_tokens": "Tokens loaded instead of computed.",
    "loaded_bytes": "Bytes copied from host to device, over all ranks.",
    "load_seconds": "Seconds those copies took, over all ranks.",
    "stored_bytes": "Bytes copied from device to host, over all ranks.",
    "store_seconds": "Seconds those copies took, over all ranks.",
    "failed_transfers": "Copies that did not bring their bytes.",
    "evicted_blocks": "Blocks dropped from the host to make room.",
    "shed_stores": "Times that stores waited because too many were under way.",
}
# What goes up and down, as of now.
GAUGES = {
    "cached_blocks": "Blocks in host memory that can be loaded.",
    "free_blocks": "Host slots that hold nothing.",
    "transfers_in_flight": "Copies under way.",
    "held_blocks": "Device blocks that copies keep from being reused.",
}
PREFIX = "vllm:kvferry_"


def figures(stats: SchedulerStats, num_held: int) -> dict[str, float]:
    """A snapshot as flat numbers."""
    load, store = (HOST, DEVICE), (DEVICE, HOST)
    return {
        "queries": stats.queries,
        "asked_tokens": stats.asked_tokens,
        "hit_tokens": stats.hit_tokens,
        "loaded_bytes": stats.bytes_moved.get(load, 0),
        "load_seconds": stats.seconds_moved.get(load, 0.0),
        "stored_bytes": stats.bytes_moved.get(store, 0),
        "store_seconds": stats.seconds_moved.get(store, 0.0),
        "failed_transfers": stats.failed,
        "evicted_blocks": stats.pool.evicted,
        "shed_stores": stats.shed_stores,
        "cached_blocks": stats.pool.cached,
        "free_blocks": stats.pool.free,
        "transfers_in_flight": stats.in_flight,
        "held_blocks": num_held,
    }


@dataclass
class FerryStats(KVConnectorStats):  # type: ignore[misc]
    """One interval: differences for counters, the latest value for gauges."""

    @classmethod
    def between(cls, before: dict[str, float], now: dict[str, float]) -> FerryStats:
        grown = {name: now[name] - before.get(name, 0) for name in COUNTERS}
        return cls(data={**grown, **{name: now[name] for name in GAUGES}})

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: FerryStats) -> FerryStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value if name in COUNTERS else value
        return self

    def reduce(self) -> dict[str, int | float]:
        data = {name: self.data.get(name, 0) for name in (*COUNTERS, *GAUGES)}
        rates = {
            "load_gb_per_s": _rate(data["loaded_bytes"], data["load_seconds"]),
            "store_gb_per_s": _rate(data["stored_bytes"], data["store_seconds"]),
        }
        return {**{f"kvferry_{name}": value for name, value in data.items()}, **rates}

    def is_empty(self) -> bool:
        return not any(self.data.get(name) for name in COUNTERS)


class FerryMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same figures on vLLM's metrics endpoint."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._per_engine(metric_types[Counter](PREFIX + name, help, labelnames))
            for name, help in COUNTERS.items()
        }
        self._gauges = {
            name: self._per_engine(metric_types[Gauge](PREFIX + name, help, labelnames))
            for name, help in GAUGES.items()
        }

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)


def _rate(num_bytes: float, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 3) if seconds else 0.0
