"""One client of our HTTP server, from its first byte to our last. Nothing here waits."""

from __future__ import annotations

import socket
from contextlib import suppress
from enum import Enum

from kvferry.metrics.http_messages import is_loopback

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
