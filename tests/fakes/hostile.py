"""An endpoint that means no good, or is broken: it says any bytes, at any pace, and hangs up."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

Said = Iterable[bytes]
"""What is said after a request, piece by piece; a pause is the generator's own."""


def reply(body: bytes | str, *, status: str = "200 OK", length: int | None = None) -> bytes:
    """A well-formed reply, but for what the test wants otherwise."""
    body = body.encode() if isinstance(body, str) else body
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode("latin-1") + body


def drip(data: bytes, pause: float = 0.05, seconds: float = 6.0) -> Said:
    """A byte at a time, over and over, for longer than anybody should listen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for byte in data:
            yield bytes([byte])
            time.sleep(pause)
            if time.monotonic() >= end:
                return


class HostileEndpoint:
    """Owns a server with a thread for each connection. ``say`` gets the path that was asked for."""

    def __init__(self, say: Callable[[str], Said]) -> None:
        self.say = say
        self.is_closing = False
        endpoint = self

        class Talk(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):
                    self.request.settimeout(10)
                    path = self.request.recv(65536).decode("latin-1").split(" ")[1]
                    for piece in endpoint.say(path):
                        if endpoint.is_closing:
                            return
                        self.request.sendall(piece)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever).start()

    def close(self) -> None:
        self.is_closing = True
        self._server.shutdown()
        self._server.server_close()  # waits for its threads
