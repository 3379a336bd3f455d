"""One HTTP request read, one reply written: bytes to words and back. Nothing here waits."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote, urlsplit

LOOPBACK = "127.0.0.1"
MOST_HEAD_BYTES = 16 << 10
MOST_BODY_BYTES = 8 << 20
"""Of an order: a million token ids."""

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) ([!-~]+) HTTP/1\.[0-9]")
_LENGTH = re.compile(r"[0-9]{1,10}")
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


@dataclass(frozen=True, eq=False)
class HttpOrder:
    """A POST from somebody who may: never the same as another."""

    path: tuple[str, ...]
    body: bytes


class Orders(Protocol):
    """Who takes orders. Without one, a server takes none."""

    def refuse(self, path: tuple[str, ...], token: str | None, *, is_local: bool) -> Reply | None:
        """Why this client may not order that; None if it may. Before its order is even read."""

    def carry_out(self, path: tuple[str, ...], body: bytes) -> Reply:
        """Do it, and say what was done."""

    def close(self) -> None:
        """Nothing more is done: who waits for it is told."""


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


def read_request(
    received: bytes | bytearray,
    *,
    local_only: bool,
    orders: Orders | None = None,
    is_local: bool = False,
) -> HttpRequest | HttpOrder | Reply | None:
    """What a client asks for, or why it gets nothing; None while it has not said all.

    ``local_only`` refuses whoever calls us by another name than a loopback one: a page from
    elsewhere whose name was pointed here (DNS rebinding). ``is_local`` clients are on this machine.
    """
    end = _HEAD_END.search(received[:MOST_HEAD_BYTES])
    if end is None:
        if len(received) < MOST_HEAD_BYTES:
            return None
        return _refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    first, *headers = received[: end.start()].decode("latin-1").replace("\r\n", "\n").split("\n")
    line, fields = _REQUEST_LINE.fullmatch(first), _fields(headers)
    if line is None or fields is None or len(fields.get("host", ())) > 1:
        return _refused(HTTPStatus.BAD_REQUEST)
    if line[1] not in ("GET", "HEAD") and (line[1] != "POST" or orders is None):
        return _refused(HTTPStatus.NOT_IMPLEMENTED)
    try:
        target = urlsplit(line[2])
    except ValueError:
        return _refused(HTTPStatus.BAD_REQUEST)
    host = _HOST.fullmatch(target.netloc or fields.get("host", [LOOPBACK])[0])
    if local_only and not (host and is_loopback(host[1] or host[2])):
        return Reply.refusal(HTTPStatus.FORBIDDEN, "ask for this by a loopback name")
    parts = tuple(unquote(part) for part in target.path.split("/") if part)
    if line[1] == "POST" and orders is not None:
        refused = orders.refuse(parts, _token(fields), is_local=is_local)
        return refused or _order(parts, fields, received, end.end())
    return HttpRequest(parts, wants_body=line[1] == "GET")


def _order(
    path: tuple[str, ...], fields: dict[str, list[str]], received: bytes | bytearray, start: int
) -> HttpOrder | Reply | None:
    lengths = fields.get("content-length", [])
    if "transfer-encoding" in fields or len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
        return _refused(HTTPStatus.LENGTH_REQUIRED)
    length = int(lengths[0])
    if length > MOST_BODY_BYTES:
        return _refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    if len(received) < start + length:
        return None
    return HttpOrder(path, bytes(received[start : start + length]))


def _token(fields: dict[str, list[str]]) -> str | None:
    said = fields.get("authorization", [])
    scheme, _, token = said[0].partition(" ") if len(said) == 1 else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else None


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # as a socket for both kinds names IPv4
    return address.is_loopback if mapped is None else bool(mapped.is_loopback)


def _fields(headers: list[str]) -> dict[str, list[str]] | None:
    """What the headers say, by their names in small letters; None where a line is no header."""
    found = [_HEADER.fullmatch(line) for line in headers]
    if not all(found):
        return None
    fields: dict[str, list[str]] = {}
    for match in found:
        if match:
            fields.setdefault(match[1].lower(), []).append(match[2])
    return fields


def _refused(status: HTTPStatus) -> Reply:
    return Reply.refusal(status, status.phrase)
