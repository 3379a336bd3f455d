"""Writes traces: files only their owner can read, so many bytes in all and no more."""

from __future__ import annotations

import base64
import fcntl
import gzip
import json
import logging
import os
import secrets
import stat
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from kvferry.errors import ConfigError
from kvferry.hints import Hints
from kvferry.traces.lines import MARK, VERSION

log = logging.getLogger("kvferry")

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

    def write(
        self,
        at: float,
        keys: bytes,
        input_tokens: int,
        *,
        output_tokens: int | None = None,
        hit_tokens: int | None = None,
        hints: Hints | None = None,
    ) -> None:
        """One request: ``keys`` has eight bytes for each of its blocks."""
        if self._file is None:
            return
        line: dict[str, Any] = {
            "time": round(at, 3),
            "keys": base64.b64encode(keys).decode(),
            "input": input_tokens,
        }
        if output_tokens is not None:
            line["output"] = output_tokens
        if hit_tokens is not None:
            line["hit"] = hit_tokens
        line |= _said(hints)
        self._put(line)
        if self._file is not None and self._written > self._most_bytes:
            try:
                self._rotate()
            except OSError as error:
                self._fail(error)

    def flush(self) -> None:
        """Let others see what was written so far."""
        if self._file is not None:
            try:
                self._file.flush()
                if self._raw is not None:
                    self._raw.flush()
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        """Safe to call twice."""
        try:
            self._close_file()
        except OSError as error:
            self._fail(error)
        self._unlock()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        raw, self._raw = self._raw, None
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
        if self.path.exists() and self.path.stat().st_size:
            self._shift()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(self.path, flags, _OWNER_ONLY)
        if stat.S_IMODE(os.fstat(number).st_mode) != _OWNER_ONLY:
            os.fchmod(number, _OWNER_ONLY)
        self._file = self._raw = os.fdopen(number, "wb")
        if self.path.suffix == ".gz":
            self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=3)
        self._written = 0
        self._put(
            {
                MARK: VERSION,
                "block_tokens": self._block_tokens,
                "recording": self._recording,
                "part": self._part,
            }
        )

    def _rotate(self) -> None:
        self._close_file()
        self._part += 1
        self._begin()

    def _shift(self) -> None:
        """NAME becomes NAME.1, that NAME.2, and so on; the last is written over."""
        names = [self.path, *(self._older(number) for number in range(1, NUM_FILES))]
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                newer.replace(older)

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _put(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._written += len(data)
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        log.warning("recording to %s ends: %s", self.path, error.strerror or error)
        self._file = self._raw = None
        self._unlock()


def _said(hints: Hints | None) -> dict[str, Any]:
    """The hints that a trace has; not whose request it was."""
    if hints is None:
        return {}
    said: dict[str, Any] = {}
    if hints.over:
        said["over"] = True
    if hints.goes_on:
        said["goes_on"] = hints.within if hints.within is not None else True
    if hints.keep_seconds is not None:
        said["keep_seconds"] = hints.keep_seconds
    return said
