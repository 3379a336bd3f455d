"""One look at a metrics endpoint: fetched, parsed, and cut down to what kvferry counts."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from kvferry.errors import InputError, UnreachableError
from kvferry.metrics import DEFAULT_PORT
from kvferry.metrics.catalog import (
    LOAD_RATE,
    PREFILL_RATE,
    PREFIX,
    SLOT_BYTES,
    Metric,
    catalog,
)
from kvferry.watch.words import clean

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
_TIMEOUT_SECONDS = 5.0
_MOST_BYTES = 32 << 20
_VLLM = "vllm:"

_NEVER_SUMMED = frozenset(metric.name for metric in (SLOT_BYTES, LOAD_RATE, PREFILL_RATE))

_LABELS = {
    name: tuple(label.name for label in metric.labels)
    for metric in catalog()
    for name in metric.series
}


@dataclass(frozen=True)
class Reading:
    """What an endpoint said at one moment: values by metric and by that metric's labels.

    Labels that are not ours (vLLM's model and engine) are summed over, except where that makes no
    sense: of sizes and rates it is the largest.
    """

    at: float
    values: Mapping[tuple[str, tuple[str, ...]], float]
    version: str = ""

    def one(self, metric: Metric) -> float | None:
        return self.values.get((metric.name, ()))

    def by_label(self, metric: Metric) -> dict[tuple[str, ...], float]:
        return {
            labels: value for (name, labels), value in self.values.items() if name == metric.name
        }


class AnswerError(UnreachableError):
    """Somebody answered, and refused. ``is_ours`` says that it was one of kvferry's endpoints."""

    def __init__(self, url: str, code: int, detail: str) -> None:
        try:
            words, self.is_ours = json.loads(detail)["error"], True
        except (ValueError, KeyError, TypeError):
            words, self.is_ours = detail, False
        self.code = code
        super().__init__(f"{url} answered {code}: {clean(words)}")


Fetch = Callable[[str], bytes]


def fetch(url: str) -> bytes:
    """The body behind an http address; UnreachableError says what to do where there is none."""
    request = Request(url, headers={"Accept": "text/plain"})
    try:
        with urlopen(request, timeout=_TIMEOUT_SECONDS) as reply:
            body = reply.read(_MOST_BYTES + 1)
    except HTTPError as error:
        detail = error.read(500).decode(errors="replace").strip()
        raise AnswerError(url, error.code, detail) from error
    except (URLError, OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise UnreachableError(
            f"{url} cannot be reached: {reason}. Is the engine running, with metrics_port set or "
            "ferry.serve_metrics() called?"
        ) from error
    if len(body) > _MOST_BYTES:
        raise UnreachableError(f"{url} answered more than {_MOST_BYTES >> 20} MiB; not ours")
    return bytes(body)


def base_url(url: str) -> str:
    """An endpoint's address without ``/metrics``; ``host:port`` alone is enough."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{url!r} is no address; say it as {DEFAULT_URL}")
    return full.rstrip("/").removesuffix("/metrics")


def read(url: str, fetch: Fetch = fetch) -> Reading:
    """Look once."""
    target = f"{base_url(url)}/metrics"
    text = fetch(target).decode("utf-8", errors="replace")
    try:
        reading = parse(text, at=time.time())
    except ValueError as error:
        raise UnreachableError(
            f"{target} does not speak the Prometheus format: {clean(error)}"
        ) from error
    if not reading.values:
        raise UnreachableError(
            f"{target} answers, but has no kvferry metrics: is the connector configured?"
        )
    return reading


def parse(text: str, *, at: float) -> Reading:
    """Our metrics out of an endpoint's text."""
    values: dict[tuple[str, tuple[str, ...]], float] = {}
    version = ""
    for family in text_string_to_metric_families(_ours(text)):
        for sample in family.samples:
            name = sample.name.removeprefix(_VLLM)
            labels = _LABELS.get(name)
            if labels is None:
                continue
            if name == "kvferry_info":
                version = sample.labels.get("version", "")
            if "le" in sample.labels:
                continue  # what spreads how is for dashboards
            key = (name, tuple(sample.labels.get(label, "") for label in labels))
            if name in _NEVER_SUMMED:
                values[key] = max(values.get(key, 0.0), sample.value)
            else:
                values[key] = values.get(key, 0.0) + sample.value
    return Reading(at, values, version)


def explain(url: str, request_id: str | None = None, fetch: Fetch = fetch) -> dict[str, Any]:
    """What an endpoint remembers of one request, or of the latest ones."""
    where = f"{base_url(url)}/explain"
    target = where if request_id is None else f"{where}/{quote(request_id, safe='')}"
    try:
        body = fetch(target)
    except AnswerError as error:
        if error.code == HTTPStatus.NOT_FOUND and not error.is_ours:
            raise UnreachableError(
                f"{target} does not exist: requests are explained by kvferry's own endpoint. In "
                "vLLM, set metrics_port among the connector's settings and ask there"
            ) from error
        raise
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise UnreachableError(f"{target} did not answer in JSON") from error
    if not isinstance(answer, dict):
        raise UnreachableError(f"{target} answered something else than an explanation")
    return answer


def _ours(text: str) -> str:
    """The lines about us: vLLM's endpoint has thousands of others."""
    return "".join(f"{line}\n" for line in text.splitlines() if PREFIX in line)
