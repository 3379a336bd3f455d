"""An endpoint that means no good, or is broken: it says any bytes, at any pace, and hangs up."""

from __future__ import annotations

import socket
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
    """Owns a listening socket and a thread for each connection; ends in close.

    ``say`` gets the path that was asked for.
    """

    def __init__(self, say: Callable[[str], Said]) -> None:
        self.say = say
        self.paths: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self._closing.is_set():
                connection.close()
                return
            thread = threading.Thread(target=self._talk, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(10)
            path = connection.recv(65536).decode("latin-1").split(" ")[1]
            self.paths.append(path)
            for piece in self.say(path):
                if self._closing.is_set():
                    return
                connection.sendall(piece)

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError), socket.create_connection(self._listener.getsockname(), timeout=5):
            pass
        self._listener.close()
        for thread in self._threads:
            thread.join()
