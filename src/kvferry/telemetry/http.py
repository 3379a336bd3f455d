"""A small HTTP server: read-only GET and HEAD, and POST if a handler for it is given.

It runs in an engine's process, so its load is bounded however many clients connect. One thread
serves all connections, a few threads compute replies, and each connection has a deadline. Every
thread sleeps after its work, because the engine needs the interpreter.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from email.utils import formatdate
from errno import EADDRINUSE
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote, urlsplit

from kvferry.errors import ConfigError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 8 << 20
"""Most bytes of a POST body. A million token ids fit."""

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
    """The decoded path (``/explain/a%2Fb`` is ``("explain", "a/b")``) and the body of a POST."""

    path: tuple[str, ...]
    wants_body: bool = True
    posted: bytes | None = None


class PostHandler(Protocol):
    """Handles POST requests. Without a handler, a server refuses every POST."""

    def refuse(self, path: tuple[str, ...], token: str | None) -> Reply | None:
        """Return an error reply if the client is not allowed, else None. Called before the body."""

    def handle(self, path: tuple[str, ...], body: bytes) -> Reply: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Reply:
    """An HTTP reply: status, content type and body."""

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
        """Return the bytes to send: status line, headers and body."""
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
    post_handler: PostHandler | None = None,
) -> HttpRequest | Reply | None:
    """Return the request in the received bytes, or an error reply, or None while bytes are missing.

    ``local_only`` refuses a request whose host is not a loopback name. A web page from elsewhere
    can send one if its name was pointed to this machine (DNS rebinding).
    """
    end = _HEAD_END.search(received[:MAX_HEAD_BYTES])
    if end is None:
        is_long = len(received) >= MAX_HEAD_BYTES
        return _refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) if is_long else None
    first, *headers = received[: end.start()].decode("latin-1").replace("\r\n", "\n").split("\n")
    line, fields = _REQUEST_LINE.fullmatch(first), _fields(headers)
    if line is None or fields is None or len(fields.get("host", ())) > 1:
        return _refused(HTTPStatus.BAD_REQUEST)
    if line[1] not in ("GET", "HEAD") and (line[1] != "POST" or post_handler is None):
        return _refused(HTTPStatus.NOT_IMPLEMENTED)
    try:
        target = urlsplit(line[2])
    except ValueError:
        return _refused(HTTPStatus.BAD_REQUEST)
    host = _HOST.fullmatch(target.netloc or fields.get("host", [LOOPBACK])[0])
    if local_only and not (host and is_loopback(host[1] or host[2])):
        return Reply.refusal(HTTPStatus.FORBIDDEN, "ask for this by a loopback name")
    parts = tuple(unquote(part) for part in target.path.split("/") if part)
    if line[1] != "POST" or post_handler is None:
        return HttpRequest(parts, wants_body=line[1] == "GET")
    refused = post_handler.refuse(parts, _token(fields))
    return refused or _posted_request(parts, fields, bytes(received[end.end() :]))


def _posted_request(
    path: tuple[str, ...], fields: dict[str, list[str]], body: bytes
) -> HttpRequest | Reply | None:
    lengths = fields.get("content-length", [])
    if "transfer-encoding" in fields or len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
        return _refused(HTTPStatus.LENGTH_REQUIRED)
    length = int(lengths[0])
    if length > MAX_BODY_BYTES:
        return _refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return HttpRequest(path, posted=body[:length]) if len(body) >= length else None


def _token(fields: dict[str, list[str]]) -> str | None:
    given = fields.get("authorization", [])
    scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else None


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # IPv4, as a dual-stack socket names it
    return bool((mapped or address).is_loopback)


def _fields(headers: list[str]) -> dict[str, list[str]] | None:
    """Return header values by lower-case name, or None if a line is not a header."""
    fields: dict[str, list[str]] = {}
    for line in headers:
        match = _HEADER.fullmatch(line)
        if match is None:
            return None
        fields.setdefault(match[1].lower(), []).append(match[2])
    return fields


def _refused(status: HTTPStatus) -> Reply:
    return Reply.refusal(status, status.phrase)


MAX_CONNECTIONS = 64
MAX_PORT = 65535
_NUM_REPLY_THREADS = 4
_BACKLOG = 128
_CHUNK = 64 << 10
_PATIENCE_SECONDS = 5.0
_LEAVING_SECONDS = 1.0
_SHORTAGE_SECONDS = 1.0
_LAST_SECONDS = 0.25
"""Seconds that ``close`` leaves for replies that are being computed or sent."""

_SLEEP_RATIO = 5
"""A thread sleeps this many times its processor time. The connections' thread saves up sleeps
shorter than ``_MIN_SLEEP_SECONDS``."""
_MIN_SLEEP_SECONDS = 0.002

Answer = Callable[[tuple[str, ...]], Reply | None]
"""Maps the parts of a path to a reply. None means that there is no such page."""


class HttpServer:
    """Owns a listening socket, its connections, and the threads that serve them.

    At MAX_CONNECTIONS, a new connection replaces the one that has been sending its request or
    leaving for longest. If all others wait for replies, the new one is closed. Bound to loopback,
    the server answers only requests whose host is a loopback name.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        last_port: int = 0,
        patience: float = _PATIENCE_SECONDS,
        post_handler: PostHandler | None = None,
    ) -> None:
        """Listen on ``port``, or on the next free port up to ``last_port``. 0 takes any free port.

        ``patience`` is the seconds to receive a request, and again to send its reply.
        ``post_handler`` handles POST requests, one at a time.
        """
        self.host = host.removeprefix("[").removesuffix("]")
        self._listener = _listen(self.host, port, last_port)
        self.port = int(self._listener.getsockname()[1])
        self._answer = answer
        self._post_handler = post_handler
        self._patience = patience
        self._local_only = is_loopback(self.host)
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._idle: dict[asyncio.StreamWriter, None] = {}
        """Connections that receive a request or wait for their client to leave, oldest first."""
        self._throttled_at = 0.0
        self._is_closing = False
        name = f"kvferry-http-{self.port}"
        self._pool = ThreadPoolExecutor(_NUM_REPLY_THREADS, name)
        self._posting = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The server's address on this machine."""
        name = LOOPBACK if self.host in ("", "0.0.0.0", "::") else self.host
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}/"

    def close(self) -> None:
        """End every connection and stop listening. Safe to call twice."""
        if self._is_closing:
            return
        self._is_closing = True
        self._pool.shutdown(cancel_futures=True)  # drops replies not yet begun
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    # -- connections, all on one thread -------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        self._start_accepting()
        await self._end.wait()
        self._loop.remove_reader(self._listener)
        await asyncio.sleep(0)  # tasks of new connections start
        last = [task for each, task in self._connections.items() if each not in self._idle]
        if last:
            await asyncio.wait(last, timeout=_LAST_SECONDS)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # asyncio closes sockets in the loop's next iteration

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client has disconnected
        except OSError as error:  # no file descriptor is left
            log.warning("port %d lets no client in for now: %s", self.port, error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_SHORTAGE_SECONDS, self._start_accepting)
            return
        client.setblocking(False)
        task = self._loop.create_task(self._serve_connection(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_accepting(self) -> None:
        if not self._end.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _throttle(self) -> None:
        """Sleep in proportion to the work done, so that the engine gets most of the time."""
        seconds = _SLEEP_RATIO * (time.thread_time() - self._throttled_at)
        if seconds >= _MIN_SLEEP_SECONDS:
            time.sleep(seconds)
            self._throttled_at = time.thread_time()

    async def _serve_connection(self, client: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=client)
        except OSError:
            client.close()
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop_connection(next(iter(self._idle), writer))
        if writer.transport.is_closing():
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections[writer] = task
        self._idle[writer] = None
        patience = self._patience
        try:
            request = await asyncio.wait_for(self._read(reader), patience)
            self._idle.pop(writer, None)
            reply = request if isinstance(request, bytes) else await self._reply_to(request)
            writer.transport.set_write_buffer_limits(0)  # drain() then waits for the last byte
            writer.write(reply)
            await asyncio.wait_for(writer.drain(), patience)
            # Closing with unread input would reset the connection and could lose the reply.
            self._idle[writer] = None
            writer.write_eof()
            await asyncio.wait_for(self._drain(reader), _LEAVING_SECONDS)
        except (OSError, asyncio.TimeoutError):
            pass  # the client has disconnected or is too slow
        finally:
            self._drop_connection(writer)

    def _drop_connection(self, writer: asyncio.StreamWriter) -> None:
        self._connections.pop(writer, None)
        self._idle.pop(writer, None)
        writer.transport.abort()

    async def _drain(self, reader: asyncio.StreamReader) -> None:
        while await reader.read(_CHUNK):
            self._throttle()

    async def _read(self, reader: asyncio.StreamReader) -> bytes | HttpRequest:
        """Read a request. Returns it, or an encoded error reply."""
        received = bytearray()
        while True:
            chunk = await reader.read(_CHUNK)
            if not chunk:
                raise ConnectionResetError("the client left before it had asked")
            received += chunk
            request = read_request(
                received, local_only=self._local_only, post_handler=self._post_handler
            )
            self._throttle()
            if request is not None:
                return request.encoded() if isinstance(request, Reply) else request

    # -- replies, on other threads --------------------------------------------------------------

    async def _reply_to(self, request: HttpRequest) -> bytes:
        """Compute a reply on another thread. POST requests take turns, to occupy one thread."""
        async with nullcontext() if request.posted is None else self._posting:
            return await self._loop.run_in_executor(self._pool, self._compute_reply, request)

    def _compute_reply(self, request: HttpRequest) -> bytes:
        """Return the encoded reply. An exception becomes a reply with status 500."""
        began = time.thread_time()
        try:
            if request.posted is not None and self._post_handler is not None:
                reply: Reply | None = self._post_handler.handle(request.path, request.posted)
            else:
                reply = self._answer(request.path)
        except Exception as error:
            log.warning("/%s could not be answered", "/".join(request.path), exc_info=True)
            words = f"{type(error).__name__}: {error}"
            reply = Reply.refusal(HTTPStatus.INTERNAL_SERVER_ERROR, words)
        reply = reply or Reply.refusal(HTTPStatus.NOT_FOUND, "there is no such page here")
        encoded = reply.encoded(with_body=request.wants_body)
        time.sleep(_SLEEP_RATIO * (time.thread_time() - began))
        return encoded


def _listen(host: str, port: int, last_port: int) -> socket.socket:
    listener = None
    try:
        if not 0 <= port <= MAX_PORT:  # getaddrinfo would cut it to 16 bits
            raise ValueError(f"a port is at most {MAX_PORT}")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":  # every address, IPv4 too
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        return listener
    except (OSError, ValueError, TypeError) as error:
        if listener is not None:
            listener.close()
        if isinstance(error, OSError) and error.errno == EADDRINUSE and port < last_port:
            return _listen(host, port + 1, last_port)
        name = host if host.isascii() and host.isprintable() else ascii(host)
        raise ConfigError(
            f"cannot listen on {f'[{name}]' if ':' in name else name}:{port}: {error}; "
            "give another port, or 0 for a free one"
        ) from error
