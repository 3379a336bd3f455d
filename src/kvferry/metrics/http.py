"""A small HTTP server: GET and HEAD, a table of answers that change nothing, and orders if wanted.

It lives in an engine's process, so it takes little of it whoever comes: one thread for all
connections, a few for answers, a bound on connections, a deadline for each of them, and a rest
after every bit of work, because the interpreter is the engine's.
"""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

from kvferry.errors import ConfigError
from kvferry.metrics.http_connection import Connection, ConnectionState
from kvferry.metrics.http_messages import (
    LOOPBACK,
    HttpOrder,
    HttpRequest,
    Orders,
    Reply,
    is_loopback,
    read_request,
)

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
