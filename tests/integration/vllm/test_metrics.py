"""Our figures on vLLM's endpoint: what the scheduler counted is what a scrape reads."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import CollectorRegistry
from tests.integration.vllm.engine import make_prompts

from kvferry.connectors.common.reports import EXPORTED, between, figures, values_of
from kvferry.connectors.vllm.metrics import PREFIX, FerryMetrics
from kvferry.scheduler.transfers import TrafficCounts
from kvferry.telemetry.catalog import FerryCollector, MetricKind, Snapshot
from kvferry.telemetry.stats import SIZE_BOUNDS, TIME_BOUNDS, SchedulerStats
from kvferry.telemetry.stats import Histogram as OurHistogram

FERRY = {"host": "64MiB", "load_policy": "always", "load_deadline": "5min"}

values = st.lists(st.floats(0, 1e11, allow_subnormal=False), max_size=30)


@given(values, st.sampled_from([SIZE_BOUNDS, TIME_BOUNDS]))
@example([math.nextafter(bound, 1) for bound in TIME_BOUNDS[:-1]], TIME_BOUNDS)
@example([math.nextafter(1e-4, 1)] * 3, TIME_BOUNDS)
@example([*TIME_BOUNDS], TIME_BOUNDS)
def test_made_up_values_fill_the_buckets_as_the_real_ones_did(real, bounds):
    histogram = OurHistogram(bounds)
    for value in real:
        histogram.add(value)
    counted = histogram.snapshot()
    parts = {str(i): float(n) for i, n in enumerate(counted.counts)}
    told = values_of(bounds, {**parts, "sum": counted.total})
    counts = [0] * (len(bounds) + 1)
    for value, number in told:
        counts[bisect_left(bounds, value)] += number
    assert tuple(counts) == counted.counts
    # On a bucket's lower bound itself a value may not lie: that much the sum may be off.
    assert sum(v * n for v, n in told) == pytest.approx(counted.total, rel=1e-9, abs=1e-300)


class Exported:
    """vLLM's side of it: metrics in a registry, told of one interval after another."""

    def __init__(self, num_engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        types = {
            kind: lambda kind=kind, **options: kind(**options, registry=self.registry)
            for kind in (Counter, Gauge, Histogram)
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
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FerryCollector(lambda: snapshot))
    return {
        (PREFIX + sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def snapshot_of(stats: SchedulerStats, traffic: TrafficCounts) -> Snapshot:
    return Snapshot(replace(stats, traffic=traffic.snapshot()), "1.2", {"host": 4096}, 1 << 20, 3)


def test_both_endpoints_say_the_same(start, llama):
    """Every metric, every label, every bucket, after several intervals of two engines."""
    engine = start(llama, is_fresh=True, ferry=FERRY)
    engine.generate(make_prompts(71, 200))
    stats = engine.stats
    exported, traffics = Exported(2), (TrafficCounts(), TrafficCounts())
    assert {metric.kind for metric in EXPORTED.values()} == set(MetricKind)
    for step in range(1, 5):
        for number, traffic in enumerate(traffics):
            for i in range(step * 7):
                traffic.add(("host", "device", "kernel"), 10**step * (i + 1), 1e-6 * 7**i)
                traffic.add(("device", "host", "staged"), 1 << (10 + i), 0.0)
            exported.tell(snapshot_of(stats, traffic), number)
    for number, traffic in enumerate(traffics):
        expected, said = ours(snapshot_of(stats, traffic)), exported.values(number)
        assert said == pytest.approx(expected)
        assert said.keys() == expected.keys()
