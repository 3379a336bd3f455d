"""Frames over a socket, sent and taken without ever waiting and without letting go of the GIL.

A call that releases the GIL gets it back only when the thread that took it gives it up: 5 ms beside
a thread that computes. Sending a few hundred bytes takes 2 µs, so these calls keep it (``PyDLL``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import threading
from collections import deque
from contextlib import suppress

from kvferry.errors import IntegrityError
from kvferry.tiers.disk.messages import HEAD, FrameKind

_CHUNK = 256 << 10
_MOST_BODY = 64 << 20
_DONTWAIT, _NOSIGNAL = 0x40, 0x4000

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.send.restype = ctypes.c_ssize_t
_libc.recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.recv.restype = ctypes.c_ssize_t

Frame = tuple[FrameKind, bytes]


class Channel:
    """One end of the line. Owns the socket. Any thread may send; one thread waits and receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._sock = sock
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # guards what is below
        self._out: deque[bytes] = deque()
        self._is_closed = False
        self._buffer = ctypes.create_string_buffer(_CHUNK)
        self._in = bytearray()
        self.is_ended = False
        """The other end is gone: nothing will come any more."""

    def send(self, data: bytes) -> None:
        """Send a frame, now or when there is room. To an end that is gone it goes nowhere."""
        with self._lock:
            if self._is_closed or self.is_ended:
                return
            self._out.append(data)
            if len(self._out) == 1:
                self._flush()
            if self._out:
                os.eventfd_write(self._wake, 1)  # whoever waits must wait for room too

    def wake(self) -> None:
        """Let the thread in :meth:`wait` go on."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def wait(self, timeout: float, *others: int) -> bool:
        """Until something comes, somebody wakes us, or time is up; whether ``others`` did."""
        poll = select.poll()
        with self._lock:
            if self._is_closed:
                return False
            events = select.POLLIN | (select.POLLOUT if self._out else 0)
            if not self.is_ended:
                poll.register(self._sock.fileno(), events)
            poll.register(self._wake, select.POLLIN)
        for other in others:
            poll.register(other, select.POLLIN)
        ready = dict(poll.poll(max(0, int(timeout * 1000) + 1)))
        with self._lock:
            if not self._is_closed:
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._flush()
        return any(other in ready for other in others)

    def receive(self) -> list[Frame]:
        """All frames that are here now."""
        while not self.is_ended:
            with self._lock:
                if self._is_closed:
                    break
                got = _libc.recv(self._sock.fileno(), self._buffer, _CHUNK, _DONTWAIT)
                code = ctypes.get_errno() if got < 0 else 0
            if got > 0:
                self._in += memoryview(self._buffer)[:got]
            if code in (errno.EAGAIN, errno.EINTR) or 0 < got < _CHUNK:
                break
            self.is_ended = got <= 0
        return self._cut()

    @property
    def has_hung_up(self) -> bool:
        """Whether the other end will send nothing more; what it has sent may still be here."""
        poll = select.poll()
        with self._lock:
            if self._is_closed:
                return True
            poll.register(self._sock.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def _cut(self) -> list[Frame]:
        frames: list[Frame] = []
        at = 0
        while len(self._in) - at >= HEAD.size:
            size, kind = HEAD.unpack_from(self._in, at)
            if size > _MOST_BODY:
                raise IntegrityError(f"a frame of {size} bytes on the line to a drive")
            end = at + HEAD.size + size
            if end > len(self._in):
                break
            frames.append((FrameKind(kind), bytes(memoryview(self._in)[at + HEAD.size : end])))
            at = end
        del self._in[:at]
        return frames

    def _flush(self) -> None:
        while self._out:
            data = self._out[0]
            sent = _libc.send(self._sock.fileno(), data, len(data), _DONTWAIT | _NOSIGNAL)
            if sent == len(data):
                self._out.popleft()
            elif sent > 0:
                self._out[0] = data[sent:]
            elif ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
                self._out.clear()  # it is gone; whoever receives will notice
            else:
                return

    def end(self) -> None:
        """Nothing more will be sent: the other end comes to its end."""
        with self._lock:
            if not self._is_closed:
                with suppress(OSError):  # it was there first
                    self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._sock.close()
                os.close(self._wake)
