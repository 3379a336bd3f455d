"""Messages between an engine and its child processes: frames over a socket.

::

    engine ──> HELLO, ORDER, FORGET ──> child
    engine <── READY | REFUSED, RESULT, UNAVAILABLE, WRITES_REFUSED, FORGOT, LOG <── child

Both ends run one release on one machine, so the formats need not stay compatible. Frames are sent
and received without ever blocking and without releasing the GIL.

A call that releases the GIL gets it back only when the thread that took it yields: 5 ms beside a
thread that computes. Sending a few hundred bytes takes 2 µs: these calls keep it (``PyDLL``).
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import select
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.errors import IntegrityError
from kvferry.tiers.contract import Batch, BatchId, Result, Way

_CHUNK = 256 << 10
_MAX_BODY_BYTES = 64 << 20
_DONTWAIT, _NOSIGNAL = 0x40, 0x4000
_HEAD = struct.Struct("<IB3x")

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.send.restype = ctypes.c_ssize_t
_libc.recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.recv.restype = ctypes.c_ssize_t


class FrameKind(IntEnum):
    """The meaning of a frame, by its sender."""

    HELLO = 1  # engine: what to serve
    READY = 2  # child: ready for orders
    REFUSED = 3  # child: it cannot serve, and why
    ORDER = 4  # engine: blocks to find, read or write
    RESULT = 6  # child: the result of an order
    FORGET = 7  # engine: drop all blocks; none written before may be read again
    FORGOT = 8  # child: the drop of the blocks is durable
    UNAVAILABLE = 9  # child: why its medium is unavailable; empty when it is available again
    LOG = 10  # child: a line for the log
    WRITES_REFUSED = 11  # child: why its medium takes no writes; empty when it takes them again


Frame = tuple[FrameKind, bytes]


def frame(kind: FrameKind, body: bytes = b"") -> bytes:
    """Return a frame as it is sent: its length, kind and body."""
    return _HEAD.pack(len(body), kind) + body


class Channel:
    """One end of a socket. Any thread may send; one thread waits and receives."""

    def __init__(self, sock: socket.socket, peer_pid: int | None = None) -> None:
        """Take over ``sock``. The channel also ends when the process ``peer_pid`` ends.

        The socket is not enough: other processes may hold its other end after the peer's death.
        """
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._sock = sock
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._peer: int | None = None
        if peer_pid is not None:
            with suppress(OSError):  # a kernel before 5.3, or a dead peer: only the socket tells
                self._peer = os.pidfd_open(peer_pid)
        self._lock = threading.Lock()  # guards what is below
        self._out: deque[bytes] = deque()
        self._is_closed = False
        self._buffer = ctypes.create_string_buffer(_CHUNK)
        self._in = bytearray()
        self.is_ended = False
        """Whether the peer is gone: nothing more will arrive."""

    def send(self, data: bytes) -> None:
        """Send a frame, at once or when the socket has room. Drop it if the peer is gone."""
        with self._lock:
            if self._is_closed or self.is_ended:
                return
            self._out.append(data)
            if len(self._out) == 1:
                self._flush()
            if self._out:
                os.eventfd_write(self._wake, 1)  # wait() must also wait for room to send

    def wake(self) -> None:
        """Make the thread in :meth:`wait` return."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def wait(self, timeout: float) -> None:
        """Wait until something arrives, :meth:`wake` is called, or ``timeout`` seconds pass."""
        poll = select.poll()
        with self._lock:
            if self._is_closed:
                return
            if not self.is_ended:
                events = select.POLLIN | (select.POLLOUT if self._out else 0)
                poll.register(self._sock.fileno(), events)
                if self._peer is not None:
                    poll.register(self._peer, select.POLLIN)
            poll.register(self._wake, select.POLLIN)
        ready = dict(poll.poll(max(0, int(timeout * 1000) + 1)))
        with self._lock:
            if not self._is_closed:
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._flush()

    def receive(self, most: int | None = None) -> list[Frame]:
        """Return at most ``most`` of the frames that have arrived; keep the rest."""
        is_peer_dead = self._peer is not None and _is_readable(self._peer)
        while not self.is_ended:
            with self._lock:
                if self._is_closed:
                    break
                got = _libc.recv(self._sock.fileno(), self._buffer, _CHUNK, _DONTWAIT)
                code = ctypes.get_errno() if got < 0 else 0
            if got > 0:
                self._in += memoryview(self._buffer)[:got]
            if code in (errno.EAGAIN, errno.EINTR) or 0 < got < _CHUNK:
                self.is_ended = is_peer_dead  # all that the dead peer had sent has arrived
                break
            self.is_ended = got <= 0
        return self._split_frames(most)

    def _split_frames(self, most: int | None) -> list[Frame]:
        frames: list[Frame] = []
        at = 0
        while len(self._in) - at >= _HEAD.size and len(frames) != most:
            size, kind = _HEAD.unpack_from(self._in, at)
            if size > _MAX_BODY_BYTES:
                raise IntegrityError(f"a frame of {size} bytes from a child process or its engine")
            end = at + _HEAD.size + size
            if end > len(self._in):
                break
            frames.append((FrameKind(kind), bytes(memoryview(self._in)[at + _HEAD.size : end])))
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
                self._out.clear()  # the peer is gone; receive() will notice
            else:
                return

    def end(self) -> None:
        """Close the sending direction; the peer then ends."""
        with self._lock:
            if not self._is_closed:
                with suppress(OSError):  # the peer ended first
                    self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._sock.close()
                os.close(self._wake)
                if self._peer is not None:
                    os.close(self._peer)
                    self._peer = None


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


_WAYS = (Way.READ, Way.WRITE, Way.FIND)

Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def pack_order(batch: Batch, generation: int) -> bytes:
    """Return the frame of a batch, or of the part of it that one child carries out."""
    arrays = (batch.sizes, batch.keys.array, batch.addresses, batch.places)
    parts = [None if each is None else np.ascontiguousarray(each).tobytes() for each in arrays]
    head = (batch.id, _WAYS.index(batch.way), generation, batch.deadline)
    return frame(FrameKind.ORDER, marshal.dumps((*head, *parts)))


def unpack_order(body: bytes) -> tuple[Batch, int]:
    """Return the batch in a frame's body, as views of that memory, and its generation."""
    number, way, generation, deadline, sizes, keys, addresses, places = marshal.loads(body)
    words, pieces = np.frombuffer(keys, np.uint64), np.frombuffer(sizes, np.int64)
    words = words.reshape(-1, KEY_WORDS)
    batch = Batch(
        BatchId(number),
        _WAYS[way],
        Keys(words),
        deadline,
        np.frombuffer(addresses, np.int64).reshape(len(words), len(pieces)),
        pieces,
        None if places is None else np.frombuffer(places, np.int64),
    )
    return batch, generation


def pack_result(result: Result) -> bytes:
    """Return the frame of a result. Equal reasons are sent once: most blocks share one."""
    groups: dict[str, list[int]] = {}
    for position, reason in result.reasons.items():
        groups.setdefault(reason, []).append(int(position))
    head = (result.batch_id, result.num_bytes, result.seconds)
    return frame(FrameKind.RESULT, marshal.dumps((*head, result.ok.tobytes(), groups)))


def unpack_result(body: bytes) -> Result:
    number, num_bytes, seconds, ok, groups = marshal.loads(body)
    reasons = {at: reason for reason, positions in groups.items() for at in positions}
    ok = np.frombuffer(ok, bool).copy()
    return Result(BatchId(number), ok, reasons, num_bytes, seconds)


def pack(kind: FrameKind, *values: int | str) -> bytes:
    """Return a frame with numbers and texts as its body."""
    return frame(kind, marshal.dumps(values))


def unpack(body: bytes) -> Any:
    """Return the numbers and texts of a frame's body: as a tuple, or a single one itself."""
    values = marshal.loads(body)
    return values[0] if len(values) == 1 else values
