"""Our figures on vLLM's endpoint: what the scheduler counted is what a scrape reads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry
from tests.integration.vllm.engine import FERRY, make_prompts

from kvferry.connectors.common.reports import EXPORTED, between, figures
from kvferry.connectors.vllm.metrics import PREFIX, FerryMetrics
from kvferry.telemetry.catalog import MetricKind, Snapshot, exposition
from kvferry.telemetry.stats import SchedulerStats, Traffic


class Exported:
    """vLLM's side of it: metrics in a registry, told of one interval after another."""

    def __init__(self, num_engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        types = {
            kind: lambda kind=kind, **options: kind(**options, registry=self.registry)
            for kind in (Counter, Gauge, Histogram)  # vLLM looks all three up
        }
        labels: dict[int, list[object]] = {i: ["tiny", str(i)] for i in range(num_engines)}
        config = SimpleNamespace(kv_transfer_config=None)
        self.metrics = FerryMetrics(config, types, ["model_name", "engine"], labels)
        self._before: dict[int, dict[str, float]] = {}

    def tell(self, snapshot: Snapshot, engine: int = 0) -> None:
        now = figures(snapshot)
        interval = between(self._before.get(engine, {}), now)
        self._before[engine] = now
        self.metrics.observe(interval, engine)

    def values(self, engine: int = 0) -> dict[Any, float]:
        return {
            (sample.name, *sorted(i for i in sample.labels.items() if i[0] not in VLLMS)): (
                sample.value
            )
            for family in self.registry.collect()
            for sample in family.samples
            if sample.labels.get("engine") == str(engine) and not sample.name.endswith("_created")
        }


VLLMS = ("model_name", "engine")


def ours(snapshot: Snapshot) -> dict[Any, float]:
    """What our own endpoint says, named as vLLM names it."""
    return {
        (PREFIX + sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition(snapshot).decode())
        for sample in family.samples
    }


def snapshot_of(stats: SchedulerStats, number: int) -> Snapshot:
    traffic = {
        ("host", "device", "kernel"): Traffic(number, 10**number, 7e-6 * number),
        ("device", "host", "staged"): Traffic(2 * number, 1 << number, 0.0),
    }
    return Snapshot(replace(stats, traffic=traffic), "1.2", {"host": 4096}, 1 << 20)


def test_both_endpoints_say_the_same(start, llama):
    """Every metric, every label, after several intervals of two engines."""
    engine = start(llama, is_fresh=True, ferry=FERRY)
    engine.generate(make_prompts(71, 200))
    stats = engine.stats
    exported = Exported(2)
    assert {metric.kind for metric in EXPORTED.values()} == set(MetricKind)
    for step in range(1, 5):
        for number in range(2):
            exported.tell(snapshot_of(stats, step + number), number)
    for number in range(2):
        expected, said = ours(snapshot_of(stats, 4 + number)), exported.values(number)
        assert said == pytest.approx(expected)
        assert said.keys() == expected.keys()
