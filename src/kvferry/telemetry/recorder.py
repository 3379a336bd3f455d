"""The recorder: writes requests, without tokens, as a trace that ``kvferry simulate`` reads.

The engine's thread only queues a request. The recorder's own thread writes it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from kvferry.core.keys import Keys
from kvferry.errors import ConfigError
from kvferry.hints import Hints
from kvferry.telemetry.traces import RECORDED_HINTS

log = logging.getLogger("kvferry")

_POLL_SECONDS = 1.0
_SLEEP_RATIO = 19
"""The thread sleeps this many times its processor time, to use at most 1/20 of one processor."""
_MAX_SLEEP_SECONDS = 1.0
_MAX_QUEUED = 4096
_LAST_SECONDS = 0.5
"""Seconds that the thread spends on queued requests after ``close`` is called."""
_CLOSE_SECONDS = 0.9
"""Seconds that ``close`` waits for the thread, which a file system may hang."""
_LEAST_TOKENS = 128
"""Fewest tokens of a recorded block. One number for several short blocks keeps the file small."""
_NUMBER_BYTES = 6
"""Bytes of a block's number. JSON readers parse it exactly (below 2**53); equal ones are rare."""
_SALT_BYTES = 32


class RecordedRequest(NamedTuple):
    """One request to record: its arrival (the scheduler's clock), its prompt's keys and tokens."""

    at: float
    keys: Keys
    num_tokens: int
    hints: Hints | None = None


class Recorder:
    """Writes requests in their order of arrival. Owns the file, a secret, and a thread.

    A block's number in the file is a digest of its key under a secret that is never written and
    ends with the process. So a known prompt cannot be found in the file. The thread starts with the
    first request. Requests that its queue cannot take are dropped and counted (``num_missed``).
    """

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int,
        most_bytes: int,
        now: float,
    ) -> None:
        """``block_tokens`` is the tokens per key, ``now`` the current scheduler's time."""
        self.num_missed = 0
        self._every = -(-_LEAST_TOKENS // block_tokens)
        self._block_tokens = self._every * block_tokens
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._offset = time.time() - now
        self._queue: deque[RecordedRequest] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.file = TraceFile(path, most_bytes)

    def see(self, request: RecordedRequest) -> None:
        """Queue a request, without waiting."""
        if len(self._queue) >= _MAX_QUEUED or self._stop.is_set():
            self.num_missed += 1
            return
        self._queue.append(request)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-recorder", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write queued requests and close the file, within a second. Safe to call twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is None:
            self.file.close()
            return
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("the file system of %s hangs: its recording ends later", self.file.path)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._write()
            self.file.flush()
        deadline = time.monotonic() + _LAST_SECONDS
        while self._queue and time.monotonic() < deadline:
            self._write_one()
        self.num_missed += len(self._queue)
        self.file.close()
        if self.num_missed:
            words = "%d requests came faster than they could be recorded in %s"
            log.warning(words, self.num_missed, self.file.path)

    def _write(self) -> None:
        while self._queue and not self._stop.is_set():
            began = time.thread_time()
            self._write_one()
            self._stop.wait(min(_MAX_SLEEP_SECONDS, _SLEEP_RATIO * (time.thread_time() - began)))

    def _write_one(self) -> None:
        request = self._queue.popleft()
        line: dict[str, Any] = {
            "timestamp": round(1000 * (request.at + self._offset)),
            "input_length": request.num_tokens,
            "block_tokens": self._block_tokens,
            "hash_ids": self._numbers(request.keys),
        }
        if request.hints is not None:
            given = request.hints.as_dict()
            if request.hints.continues and request.hints.within is not None:
                given["continues"] = request.hints.within
            line |= {name: given[name] for name in RECORDED_HINTS if name in given}
        self.file.write(line)

    def _numbers(self, keys: Keys) -> list[int]:
        rows = np.ascontiguousarray(keys.array[self._every - 1 :: self._every])
        raw, size = rows.tobytes(), rows.shape[1] * rows.itemsize
        digests = (
            blake2b(raw[at : at + size], digest_size=_NUMBER_BYTES, key=self._salt).digest()
            for at in range(0, len(raw), size)
        )
        return [int.from_bytes(digest, "little") for digest in digests]


_MOST_WRITERS = 64
_OWNER_ONLY = 0o600


class TraceFile:
    """Owns the newest file of a recording, NAME, and its lock. The previous file is NAME.1.

    Each takes half of ``most_bytes``. An existing NAME is from an earlier recording and becomes
    NAME.1. If another process writes to NAME, this one writes to NAME-1, and so on. A write error
    ends the recording and is logged.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        """Open the file. Raises ConfigError if it cannot be written."""
        self._most_bytes = most_bytes // 2
        try:
            for number in range(_MOST_WRITERS):
                self.path = path.with_name(f"{path.name}-{number}") if number else path
                self._file = _open_locked(self.path)
                if self._file is not None:
                    return
            raise OSError(f"{_MOST_WRITERS} others write under this name")
        except OSError as error:
            raise ConfigError(
                f"record: cannot write {path}: {error.strerror or error}; name a file in a folder "
                "that the engine may write to"
            ) from error

    def write(self, line: Mapping[str, object]) -> None:
        """Append one request, in the format of :mod:`kvferry.telemetry.traces`."""
        self._do(self._write, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Make the lines written so far visible to other processes."""
        self._do(lambda file: file.flush())

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._do(lambda file: file.close())
        self._file = None

    def _do(self, work: Callable[..., object], *args: object) -> None:
        """Run a file operation. An OSError ends the recording and is not raised."""
        try:
            if self._file is not None:
                work(self._file, *args)
        except OSError as error:
            log.warning("recording to %s ends: %s", self.path, error.strerror or error)
            self._file = None

    def _write(self, file: IO[bytes], data: bytes) -> None:
        file.write(data)
        if file.tell() > self._most_bytes:
            file.close()
            self._file = _open_locked(self.path)
            if self._file is None:
                raise OSError("another process has begun to write there")


def _open_locked(path: Path) -> IO[bytes] | None:
    """Open and lock an empty file; None if another process has it. An older file becomes NAME.1."""
    while True:
        file = open(path, "ab", opener=_open_plain)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else renamed before our lock
            if not file.tell():
                return file
            path.replace(f"{path}.1")
        file.close()


def _open_plain(path: str, flags: int) -> int:
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, flags, _OWNER_ONLY)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError("it is no ordinary file")
        os.fchmod(number, _OWNER_ONLY)
    except OSError:
        os.close(number)
        raise
    return number
