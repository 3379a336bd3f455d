"""Traces: what requests asked for and when, without their tokens. Read and checked.

One request on each line, plain or gzipped::

    Mooncake   {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
    ours       {"kvferry_trace": 1, "block_tokens": 128}                      the first line
               {"time": 27.482, "keys": "AQAAAAAAAAA=", "input": 200, "output": 52}
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.core.quantities import quoted
from kvferry.errors import ConfigError, InputError
from kvferry.hints import Hints

Numbers = npt.NDArray[np.uint64]

# Of the finalizer of splitmix64: every bit of a number moves every bit of each word.
_STEPS = np.arange(1, KEY_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def keys_of_numbers(numbers: Numbers) -> Keys:
    """A key for each number that a trace gives a block: equal numbers, equal keys."""
    words = numbers[:, None] + _STEPS
    words ^= words >> _SHIFTS[0]
    words *= _FIRST
    words ^= words >> _SHIFTS[1]
    words *= _SECOND
    words ^= words >> _SHIFTS[2]
    return Keys(words)


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """Owns plain facts: seconds from the trace's start, a number for each block, lengths in tokens.

    Equal numbers are equal blocks behind equal beginnings. ``numbers`` may end with a block that
    the prompt only begins: ``num_full`` of them are whole. ``hit_tokens`` is what the server that
    was recorded found, None where that was not recorded.
    """

    at: float
    numbers: Numbers
    num_full: int
    input_tokens: int
    output_tokens: int = 0
    hit_tokens: int | None = None
    hints: Hints | None = None

    def keys(self) -> Keys:
        return keys_of_numbers(self.numbers)


MOONCAKE_BLOCK_TOKENS = 512
"""What one of its hash ids covers."""

VERSION = 1
MARK = "kvferry_trace"
NUMBER_BYTES = 8
RECORDED_HINTS = ("ended", "continues", "pin_seconds")
_HINTS = (*RECORDED_HINTS, "tenant")
_MOST_TOKENS = 1 << 40
_MOST_SECONDS = 1e10
_MOST_NUMBER = (1 << 64) - 1


class BadLineError(InputError):
    """A line that is no request; the message says what is wrong with it."""


class TraceFormat(Enum):
    """The program that writes such lines."""

    MOONCAKE = "mooncake"
    OURS = "kvferry"


@dataclass(frozen=True)
class TraceHeader:
    """What a trace says of itself in its first line, or what is known of its format."""

    format: TraceFormat
    block_tokens: int
    recording: str = ""
    part: int = 0


def parse_object(line: bytes) -> dict[str, Any]:
    """The object on a line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError(f"no JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise BadLineError(f"a JSON {type(found).__name__}, not an object")
    return found


def read_header(first: dict[str, Any], block_tokens: int | None) -> TraceHeader:
    """What the first object of a trace makes of the rest; BadLineError where it is no trace's."""
    if MARK in first:
        if first[MARK] != VERSION:
            raise BadLineError(
                f"{MARK} is {quoted(first[MARK])}; this kvferry reads version {VERSION}"
            )
        own = _count(first, "block_tokens", least=1)
        if block_tokens is not None and block_tokens != own:
            raise BadLineError(f"its blocks have {own} tokens, not the {block_tokens} you say")
        recording = first.get("recording")
        name = recording if isinstance(recording, str) else ""
        return TraceHeader(TraceFormat.OURS, own, name, _count(first, "part", default=0))
    if "hash_ids" in first:
        return TraceHeader(TraceFormat.MOONCAKE, block_tokens or MOONCAKE_BLOCK_TOKENS)
    raise BadLineError(
        f"neither {MARK} nor hash_ids: this is no trace that kvferry knows (docs/traces.md)"
    )


def read_request(found: dict[str, Any], header: TraceHeader) -> TraceRequest:
    """The request on one line."""
    block_tokens, hit, hints = header.block_tokens, None, None
    if header.format is TraceFormat.MOONCAKE:
        ids = found.get("hash_ids")
        if not isinstance(ids, list):
            raise BadLineError(f"hash_ids must be a list of numbers, got {quoted(ids)}")
        at, numbers = _seconds(found, "timestamp") / 1000, _numbers(ids)
        # Where the length is missing, all blocks are full.
        asked = _count(found, "input_length", default=len(ids) * block_tokens)
        answered = _count(found, "output_length", default=0)
    else:
        at, numbers = _seconds(found, "time"), _decoded(found.get("keys"))
        asked, answered = _count(found, "input"), _count(found, "output", default=0)
        hit = _count(found, "hit") if "hit" in found else None
        hints = _hints(found)
    # The last block, where the prompt only begins it, may be named or not; none else may be left
    # out: tokens that no block has would count among those that are asked for.
    num_full, most = asked // block_tokens, -(-asked // block_tokens)
    if not num_full <= len(numbers) <= most:
        raise BadLineError(
            f"{len(numbers)} blocks for {asked} tokens, which are {most} blocks of "
            f"{block_tokens}; say another block size (--block-tokens)"
        )
    if len(np.unique(numbers)) < len(numbers):
        raise BadLineError("it names a block twice; a chain never repeats")
    return TraceRequest(at, numbers, num_full, asked, answered, hit, hints)


def _decoded(text: object) -> Numbers:
    if not isinstance(text, str):
        raise BadLineError(f"keys must be base64 of 8 bytes for each block, got {quoted(text)}")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadLineError(f"keys is no base64: {str(error)[:100]}") from None
    if len(raw) % NUMBER_BYTES:
        raise BadLineError(f"keys has {len(raw)} bytes, which are no blocks of {NUMBER_BYTES}")
    return np.frombuffer(raw, dtype="<u8").astype(np.uint64, copy=False)


def _numbers(ids: list[Any]) -> Numbers:
    try:
        numbers = np.array(ids, dtype=np.uint64) if ids else np.empty(0, dtype=np.uint64)
    except (TypeError, ValueError, OverflowError):
        numbers = None
    if numbers is None or numbers.ndim != 1 or not all(type(each) is int for each in ids):
        raise BadLineError(f"hash_ids must be whole numbers from 0 to {_MOST_NUMBER}")
    return numbers


def _seconds(found: dict[str, Any], name: str) -> float:
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadLineError(f"{name} must be a number, got {quoted(value)}")
    if not (math.isfinite(value) and -_MOST_SECONDS * 1000 <= value <= _MOST_SECONDS * 1000):
        raise BadLineError(f"{name} must be a time, got {quoted(value)}")
    return float(value)


def _count(found: dict[str, Any], name: str, *, default: int | None = None, least: int = 0) -> int:
    value = found.get(name, default)
    if type(value) is not int or not least <= value <= _MOST_TOKENS:
        raise BadLineError(f"{name} must be a whole number from {least}, got {quoted(value)}")
    return value


def _hints(found: dict[str, Any]) -> Hints | None:
    said = {name: found[name] for name in _HINTS if name in found}
    try:
        return Hints.read(said) if said else None
    except (ConfigError, InputError) as error:
        raise BadLineError(str(error)) from None


_MOST_LINE = 32 << 20
_MOST_NAMED = 5
_GZIP = b"\x1f\x8b"


class TraceReader:
    """The requests of one trace, in as many files as it has; read as often as you like.

    Files are read in the order given, those of one recording in the order they were written. Owns
    what was found wrong: ``num_bad`` lines that are no requests were left out, the first few
    of them are in ``complaints``, each with its file and line. Time never goes back: a request that
    says it came before the one above it came with it (``num_late``). One line is in memory at a
    time.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        block_tokens: int | None = None,
    ) -> None:
        """``block_tokens`` for formats that do not say it."""
        if not paths:
            raise InputError("no trace was named")
        self.paths = tuple(paths)
        self.complaints: list[str] = []
        self.num_bad = 0
        self.num_late = 0
        self._block_tokens = block_tokens
        self._headers = [self._header(path) for path in self.paths]
        if self._headers[0].recording and len({each.recording for each in self._headers}) == 1:
            by_part = sorted(range(len(paths)), key=lambda at: self._headers[at].part)
            self.paths = tuple(paths[at] for at in by_part)
            self._headers = [self._headers[at] for at in by_part]
        sizes = {header.block_tokens for header in self._headers}
        if len(sizes) > 1:
            raise InputError(
                f"the files have blocks of {' and '.join(map(str, sorted(sizes)))} tokens; "
                "read those of one size together"
            )

    @property
    def block_tokens(self) -> int:
        return self._headers[0].block_tokens

    @property
    def format(self) -> str:
        return " and ".join(sorted({header.format.value for header in self._headers}))

    @property
    def num_bytes(self) -> int:
        """Of all files, as they lie on the disk."""
        return sum(path.stat().st_size for path in self.paths)

    def __iter__(self) -> Iterator[TraceRequest]:
        self.complaints, self.num_bad, self.num_late = [], 0, 0
        start: float | None = None
        latest = 0.0
        for path, header in zip(self.paths, self._headers, strict=True):
            for number, line in self._lines(path):
                try:
                    found = parse_object(line)
                    if number == 1 and "kvferry_trace" in found:
                        continue
                    request = read_request(found, header)
                except BadLineError as error:
                    self._complain(f"{path.name}, line {number}: {error}")
                    continue
                if start is None:
                    start = request.at
                at = request.at - start
                if at < latest:
                    self.num_late += 1
                    at = latest
                latest = at
                yield request if at == request.at else replace(request, at=at)

    def _header(self, path: Path) -> TraceHeader:
        for number, line in self._lines(path):
            try:
                return read_header(parse_object(line), self._block_tokens)
            except BadLineError as error:
                raise InputError(f"{path}, line {number}: {error}") from None
        raise InputError(f"{path} is empty: there is no request in it")

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """The lines that have anything on them, with their numbers."""
        with closing(_open(path)) as file:
            number = 0
            while True:
                number += 1
                try:
                    line = file.readline(_MOST_LINE)
                    is_long = len(line) == _MOST_LINE and not line.endswith(b"\n")
                    while is_long and (more := file.readline(_MOST_LINE)):
                        if more.endswith(b"\n"):
                            break
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    self._complain(f"{path.name}, line {number}: cut short or damaged: {error}")
                    return
                except OSError as error:
                    raise InputError(f"{path}, line {number}: cannot be read: {error}") from error
                if not line:
                    return
                if is_long:
                    self._complain(f"{path.name}, line {number}: longer than {_MOST_LINE} bytes")
                elif not line.isspace():
                    yield number, line

    def _complain(self, words: str) -> None:
        self.num_bad += 1
        if len(self.complaints) < _MOST_NAMED:
            self.complaints.append(words)


def _open(path: Path) -> IO[bytes]:
    try:
        with path.open("rb") as file:
            is_zipped = file.read(2) == _GZIP
        return cast("IO[bytes]", gzip.open(path)) if is_zipped else path.open("rb", 1 << 20)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
