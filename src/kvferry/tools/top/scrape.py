"""Requests to an endpoint with bounds on time and size, and its answers with checked types."""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvferry.errors import InputError, UnreachableError
from kvferry.telemetry import DEFAULT_PORT
from kvferry.telemetry.catalog import (
    DURABLE_LAG,
    LOAD_RATE,
    PREFILL_RATE,
    PREFIX,
    SLOT_BYTES,
    Metric,
    catalog,
)
from kvferry.tools.words import clip

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
OWN_PORTS = range(DEFAULT_PORT, DEFAULT_PORT + 8)
"""Ports of kvferry's own endpoint. A server takes the first that is free."""
VLLM_PORT = 8000

DEADLINE_SECONDS = 5.0
FIND_SECONDS = 2.0
POST_SECONDS = 15.0
"""A control request waits for the engine's next step. The endpoint answers sooner than this."""

MOST_BYTES = 32 << 20
MOST_ROWS = 1024
MOST_LINES = 100_000
MOST_LINE = 16 << 10
MOST_SERIES = 4096
_MOST_WORDS = 500
_LARGEST = 1 << 63

_ADDRESS = re.compile(r"[!-~]+")
_NEVER_SUMMED = frozenset(
    metric.name for metric in (SLOT_BYTES, LOAD_RATE, PREFILL_RATE, DURABLE_LAG)
)
_LABELS = {metric.name: tuple(label.name for label in metric.labels) for metric in catalog()}

Fetch = Callable[[str], bytes]
Labels = tuple[str, ...]


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object whose numbers are finite. Raises ValueError for anything else."""
    try:
        answer = json.loads(body, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
    if not isinstance(answer, dict):
        raise ValueError(f"{clip(type(answer).__name__)} instead of an object")
    return answer


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{clip(text, 20)} is not a finite number")
    return value


def read_recent(answer: Mapping[str, Any]) -> list[list[str]]:
    """Return the latest requests as rows: name, tokens, tokens found by tier, miss reason.

    Raises:
        ValueError: The answer is not a list of requests.
    """
    with reading():
        return [
            [
                clip(row["request_id"], _MOST_WORDS),
                shown(row.get("asked_tokens")),
                ", ".join(
                    f"{clip(tier, 40)} {n:,}"
                    for tier, n in (row.get("tier_hit_tokens") or {}).items()
                    if n
                ),
                clip(row.get("reason") or "–").replace("_", " "),
            ]
            for row in answer["requests"][:MOST_ROWS]
        ]


def shown(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


@contextmanager
def reading() -> Iterator[None]:
    """Raise ValueError if the body finds a member of an answer missing or of the wrong type."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a member is missing or wrong: {error}") from None


class AnswerError(UnreachableError):
    """The endpoint answered with an error. ``is_ours`` says that the endpoint is kvferry's own."""

    def __init__(self, url: str, code: int, detail: str) -> None:
        try:
            words, self.is_ours = json.loads(detail)["error"], True
        except (ValueError, KeyError, TypeError, RecursionError):
            words, self.is_ours = detail, False
        self.code = code
        super().__init__(f"{url} answered {code}: {clip(words)}")


class NoExplanationsError(UnreachableError):
    """The endpoint does not explain requests, for example because it is vLLM's."""


def base_url(url: str) -> str:
    """Return an endpoint's address without ``/metrics``. ``host:port`` alone is enough."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets without an end, or a port that is no number
        known = False
    if not known or not _ADDRESS.fullmatch(full):
        raise InputError(f"{clip(url)!r} is not an address; write it as {DEFAULT_URL}")
    return full.rstrip("/").removesuffix("/metrics")


def fetch(url: str, seconds: float | None = None) -> bytes:
    """Return the body at an HTTP address. Uses no proxy and follows no redirect.

    Raises:
        UnreachableError: There is no answer, or an error. The message has a remedy.
    """
    return _exchange(url, "GET", seconds or DEADLINE_SECONDS)


def post(url: str, data: object, token: str) -> bytes:
    """Send a control request with its token and return the answer."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return _exchange(url, "POST", POST_SECONDS, json.dumps(data).encode(), headers)


def _exchange(
    url: str,
    method: str,
    seconds: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Send a request. ``seconds`` bounds the whole answer; a socket's timeout bounds each read."""
    parts, end, is_late = urlsplit(url), time.monotonic() + seconds, threading.Event()
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    line = kind(parts.hostname or "", parts.port, timeout=seconds)

    def cut(sock: socket.socket) -> None:
        is_late.set()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    try:
        line.connect()
        timer = threading.Timer(max(0.0, end - time.monotonic()), cut, [line.sock])
        timer.start()
        try:
            line.request(method, parts._replace(scheme="", netloc="").geturl(), body, headers or {})
            reply = line.getresponse()
            answer = reply.read(MOST_BYTES + 1)
            is_short = bool(reply.length)
        finally:
            timer.cancel()
            line.close()
        if is_late.is_set():
            raise TimeoutError
        if len(answer) > MOST_BYTES:
            raise UnreachableError(f"{url} answered more than {MOST_BYTES >> 20} MiB")
        if reply.status != HTTPStatus.OK:
            detail = answer[:_MOST_WORDS].decode(errors="replace").strip()
            where = reply.getheader("Location")
            other = f"it redirects to {where}; give that address instead" if where else reply.reason
            raise AnswerError(url, reply.status, detail or other)
        if is_short:
            raise http.client.IncompleteRead(b"")
        return answer
    except UnreachableError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        if is_late.is_set() or isinstance(error, TimeoutError):
            words = f"{url} did not answer within {seconds:g} s"
        elif isinstance(error, http.client.IncompleteRead):
            words = f"{url} cannot be read: its answer was cut short"
        else:
            words = (
                f"{url} cannot be reached: {clip(error) or type(error).__name__}. Is the engine "
                "running? The library serves after ferry.serve_metrics()."
            )
        raise UnreachableError(words) from error


def samples(text: str) -> Iterator[Sample]:
    """Parse the lines about kvferry, except buckets. Raises ValueError for a broken line."""
    if text and not text.endswith("\n"):
        raise ValueError("it ends in the middle of a line")
    ours = [line for line in text.split("\n") if PREFIX in line and "_bucket{" not in line]
    ours = [line for line in ours if not line.startswith("#")]
    if len(ours) > MOST_LINES:
        raise ValueError(f"it has more than {MOST_LINES:,} lines about kvferry")
    longest = max(ours, key=len, default="")
    if len(longest) > MOST_LINE:
        raise ValueError(f"it has a line of {len(longest):,} characters: {clip(longest, 40)}")
    try:
        for family in text_string_to_metric_families("\n".join([*ours, ""])):
            yield from family.samples
    except Exception as error:  # the parser raises many kinds of errors
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Reading:
    """The metrics of an endpoint at one moment, by metric and by that metric's labels.

    Values that differ only in other labels, such as vLLM's engine, are summed. Of sizes and rates,
    the largest value is taken. vLLM's endpoint names the metrics before they have values.
    """

    at: float
    values: Mapping[str, Mapping[Labels, float]]
    version: str = ""

    def by_label(self, metric: Metric) -> Mapping[Labels, float]:
        return self.values.get(metric.name, {})

    def get(self, metric: Metric, *labels: str) -> float | None:
        """Return the value of one series, or None if there is none."""
        return self.by_label(metric).get(labels)

    def total(self, metric: Metric, *labels: str) -> float:
        """Return the sum of the series whose labels begin with ``labels``."""
        every = self.by_label(metric).items()
        return sum(value for found, value in every if found[: len(labels)] == labels)


def read(url: str, fetch: Fetch = fetch) -> Reading:
    """Fetch and parse an endpoint's metrics. Raises UnreachableError if it has none."""
    target = f"{base_url(url)}/metrics"
    text = fetch(target).decode("utf-8", errors="replace")
    try:
        reading = parse(text, at=time.time())
    except ValueError as error:
        raise UnreachableError(
            f"{target} does not speak the Prometheus format: {clip(error)}"
        ) from error
    if not reading.values and f"# HELP vllm:{PREFIX}" not in text:
        raise UnreachableError(
            f"{target} answers, but has no kvferry metrics: is the connector configured?"
        )
    return reading


def parse(text: str, *, at: float) -> Reading:
    """Return the metrics in an endpoint's text. Raises ValueError for any other text."""
    values: dict[str, dict[Labels, float]] = {}
    version = ""
    for line in samples(text):
        name = line.name.removeprefix("vllm:")
        names = _LABELS.get(name)
        if names is None or not 0 <= line.value <= _LARGEST:
            continue
        if name == "kvferry_info":
            version = line.labels.get("version", "")
        series = values.setdefault(name, {})
        labels = tuple(line.labels.get(label, "") for label in names)
        before = series.get(labels, 0.0)
        series[labels] = max(before, line.value) if name in _NEVER_SUMMED else before + line.value
        if len(series) > MOST_SERIES:
            raise ValueError(f"it has more than {MOST_SERIES:,} series of {name}")
    return Reading(at, values, version)


def find_endpoints() -> list[str]:
    """Return the usual addresses on this machine that have kvferry's metrics, kvferry's own first.

    Raises:
        UnreachableError: No address has them. The message names the ports and their answers.
    """
    urls = [f"http://127.0.0.1:{port}" for port in (*OWN_PORTS, VLLM_PORT)]

    def look(url: str) -> str:
        try:
            read(url, partial(fetch, seconds=FIND_SECONDS))
        except UnreachableError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(urls)) as pool:
        found = dict(zip(urls, pool.map(look, urls), strict=True))
    if any(not error for error in found.values()):
        return [url for url, error in found.items() if not error]
    answered = [error for error in found.values() if "cannot be reached" not in error]
    raise UnreachableError(
        f"no kvferry found at 127.0.0.1, ports {OWN_PORTS[0]} to {OWN_PORTS[-1]} and {VLLM_PORT}"
        f"{''.join(f'; {clip(words)}' for words in answered)}. Start an engine with kvferry, or "
        "give its address, such as localhost:8000"
    )


def explain(url: str, request_id: str | None = None, fetch: Fetch = fetch) -> dict[str, Any]:
    """Return the explanation of one request, or the latest requests, as unchecked JSON."""
    target = f"{base_url(url)}/explain"
    if request_id is not None:
        target += f"/{quote(request_id, safe='', errors='replace')}"
    try:
        return read_json(fetch(target))
    except AnswerError as error:
        if error.code == HTTPStatus.NOT_FOUND and not error.is_ours:
            raise NoExplanationsError(
                f"{target} does not exist: only kvferry's own endpoint explains requests. vLLM's "
                "log has its address, unless metrics_port is none or kvferry is idle"
            ) from error
        raise
    except ValueError as error:
        raise malformed_explanation(target, error) from error


def malformed_explanation(target: str, error: ValueError) -> UnreachableError:
    """Return the error for an answer that is not an explanation."""
    return UnreachableError(f"{target} answered, but with no explanation: {clip(error)}")
