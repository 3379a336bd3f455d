"""One GET or POST, with a bound on all of it: the time of the whole reply, its bytes, its words."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from urllib.parse import SplitResult, urlsplit

from kvferry.errors import InputError, UnreachableError
from kvferry.metrics import DEFAULT_PORT
from kvferry.watch.words import said

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
