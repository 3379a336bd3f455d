"""A door: an HTTP server in threads of the test, that stands before another and passes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Passing(BaseHTTPRequestHandler):
    """One connection, which says nothing to the test's output and minds nobody who has gone."""

    protocol_version = "HTTP/1.1"

    def read_body(self) -> bytes:
        """What was sent with the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # whoever asked has gone
            super().handle()


class Door(ThreadingHTTPServer):
    """Closed, it hangs up on who is still there: clients keep lines open as long as they like."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: type[Passing]) -> None:
        self._lines: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._lines.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._lines.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for line in list(self._lines):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


def open_door(handler: type[Passing]) -> Door:
    """It stands open until ``shutdown`` and ``server_close``, or the end of the process."""
    server = Door(handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


@contextmanager
def standing_open(handler: type[Passing]) -> Iterator[int]:
    """Its port; it is closed behind the test."""
    server = open_door(handler)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
