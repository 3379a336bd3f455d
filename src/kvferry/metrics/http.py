"""A small read-only HTTP server: GET and HEAD, a table of answers, nothing that changes state."""

from __future__ import annotations

import ipaddress
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from kvferry.errors import ConfigError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_PATIENCE_SECONDS = 5.0

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


@dataclass(frozen=True)
class Reply:
    """What to answer: a status, a content type and a body."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK

    @classmethod
    def json(cls, data: object, status: HTTPStatus = HTTPStatus.OK) -> Reply:
        return cls(json.dumps(data).encode(), "application/json", status)

    @classmethod
    def refusal(cls, status: HTTPStatus, words: str) -> Reply:
        return cls(f"{words}\n".encode(), status=status)


Answer = Callable[[tuple[str, ...]], Reply | None]
"""From the parts of a path (``/explain/a%2Fb`` is ``("explain", "a/b")``); None: no such page."""


class HttpServer:
    """Owns a listening socket and the thread that serves it; ends in close.

    Bound to loopback it answers only those who call it by a loopback name: a page from elsewhere
    whose name was pointed here (DNS rebinding) gets nothing.
    """

    def __init__(self, answer: Answer, *, host: str = LOOPBACK, port: int = 0) -> None:
        handler = type(
            "Handler", (_Handler,), {"answer": staticmethod(answer), "local": _is_loopback(host)}
        )
        try:
            self._server = _Server((host, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error}; give another port, or 0 for a free one"
            ) from error
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name=f"kvferry-http-{self.port}",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it can be reached from this machine."""
        name = LOOPBACK if self.host in ("", "0.0.0.0", "::") else self.host
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}/"

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request from %s broke off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_SECONDS
    server_version = "kvferry"
    sys_version = ""
    answer: Answer
    local: bool

    def do_GET(self) -> None:
        self._send(self._reply())

    def do_HEAD(self) -> None:
        self._send(self._reply(), with_body=False)

    def _reply(self) -> Reply:
        if self.local and not _is_loopback(_host_of(self.headers.get("Host", LOOPBACK))):
            return Reply.refusal(HTTPStatus.FORBIDDEN, "ask for this by a loopback name")
        path = urlsplit(self.path).path
        parts = tuple(unquote(part) for part in path.split("/") if part)
        try:
            reply = self.answer(parts)
        except Exception as error:  # the thread that asked must get an answer
            log.warning("%s could not be answered", path, exc_info=True)
            return Reply.refusal(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}"
            )
        return reply or Reply.refusal(HTTPStatus.NOT_FOUND, "there is no such page here")

    def _send(self, reply: Reply, *, with_body: bool = True) -> None:
        self.send_response(reply.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _host_of(header: str) -> str:
    return urlsplit(f"//{header}").hostname or ""


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
