"""One look at a metrics endpoint: fetched, parsed, and cut down to what kvferry counts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from kvferry.errors import UnreachableError
from kvferry.metrics.catalog import (
    DURABLE_LAG,
    LOAD_RATE,
    MEMORY_CURVE,
    PREFILL_RATE,
    SLOT_BYTES,
    Metric,
    catalog,
)
from kvferry.watch.fetch import AnswerError, Fetch, base_url, fetch
from kvferry.watch.text import lines
from kvferry.watch.told import read_json
from kvferry.watch.words import said

MOST_SERIES = 4096
"""More than any kvferry has: its labels have few values, all known beforehand."""

_VLLM = "vllm:"

_NEVER_SUMMED = frozenset(
    metric.name for metric in (SLOT_BYTES, LOAD_RATE, PREFILL_RATE, DURABLE_LAG, MEMORY_CURVE)
)

_LABELS = {
    name: tuple(label.name for label in metric.labels)
    for metric in catalog()
    for name in metric.series
}

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """What an endpoint said at one moment: values by metric and by that metric's labels.

    Labels that are not ours (vLLM's model and engine) are summed over, except where that makes no
    sense: of sizes and rates it is the largest.
    """

    at: float
    values: Mapping[tuple[str, Labels], float]
    version: str = ""

    def one(self, metric: Metric) -> float | None:
        return self.values.get((metric.name, ()))

    def by_label(self, metric: Metric) -> Mapping[Labels, float]:
        return self._by_name.get(metric.name, {})

    @cached_property
    def _by_name(self) -> Mapping[str, Mapping[Labels, float]]:
        found: dict[str, dict[Labels, float]] = {}
        for (name, labels), value in self.values.items():
            found.setdefault(name, {})[labels] = value
        return found


class UnexplainedError(UnreachableError):
    """It is an endpoint that explains no requests, as vLLM's own."""


def read(url: str, fetch: Fetch = fetch) -> Reading:
    """Look once."""
    target = f"{base_url(url)}/metrics"
    text = fetch(target).decode("utf-8", errors="replace")
    try:
        reading = parse(text, at=time.time())
    except ValueError as error:
        raise UnreachableError(
            f"{target} does not speak the Prometheus format: {said(error)}"
        ) from error
    if not reading.values:
        raise UnreachableError(
            f"{target} answers, but has no kvferry metrics: is the connector configured?"
        )
    return reading


def parse(text: str, *, at: float) -> Reading:
    """Our metrics out of an endpoint's text; ValueError where it is no such text."""
    values: dict[tuple[str, Labels], float] = {}
    version = ""
    for line in lines(text):
        name = line.name.removeprefix(_VLLM)
        labels = _LABELS.get(name)
        if labels is None or line.value is None:
            continue
        if name == "kvferry_info":
            version = line.labels.get("version", "")
        key = (name, tuple(line.labels.get(label, "") for label in labels))
        if name in _NEVER_SUMMED:
            values[key] = max(values.get(key, 0.0), line.value)
        else:
            values[key] = values.get(key, 0.0) + line.value
        if len(values) > MOST_SERIES:
            raise ValueError(f"it has more than {MOST_SERIES:,} series of kvferry's names")
    return Reading(at, values, version)


def explain(url: str, request_id: str | None = None, fetch: Fetch = fetch) -> dict[str, Any]:
    """What an endpoint remembers of one request, or of the latest ones: JSON, of any shape."""
    where = f"{base_url(url)}/explain"
    target = (
        where if request_id is None else f"{where}/{quote(request_id, safe='', errors='replace')}"
    )
    try:
        body = fetch(target)
    except AnswerError as error:
        if error.code == HTTPStatus.NOT_FOUND and not error.is_ours:
            raise UnexplainedError(
                f"{target} does not exist: requests are explained by kvferry's own endpoint. In "
                "vLLM, set metrics_port among the connector's settings and ask there"
            ) from error
        raise
    try:
        return read_json(body)
    except ValueError as error:
        raise not_explained(target, error) from error


def not_explained(target: str, error: ValueError) -> UnreachableError:
    return UnreachableError(f"{target} answered something else than an explanation: {said(error)}")
