"""A small HTTP server: GET and HEAD, a table of answers that change nothing, and orders if wanted.

It lives in an engine's process, so it takes little of it whoever comes: one thread for all
connections, a few for answers, a bound on connections, a deadline for each of them, and a rest
after every bit of work, because the interpreter is the engine's.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import queue
import re
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from enum import Enum
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote, urlsplit

from kvferry.errors import ConfigError

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


# ------------------------------------------------------------------------------------------------
# One client of our HTTP server, from its first byte to our last. Nothing here waits.

_CHUNK = 64 << 10


class ConnectionState(Enum):
    """What a connection waits for."""

    READING = "reading"  # the rest of its request
    ANSWERING = "answering"  # an answer that is being worked out
    WRITING = "writing"  # room to write more of the reply
    LEAVING = "leaving"  # the client to close, which has been told everything


class Connection:
    """Owns one client's socket and what was read from it or is still to be written.

    ``deadline`` is for the whole of the state it is in, however slowly bytes come or go. Every
    method raises OSError where the client has gone.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.state = ConnectionState.READING
        self.deadline = deadline
        self._received = bytearray()
        self._unsent = memoryview(b"")

    @property
    def is_local(self) -> bool:
        """Whether the client is on this machine."""
        return is_loopback(str(self.socket.getpeername()[0]))

    def receive(self) -> bytearray:
        """All that was said so far."""
        with suppress(BlockingIOError):
            chunk = self.socket.recv(_CHUNK)
            if not chunk:
                raise ConnectionResetError("the client left before it had asked")
            self._received += chunk
        return self._received

    def answering(self) -> None:
        """The request is whole."""
        self.state, self._received = ConnectionState.ANSWERING, bytearray()

    def reply(self, data: bytes, deadline: float) -> None:
        """Begin to write this."""
        self.state, self.deadline, self._unsent = (
            ConnectionState.WRITING,
            deadline,
            memoryview(data),
        )

    def send(self) -> bool:
        """Write what there is room for; whether that was the last of it."""
        with suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent[:_CHUNK]) :]
        return not self._unsent

    def leave(self, deadline: float) -> None:
        """All is written. Closed at once, unread bytes of the client would take our reply along."""
        self.state, self.deadline = ConnectionState.LEAVING, deadline
        self.socket.shutdown(socket.SHUT_WR)

    def has_left(self) -> bool:
        """Whether the client has closed its end; what else it says is of no interest."""
        try:
            return not self.socket.recv(_CHUNK)
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.socket.close()


# ------------------------------------------------------------------------------------------------
# A small HTTP server: GET and HEAD, a table of answers that change nothing, and orders if wanted.
#
# It lives in an engine's process, so it takes little of it whoever comes: one thread for all
# connections, a few for answers, a bound on connections, a deadline for each of them, and a rest
# after every bit of work, because the interpreter is the engine's.

__all__ = ["LOOPBACK", "MOST_CONNECTIONS", "Answer", "HttpServer", "Reply"]

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
MOST_PORT = 65535
_MOST_ANSWERING = 4
_MOST_ORDERS = 8
_BACKLOG = 128
_PATIENCE_SECONDS = 5.0
_LEAVING_SECONDS = 1.0
_NO_DESCRIPTOR_SECONDS = 0.5
_QUIET_SECONDS = 60.0
_GRACE_SECONDS = 0.25
"""So long a client may take before its place is given to another: requests come in one piece."""

_IDLE_SECONDS = 60.0
_REST = 5
"""Times as long as it has worked the connections' thread rests, once that is worth a sleep."""

_LEAST_REST_SECONDS = 0.002

Answer = Callable[[tuple[str, ...]], Reply | None]
"""From the parts of a path (``/explain/a%2Fb`` is ``("explain", "a/b")``); None: no such page."""


class HttpServer:
    """Owns a listening socket, its connections, and the threads that serve them; ends in close.

    At most MOST_CONNECTIONS at a time: a new one takes the place of the one that has taken longest
    to say what it wants, or waits. Who asks the same at the same time gets the same answer. Bound
    to loopback it answers only those who call it by a loopback name.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        patience: float = _PATIENCE_SECONDS,
        orders: Orders | None = None,
    ) -> None:
        """``patience`` is for a whole request, and again for a whole reply.

        Whoever takes ``orders`` gets what is posted, one at a time, on a thread of its own: one
        that waits for the engine keeps no answer from anybody.
        """
        self.host = host.removeprefix("[").removesuffix("]")
        self._listener = _listen(self.host, port)
        self.port = int(self._listener.getsockname()[1])
        self._answer = answer
        self._orders = orders
        self._ordered: queue.Queue[tuple[HttpOrder, Connection] | None] = queue.Queue(_MOST_ORDERS)
        self._patience = patience
        self._local_only = is_loopback(self.host)
        self._selector = selectors.DefaultSelector()
        self._wakes, self._wake = socket.socketpair()
        self._connections: set[Connection] = set()
        self._asked: queue.SimpleQueue[HttpRequest | None] = queue.SimpleQueue()
        self._asking: dict[HttpRequest, list[Connection]] = {}  # that no thread has begun to answer
        self._asking_lock = threading.Lock()
        self._answered: deque[tuple[list[Connection], bytes]] = deque()
        self._accept_at = 0.0  # later than now while descriptors are short
        self._say_again_at = 0.0
        self._worked = 0.0
        self._closing = self._has_answered = False
        self._threads = [self._thread(self._serve, "")] + [
            self._thread(self._work, f"-{number}") for number in range(_MOST_ANSWERING)
        ]
        if orders is not None:
            self._threads.append(self._thread(self._obey, "-orders"))
        for thread in self._threads:
            thread.start()

    def _rouse(self) -> None:
        with suppress(OSError):  # it has ended meanwhile, or has enough to wake up for
            self._wake.send(b"x")

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=f"kvferry-http-{self.port}{name}", daemon=True)

    @property
    def url(self) -> str:
        """Where it can be reached from this machine."""
        name = LOOPBACK if self.host in ("", "0.0.0.0", "::") else self.host
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}/"

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """End every connection and stop listening. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        for _ in range(_MOST_ANSWERING):
            self._asked.put(None)
        if self._orders is not None:
            with suppress(queue.Empty):
                while True:  # what nobody has begun with is not done any more
                    self._ordered.get_nowait()
            self._ordered.put(None)
        serving, *answering = self._threads
        for thread in answering:
            thread.join()
        self._has_answered = True  # and what they said is told before the last connection ends
        self._rouse()
        serving.join()
        self._wake.close()

    # -- answers, on a few threads ------------------------------------------------------------

    def _work(self) -> None:
        while request := self._asked.get():
            with self._asking_lock:  # who asks from now on gets a later answer
                connections = self._asking.pop(request)
            reply = self._reply(request)
            self._answered.append((connections, reply.encoded(with_body=request.wants_body)))
            self._rouse()

    def _obey(self) -> None:
        while ordered := self._ordered.get():
            order, connection = ordered
            reply = self._reply(order)
            self._answered.append(([connection], reply.encoded()))
            self._rouse()

    def _reply(self, request: HttpRequest | HttpOrder) -> Reply:
        try:
            if isinstance(request, HttpOrder):
                assert self._orders is not None
                return self._orders.carry_out(request.path, request.body)
            reply = self._answer(request.path)
        except Exception as error:  # whoever asked must get an answer
            log.warning("/%s could not be answered", "/".join(request.path), exc_info=True)
            words = f"{type(error).__name__}: {error}"
            return Reply.refusal(HTTPStatus.INTERNAL_SERVER_ERROR, words)
        return reply or Reply.refusal(HTTPStatus.NOT_FOUND, "there is no such page here")

    # -- connections, all on one thread -------------------------------------------------------

    def _serve(self) -> None:
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        try:
            while not self._has_answered:
                self._rest()
                now = time.monotonic()  # one for both, or what ends between them waits for long
                self._listen_again(now)
                for key, _ in self._selector.select(self._seconds_left(now)):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wakes:
                        self._deliver()
                    elif key.data in self._connections:  # not dropped since the select
                        self._advance(key.data)
                self._drop_overdue()
            self._deliver()
        finally:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._selector.close()
            self._listener.close()
            self._wakes.close()

    def _rest(self) -> None:
        """However many come, most of the time is the engine's."""
        seconds = _REST * (time.thread_time() - self._worked)
        if seconds >= _LEAST_REST_SECONDS:
            time.sleep(seconds)
            self._worked = time.thread_time()

    def _listen_again(self, now: float) -> None:
        """Listen while there is room and descriptors; else newcomers wait in the backlog."""
        is_open = now >= self._accept_at and self._has_room()
        if is_open != (self._listener in self._selector.get_map()):
            if is_open:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def _has_room(self) -> bool:
        return len(self._connections) < MOST_CONNECTIONS or self._slowest() is not None

    def _slowest(self) -> Connection | None:
        """Whose place a newcomer may take: who was told all, or has had time to ask."""
        leaving = [each for each in self._connections if each.state is ConnectionState.LEAVING]
        if leaving:
            return min(leaving, key=lambda each: each.deadline)
        latest = time.monotonic() + self._patience - _GRACE_SECONDS
        reading = [each for each in self._connections if each.state is ConnectionState.READING]
        slowest = min(reading, key=lambda each: each.deadline, default=None)
        return slowest if slowest is not None and slowest.deadline <= latest else None

    def _seconds_left(self, now: float) -> float:
        ends = [c.deadline for c in self._connections if c.state is not ConnectionState.ANSWERING]
        if self._accept_at > now:
            ends.append(self._accept_at)
        if len(self._connections) >= MOST_CONNECTIONS:
            ends.append(now + _GRACE_SECONDS)  # then somebody's place may be given away
        return max(0.0, min(ends, default=now + _IDLE_SECONDS) - now)

    def _accept(self) -> None:
        """Let one in."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone again
        except OSError as error:  # EMFILE: accept would fail as long as there is no descriptor
            self._accept_at = time.monotonic() + _NO_DESCRIPTOR_SECONDS
            self._say_shortage(error)
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            slowest = self._slowest()
            if slowest is None:
                sock.close()
                return
            self._drop(slowest)
        connection = Connection(sock, time.monotonic() + self._patience)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _say_shortage(self, error: OSError) -> None:
        now = time.monotonic()
        if now >= self._say_again_at:
            self._say_again_at = now + _QUIET_SECONDS
            log.warning("port %d lets nobody in for now: %s", self.port, error)

    def _advance(self, connection: Connection) -> None:
        """Its socket is ready for what it waits for."""
        try:
            if connection.state is ConnectionState.READING:
                self._read(connection)
            elif connection.state is ConnectionState.WRITING:
                self._write(connection)
            elif connection.state is ConnectionState.LEAVING and connection.has_left():
                self._drop(connection)
        except OSError:
            self._drop(connection)

    def _read(self, connection: Connection) -> None:
        orders = self._orders
        asked = read_request(
            connection.receive(),
            local_only=self._local_only,
            orders=orders,
            is_local=orders is not None and connection.is_local,
        )
        if isinstance(asked, HttpOrder):
            asked = self._take_order(asked, connection)
        if isinstance(asked, HttpRequest):
            connection.answering()
            self._selector.unregister(connection.socket)
            with self._asking_lock:
                others = self._asking.setdefault(asked, [])
                others.append(connection)
                if len(others) == 1:
                    self._asked.put(asked)
        elif asked is not None:
            self._selector.unregister(connection.socket)
            self._begin_reply(connection, asked.encoded())

    def _take_order(self, order: HttpOrder, connection: Connection) -> Reply | None:
        """Let it wait for its turn; or say that too many wait."""
        try:
            self._ordered.put_nowait((order, connection))
        except queue.Full:
            words = f"{_MOST_ORDERS} orders wait already; nothing was done, try again later"
            return Reply.refusal(HTTPStatus.SERVICE_UNAVAILABLE, words)
        connection.answering()
        self._selector.unregister(connection.socket)
        return None

    def _deliver(self) -> None:
        """Begin to write what was answered."""
        with suppress(OSError):
            self._wakes.recv(4096)
        while self._answered:
            connections, data = self._answered.popleft()
            for connection in connections:
                try:
                    self._begin_reply(connection, data)
                except OSError:
                    self._drop(connection)

    def _begin_reply(self, connection: Connection, data: bytes) -> None:
        connection.reply(data, time.monotonic() + self._patience)
        self._selector.register(connection.socket, selectors.EVENT_WRITE, connection)
        self._write(connection)

    def _write(self, connection: Connection) -> None:
        if connection.send():
            connection.leave(time.monotonic() + _LEAVING_SECONDS)
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.state is not ConnectionState.ANSWERING and connection.deadline <= now:
                self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        with suppress(KeyError, ValueError):  # not registered while it is being answered
            self._selector.unregister(connection.socket)
        connection.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port <= MOST_PORT:  # the resolver would take it, cut to 16 bits
            raise ValueError(f"a port is at most {MOST_PORT}")
        return _bound(host, port)
    except (OSError, ValueError, TypeError) as error:
        name = host if host.isascii() and host.isprintable() else ascii(host)
        raise ConfigError(
            f"cannot listen on {f'[{name}]' if ':' in name else name}:{port}: {error}; "
            "give another port, or 0 for a free one"
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":  # every address, the old ones too
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
