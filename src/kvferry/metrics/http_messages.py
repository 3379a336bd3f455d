"""One HTTP request read, one reply written: bytes to words and back. Nothing here waits."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

LOOPBACK = "127.0.0.1"
MOST_HEAD_BYTES = 16 << 10

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) ([!-~]+) HTTP/1\.[0-9]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")

_HEADERS = {
    "Server": "kvferry",
    "Connection": "close",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


@dataclass(frozen=True)
class HttpRequest:
    """The parts of a path (``/explain/a%2Fb`` is ``("explain", "a/b")``), and GET or HEAD."""

    path: tuple[str, ...]
    wants_body: bool = True


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
        return cls(f"{words}\n".encode(errors="replace"), status=status)

    def encoded(self, *, with_body: bool = True) -> bytes:
        """As it goes over the line."""
        head = [f"HTTP/1.0 {self.status.value} {self.status.phrase}"]
        head += [f"{name}: {value}" for name, value in _HEADERS.items()]
        head += [
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {self.kind}",
            f"Content-Length: {len(self.body)}",
        ]
        return "\r\n".join([*head, "", ""]).encode() + (self.body if with_body else b"")


def read_request(received: bytes, *, local_only: bool) -> HttpRequest | Reply | None:
    """What a client asks for, or why it gets nothing; None while it has not said all.

    ``local_only`` refuses whoever calls us by another name than a loopback one: a page from
    elsewhere whose name was pointed here (DNS rebinding).
    """
    end = _HEAD_END.search(received[:MOST_HEAD_BYTES])
    if end is None:
        if len(received) < MOST_HEAD_BYTES:
            return None
        return _refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    first, *headers = received[: end.start()].decode("latin-1").replace("\r\n", "\n").split("\n")
    line, hosts = _REQUEST_LINE.fullmatch(first), _hosts(headers)
    if line is None or hosts is None or len(hosts) > 1:
        return _refused(HTTPStatus.BAD_REQUEST)
    if line[1] not in ("GET", "HEAD"):
        return _refused(HTTPStatus.NOT_IMPLEMENTED)
    try:
        target = urlsplit(line[2])
    except ValueError:
        return _refused(HTTPStatus.BAD_REQUEST)
    host = _HOST.fullmatch(target.netloc or (hosts[0] if hosts else LOOPBACK))
    if local_only and not (host and is_loopback(host[1] or host[2])):
        return Reply.refusal(HTTPStatus.FORBIDDEN, "ask for this by a loopback name")
    parts = tuple(unquote(part) for part in target.path.split("/") if part)
    return HttpRequest(parts, wants_body=line[1] == "GET")


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hosts(headers: list[str]) -> list[str] | None:
    """What the headers named Host say; None where a line is no header."""
    found = [_HEADER.fullmatch(line) for line in headers]
    if not all(found):
        return None
    return [match[2] for match in found if match and match[1].lower() == "host"]


def _refused(status: HTTPStatus) -> Reply:
    return Reply.refusal(status, status.phrase)
