"""The recorder: writes requests as a trace that ``kvferry simulate`` reads, without any token.

The engine's thread only notes a request; a thread beside it does the rest.
"""

from __future__ import annotations

import base64
import fcntl
import gzip
import json
import logging
import math
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from kvferry.core.keys import Keys
from kvferry.errors import ConfigError
from kvferry.hints import Hints
from kvferry.telemetry.traces import MARK, RECORDED_HINTS, VERSION

log = logging.getLogger("kvferry")

_LOOK_SECONDS = 1.0
_BURST_SECONDS = 4e-3
"""Longest work between two rests. The first request finds nothing in the processor's caches and
costs several times what the next ones do. After 5 ms the interpreter is the engine's anyway."""
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
_ANSWER_SECONDS = 60.0
"""A request that is not over by then is written without the length of its answer."""
_SALT_BYTES = 32


@dataclass(slots=True, eq=False)
class RecordedRequest:
    """Facts of one request. ``is_over`` is set last: another thread reads the others then.

    ``at`` is the scheduler's time. The first ``num_keys`` of the keys are those of its prompt, of
    whose ``tokens`` ``found_tokens`` need not be computed. ``answer_tokens`` is None where it is
    not known.
    """

    at: float
    keys: Keys
    num_keys: int
    tokens: int
    found_tokens: int
    hints: Hints | None = None
    answer_tokens: int | None = None
    is_over: bool = False

    def end(self, answer_tokens: int | None) -> None:
        self.answer_tokens = answer_tokens
        self.is_over = True


class Recorder:
    """Writes requests in their order. Owns the file, a secret, and a thread.

    A key in the file is a digest of the real one under a secret that is never written and dies with
    the process: knowing a prompt does not help to find it there. The thread begins with the first
    request. Requests beyond its capacity are dropped and counted (``num_missed``).
    """

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int,
        most_bytes: int,
        now: float,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """``block_tokens`` is what a key of a request covers, ``now`` the scheduler's time.

        ``pause`` is called with the seconds that its thread should rest.
        """
        self.num_missed = 0
        self._every = -(-_LEAST_TOKENS // block_tokens)
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._offset = time.time() - now
        self._waiting: deque[RecordedRequest] = deque()
        self._stop = threading.Event()
        self._pause = pause if pause is not None else self._stop.wait
        self._thread: threading.Thread | None = None
        self.writer = TraceWriter(
            path, block_tokens=self._every * block_tokens, most_bytes=most_bytes
        )

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
            self.writer.close()
            return
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("the file system of %s hangs: its recording ends later", self.writer.path)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            is_full = len(self._waiting) > _MOST_WAITING // 2
            now = time.time() - self._offset
            self._write(before=math.inf if is_full else now - _ANSWER_SECONDS)
            self.writer.flush()
        deadline = time.monotonic() + _LAST_SECONDS
        while self._waiting and time.monotonic() < deadline:
            self._write_one()
        self.num_missed += len(self._waiting)
        self.writer.close()
        if self.num_missed:
            words = "%d requests came faster than they could be recorded in %s"
            log.warning(words, self.num_missed, self.writer.path)

    def _write(self, before: float) -> None:
        """Write requests that are over, and those that came before then, in their order."""
        worked = 0.0
        while self._waiting and not self._stop.is_set():
            if not self._waiting[0].is_over and self._waiting[0].at >= before:
                return
            began = time.thread_time()
            self._write_one()
            worked += time.thread_time() - began
            if worked >= _BURST_SECONDS:
                self._pause(min(_MOST_REST, _REST * worked))
                worked = 0.0

    def _write_one(self) -> None:
        request = self._waiting.popleft()
        keys = self._digests(request.keys[: request.num_keys])
        line: dict[str, Any] = {
            "time": round(request.at + self._offset, 3),
            "keys": base64.b64encode(keys).decode(),
            "input": request.tokens,
            "output": request.answer_tokens,
            "hit": request.found_tokens,
        }
        if request.hints is not None:
            given = request.hints.as_dict()
            if request.hints.continues and request.hints.within is not None:
                given["continues"] = request.hints.within
            line |= {name: given[name] for name in RECORDED_HINTS if name in given}
        self.writer.write({name: value for name, value in line.items() if value is not None})

    def _digests(self, keys: Keys) -> bytes:
        rows = np.ascontiguousarray(keys.array[self._every - 1 :: self._every])
        raw, size = rows.tobytes(), rows.shape[1] * rows.itemsize
        return b"".join(
            blake2b(raw[at : at + size], digest_size=8, key=self._salt).digest()
            for at in range(0, len(raw), size)
        )


NUM_FILES = 4
"""The file being written and those before it, each a quarter of all bytes."""
_MOST_WRITERS = 64
_OWNER_ONLY = 0o600


class TraceWriter:
    """Owns the newest file of a recording, and the names of the older ones: NAME.1, NAME.2, NAME.3.

    What would be a fifth quarter is removed, the oldest first. A file that is there already is
    from an earlier recording and becomes NAME.1. Where another process writes under this name, ours
    is NAME-1, and so on. A fault while writing ends the recording, with a line in the log.
    """

    def __init__(self, path: Path, *, block_tokens: int, most_bytes: int) -> None:
        """ConfigError where nothing can be written there."""
        self._block_tokens = block_tokens
        self._most_bytes = max(1, most_bytes // NUM_FILES)
        self._recording = secrets.token_hex(8)
        self._part = 0
        self._written = 0
        self._file: IO[bytes] | gzip.GzipFile | None = None
        self._raw: IO[bytes] | None = None  # under a gzipped one
        self._lock = -1
        try:
            self.path = self._claim(path)
            self._begin()
        except OSError as error:
            self._unlock()
            raise ConfigError(
                f"record: cannot write {path}: {error.strerror or error}; name a file in a folder "
                "that the engine may write to"
            ) from error

    def write(self, line: Mapping[str, object]) -> None:
        """One request, as :mod:`kvferry.telemetry.traces` reads it."""
        with self._faults():
            if self._file is not None:
                self._put(line)
                if self._written > self._most_bytes:
                    self._close_file()
                    self._part += 1
                    self._begin()

    def flush(self) -> None:
        """Let others see what was written so far."""
        with self._faults():
            for file in (self._file, self._raw):
                if file is not None:
                    file.flush()

    def close(self) -> None:
        """Safe to call twice."""
        with self._faults():
            self._close_file()
        self._unlock()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """A fault ends the recording, and nothing else."""
        try:
            yield
        except OSError as error:
            log.warning("recording to %s ends: %s", self.path, error.strerror or error)
            self._file = self._raw = None
            self._unlock()

    def _close_file(self) -> None:
        file, raw, self._file, self._raw = self._file, self._raw, None, None
        for each in (file, raw):
            if each is not None:
                each.close()

    def _claim(self, path: Path) -> Path:
        """The name that no other process writes under. Held by a lock on a file beside it."""
        for number in range(_MOST_WRITERS):
            name = path if not number else path.with_name(f"{path.name}-{number}")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(name.with_name(f".{name.name}.lock"), flags, _OWNER_ONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            self._lock = lock
            return name
        raise OSError(f"{_MOST_WRITERS} others write under this name")

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)  # the file stays: removing it would let two hold two locks
            self._lock = -1

    def _begin(self) -> None:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise OSError("it is no ordinary file")
        if self.path.exists() and self.path.stat().st_size:  # NAME becomes NAME.1, and so on
            older = [self.path.with_name(f"{self.path.name}.{n}") for n in range(1, NUM_FILES)]
            for newer, name in reversed(list(pairwise([self.path, *older]))):
                if newer.exists():
                    newer.replace(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(self.path, flags, _OWNER_ONLY)
        if stat.S_IMODE(os.fstat(number).st_mode) != _OWNER_ONLY:
            os.fchmod(number, _OWNER_ONLY)
        self._file = self._raw = os.fdopen(number, "wb")
        if self.path.suffix == ".gz":
            self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=3)
        self._written = 0
        head = {MARK: VERSION, "block_tokens": self._block_tokens}
        self._put({**head, "recording": self._recording, "part": self._part})

    def _put(self, line: Mapping[str, object]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._written += len(data)
        assert self._file is not None
        self._file.write(data)
