"""The recorder: writes requests as a trace that ``kvferry simulate`` reads, without any token.

The engine's thread only notes a request; a thread beside it does the rest.
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

_LOOK_SECONDS = 1.0
_REST = 19
"""It rests so many times as long as it worked: at most a twentieth of one processor is its."""
_MOST_REST = 1.0
_MOST_WAITING = 4096
_LAST_SECONDS = 0.5
"""How long it writes what waits when it closes."""
_CLOSE_SECONDS = 0.9
"""How long ``close`` waits for that, and for the file system."""
_LEAST_TOKENS = 128
"""Tokens of a recorded block, at least: one key for many short blocks keeps the file small."""
_NUMBER_BYTES = 6
"""Of a block's number: every reader of JSON has it exactly (below 2**53), and no two are equal."""
_SALT_BYTES = 32


class RecordedRequest(NamedTuple):
    """Facts of one request: when it came (the scheduler's time), its prompt's keys and tokens."""

    at: float
    keys: Keys
    num_tokens: int
    hints: Hints | None = None


class Recorder:
    """Writes requests in their order. Owns the file, a secret, and a thread.

    A block's number in the file is a digest of its key under a secret that is never written and
    dies with the process: knowing a prompt does not help to find it there. The thread begins with
    the first request. Requests beyond its capacity are dropped and counted (``num_missed``).
    """

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int,
        most_bytes: int,
        now: float,
    ) -> None:
        """``block_tokens`` is what a key of a request covers, ``now`` the scheduler's time."""
        self.num_missed = 0
        self._every = -(-_LEAST_TOKENS // block_tokens)
        self._block_tokens = self._every * block_tokens
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._offset = time.time() - now
        self._waiting: deque[RecordedRequest] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.file = TraceFile(path, most_bytes)

    def see(self, request: RecordedRequest) -> None:
        """Take a request, without waiting."""
        if len(self._waiting) >= _MOST_WAITING or self._stop.is_set():
            self.num_missed += 1
            return
        self._waiting.append(request)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-recorder", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what waits, and end the file; within a second. Safe to call twice."""
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
        while not self._stop.wait(_LOOK_SECONDS):
            self._write()
            self.file.flush()
        deadline = time.monotonic() + _LAST_SECONDS
        while self._waiting and time.monotonic() < deadline:
            self._write_one()
        self.num_missed += len(self._waiting)
        self.file.close()
        if self.num_missed:
            words = "%d requests came faster than they could be recorded in %s"
            log.warning(words, self.num_missed, self.file.path)

    def _write(self) -> None:
        while self._waiting and not self._stop.is_set():
            began = time.thread_time()
            self._write_one()
            self._stop.wait(min(_MOST_REST, _REST * (time.thread_time() - began)))

    def _write_one(self) -> None:
        request = self._waiting.popleft()
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
    """Owns the newest file of a recording, locked. The one before it is NAME.1.

    Each has half of all bytes. A file that is there already is from an earlier recording and
    becomes NAME.1. Where another process writes under this name, ours is NAME-1, and so on. A fault
    while writing ends the recording, with a line in the log.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        """ConfigError where nothing can be written there."""
        self._most_bytes = most_bytes // 2
        try:
            for number in range(_MOST_WRITERS):
                self.path = path.with_name(f"{path.name}-{number}") if number else path
                self._file = _begin(self.path)
                if self._file is not None:
                    return
            raise OSError(f"{_MOST_WRITERS} others write under this name")
        except OSError as error:
            raise ConfigError(
                f"record: cannot write {path}: {error.strerror or error}; name a file in a folder "
                "that the engine may write to"
            ) from error

    def write(self, line: Mapping[str, object]) -> None:
        """One request, as :mod:`kvferry.telemetry.traces` reads it."""
        self._do(self._write, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Let others see what was written so far."""
        self._do(lambda file: file.flush())

    def close(self) -> None:
        """Safe to call twice."""
        self._do(lambda file: file.close())
        self._file = None

    def _do(self, work: Callable[..., object], *args: object) -> None:
        """A fault ends the recording, and nothing else."""
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
            self._file = _begin(self.path)
            if self._file is None:
                raise OSError("another process has begun to write there")


def _begin(path: Path) -> IO[bytes] | None:
    """Open and lock an empty file; None where another process has it. An older one is NAME.1."""
    while True:
        file = open(path, "ab", opener=_open_plain)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else renamed before the lock
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
