"""One look at a metrics endpoint: fetched, parsed, and cut down to what kvferry counts."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, urlsplit

from kvferry.errors import InputError, UnreachableError
from kvferry.telemetry import DEFAULT_PORT
from kvferry.telemetry.catalog import (
    DURABLE_LAG,
    LOAD_RATE,
    MEMORY_CURVE,
    PREFILL_RATE,
    PREFIX,
    SLOT_BYTES,
    Metric,
    catalog,
)
from kvferry.tools.top.told import read_json
from kvferry.tools.words import said

MOST_LINES = 100_000
MOST_LINE = 16 << 10
LARGEST = float(1 << 63)

_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{(.*)\})?"
    r"[ \t]*(?<=[\s}])([^\s{}]+)(?:[ \t]+-?[0-9]+)?[ \t]*"
)
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", '"': '"', "\\": "\\"}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NOT_NUMBERS = {"nan", "inf", "+inf", "-inf"}


class Line(NamedTuple):
    """One value of one series, under the name it has there. None: it says that it has none."""

    name: str
    labels: dict[str, str]
    value: float | None


def lines(text: str) -> Iterator[Line]:
    """Every line about us, buckets left out; ValueError says what is wrong with one."""
    if text and not text.endswith("\n"):
        raise ValueError("it ends in the middle of a line")
    count = 0
    for line in text.split("\n"):
        if PREFIX not in line or line.startswith("#"):
            continue
        count += 1
        if count > MOST_LINES:
            raise ValueError(f"it has more than {MOST_LINES:,} lines about kvferry")
        if len(line) > MOST_LINE:
            raise ValueError(f"it has a line of {len(line):,} characters: {said(line, 40)}")
        if "_bucket{" not in line:
            yield _read(line)


def _read(line: str) -> Line:
    found = _SAMPLE.fullmatch(line.strip(" \t\r"))
    if found is None:
        raise ValueError(f"{said(line, 80)!r} is no line of it")
    name, labels, value = found.groups()
    return Line(name, _labels(labels or ""), _number(value))


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None or found[1] in labels:
            raise ValueError(f"{said(text, 80)!r} are no labels")
        labels[found[1]] = _ESCAPE.sub(lambda e: _ESCAPED.get(e[1], e[0]), found[2])
        at = found.end()
    return labels


def _number(text: str) -> float | None:
    """None for what no count or size of ours can be: not a number, endless, below zero, huge."""
    if text.lower() in _NOT_NUMBERS:
        return None
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{said(text, 40)!r} is no number")
    value = float(text)
    return value if 0 <= value <= LARGEST else None


# ------------------------------------------------------------------------------------------------
# One GET or POST, with a bound on all of it: the time of the whole reply, its bytes, its words.

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
DEADLINE_SECONDS = 5.0
POST_SECONDS = 15.0
"""An order waits for the engine to come by; the endpoint says so before our patience ends."""
MOST_BYTES = 32 << 20
_MOST_WORDS = 500

_ADDRESS = re.compile(r"[!-~]+")

Fetch = Callable[[str], bytes]


class AnswerError(UnreachableError):
    """Somebody answered, and refused. ``is_ours`` says that it was one of kvferry's endpoints."""

    def __init__(self, url: str, code: int, detail: str) -> None:
        try:
            words, self.is_ours = json.loads(detail)["error"], True
        except (ValueError, KeyError, TypeError, RecursionError):
            words, self.is_ours = detail, False
        self.code = code
        super().__init__(f"{url} answered {code}: {said(words)}")


def base_url(url: str) -> str:
    """An endpoint's address without ``/metrics``; ``host:port`` alone is enough."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets without an end, a port that is none
        known = False
    if not known or not _ADDRESS.fullmatch(full):
        raise InputError(f"{said(url)!r} is no address; say it as {DEFAULT_URL}")
    return full.rstrip("/").removesuffix("/metrics")


def fetch(url: str) -> bytes:
    """The body behind an http address; UnreachableError says what to do where there is none.

    It goes straight there: by no proxy, and nowhere else if the answer points elsewhere.
    """
    return _exchange(url, "GET", DEADLINE_SECONDS)


def post(url: str, data: object, token: str) -> bytes:
    """The answer to an order; the token goes nowhere else."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return _exchange(url, "POST", POST_SECONDS, json.dumps(data).encode(), headers)


def _exchange(
    url: str,
    method: str,
    seconds: float,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> bytes:
    with _Alarm(seconds) as alarm:
        try:
            connection = _connect(urlsplit(url), alarm)
            try:
                return _answer(connection, url, alarm, method, body, headers or {})
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, UnreachableError) and not alarm.rang:
                raise
            raise UnreachableError(_why_not(url, error, alarm, seconds)) from error


def _answer(
    connection: http.client.HTTPConnection,
    url: str,
    alarm: _Alarm,
    method: str,
    body: bytes | None,
    headers: dict[str, str],
) -> bytes:
    parts = urlsplit(url)
    target = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    connection.request(method, target, body, {"Accept": "text/plain", **headers})
    with connection.getresponse() as reply:
        if reply.status != HTTPStatus.OK:
            detail = reply.read(_MOST_WORDS).decode(errors="replace").strip()
            raise AnswerError(url, reply.status, detail or _points_to(reply))
        read = reply.read(MOST_BYTES + 1)
        if len(read) > MOST_BYTES:
            raise UnreachableError(f"{url} answered more than {MOST_BYTES >> 20} MiB; not ours")
        if alarm.rang or reply.length:
            raise http.client.IncompleteRead(read, reply.length)
        return read


def _connect(parts: SplitResult, alarm: _Alarm) -> http.client.HTTPConnection:
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    line = socket.create_connection((host, port), timeout=DEADLINE_SECONDS)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        secure = context.wrap_socket(line, server_hostname=host, do_handshake_on_connect=False)
        alarm.watch(secure)
        try:
            secure.do_handshake()
        except BaseException:
            secure.close()
            raise
        line = secure
    else:
        alarm.watch(line)
    connection = http.client.HTTPConnection(parts.netloc.rpartition("@")[2])  # it names the host
    connection.sock = line
    return connection


def _points_to(reply: http.client.HTTPResponse) -> str:
    where = reply.getheader("Location")
    return f"it points to {where}; ask there" if where else reply.reason


def _why_not(url: str, error: Exception, alarm: _Alarm, seconds: float) -> str:
    if alarm.rang or isinstance(error, TimeoutError):
        return f"{url} did not answer within {seconds:g} s"
    if isinstance(error, http.client.IncompleteRead):
        return f"{url} cannot be read: its answer was cut short"
    reason = said(error) or type(error).__name__
    return (
        f"{url} cannot be reached: {reason}. Is the engine running, with metrics_port set or "
        "ferry.serve_metrics() called?"
    )


class _Alarm:
    """Cuts a connection when its time is up, whatever it is doing.

    A socket's own timeout is for each read: an endpoint that drips would never meet it.
    """

    def __init__(self, seconds: float) -> None:
        self.rang = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True

    def watch(self, line: socket.socket) -> None:
        self._socket = line
        if self.rang:
            self._cut()

    def _ring(self) -> None:
        self.rang = True
        self._cut()

    def _cut(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # closed by now
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def __enter__(self) -> _Alarm:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._timer.join()


# ------------------------------------------------------------------------------------------------
# One look at a metrics endpoint: fetched, parsed, and cut down to what kvferry counts.

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
