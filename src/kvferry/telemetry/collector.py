"""The metrics as prometheus_client knows them: a collector for any registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from kvferry.telemetry.catalog import Metric, MetricKind, catalog
from kvferry.telemetry.source import Snapshot, samples, shown
from kvferry.telemetry.stats import Distribution

Family = Any  # one of the three above; prometheus_client's types are not ours to check


class FerryCollector:
    """Asks for a snapshot whenever it is scraped. Keeps nothing in between."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Family]:
        """The families without values, so that registering takes no snapshot."""
        return (_family(metric) for metric in catalog())

    def collect(self) -> Iterator[Family]:
        families = {metric: _family(metric) for metric in catalog()}
        for metric, labels, value in samples(self._snapshot()):
            _add(families[metric], labels, value)
        return (family for family in families.values() if family.samples)


def _family(metric: Metric) -> Family:
    labels = [label.name for label in metric.labels]
    if metric.kind is MetricKind.COUNTER:
        return CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=labels)
    if metric.kind is MetricKind.GAUGE:
        return GaugeMetricFamily(metric.name, metric.help, labels=labels)
    return HistogramMetricFamily(metric.name, metric.help, labels=labels)


def _add(family: Family, labels: tuple[str, ...], value: float | Distribution) -> None:
    if isinstance(value, Distribution):
        bounds = [*map(shown, value.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(value.counts), strict=True))
        family.add_metric(labels, buckets, value.total)
    else:
        family.add_metric(labels, value)
