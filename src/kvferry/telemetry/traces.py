"""Reader of traces: the arrival, length and block numbers of requests, without their tokens.

A trace has one request per line, plain or gzipped, as Mooncake publishes them. kvferry's own traces
name the tokens per block, and may have hints::

    {"timestamp": 27482, "input_length": 6955, "hash_ids": [46, 47], "block_tokens": 128}
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from kvferry.core.keys import KEY_WORDS, Keys
from kvferry.core.quantities import quoted
from kvferry.errors import ConfigError, InputError
from kvferry.hints import Hints

Numbers = npt.NDArray[np.uint64]

# From the finalizer of splitmix64: every bit of a number changes every bit of each word.
_STEPS = np.arange(1, KEY_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def keys_of_numbers(numbers: Numbers) -> Keys:
    """Return a key for each block number of a trace. Equal numbers have equal keys."""
    words = numbers[:, None] + _STEPS
    words ^= words >> _SHIFTS[0]
    words *= _FIRST
    words ^= words >> _SHIFTS[1]
    words *= _SECOND
    words ^= words >> _SHIFTS[2]
    return Keys(words)


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """One request: its arrival in seconds, a number for each block, and its prompt's length.

    Equal numbers mean equal blocks after equal prefixes. The first ``num_full`` of ``numbers`` are
    full blocks. One partial block may follow.
    """

    at: float
    numbers: Numbers
    num_full: int
    input_tokens: int
    hints: Hints | None = None

    def keys(self) -> Keys:
        return keys_of_numbers(self.numbers)


MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per block of Mooncake's traces, whose lines do not name it."""

RECORDED_HINTS = ("ended", "continues", "pin_seconds")
_HINTS = (*RECORDED_HINTS, "tenant")
_MOST_TOKENS = 1 << 40
_MOST_MILLISECONDS = 1e13
_MOST_NUMBER = (1 << 64) - 1


class BadLineError(InputError):
    """A line is not a valid request. The message says why."""


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse the JSON object on a line. Raises BadLineError."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError(f"no JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise BadLineError(f"a JSON {type(found).__name__}, not an object")
    return found


def read_request(found: dict[str, Any], block_tokens: int) -> TraceRequest:
    """Read a request of a trace with ``block_tokens`` per block. Raises BadLineError."""
    own = _count(found, "block_tokens", default=block_tokens, least=1)
    if own != block_tokens:
        raise BadLineError(f"its blocks have {own} tokens, not {block_tokens}")
    ids = found.get("hash_ids")
    if not isinstance(ids, list):
        raise BadLineError(f"hash_ids must be a list of numbers, got {quoted(ids)}")
    at, numbers = _seconds(found), _numbers(ids)
    # Without a length, all blocks count as full.
    asked = _count(found, "input_length", default=len(ids) * block_tokens)
    # Only a partial last block may be left out. Tokens of any other missing block would count as
    # looked up, although the trace has no block for them.
    num_full, most = asked // block_tokens, -(-asked // block_tokens)
    if not num_full <= len(numbers) <= most:
        raise BadLineError(
            f"{len(numbers)} blocks for {asked} tokens, which are {most} blocks of "
            f"{block_tokens}; say another block size (--block-tokens)"
        )
    if len(np.unique(numbers)) < len(numbers):
        raise BadLineError("it names a block twice; a chain never repeats")
    return TraceRequest(at, numbers, num_full, asked, _hints(found))


def _numbers(ids: list[Any]) -> Numbers:
    try:
        numbers = np.array(ids, dtype=np.uint64) if ids else np.empty(0, dtype=np.uint64)
    except (TypeError, ValueError, OverflowError):
        numbers = None
    if numbers is None or numbers.ndim != 1 or not all(type(each) is int for each in ids):
        raise BadLineError(f"hash_ids must be whole numbers from 0 to {_MOST_NUMBER}")
    return numbers


def _seconds(found: dict[str, Any]) -> float:
    value = found.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadLineError(f"timestamp must be a number, got {quoted(value)}")
    if not (math.isfinite(value) and -_MOST_MILLISECONDS <= value <= _MOST_MILLISECONDS):
        raise BadLineError(f"timestamp must be a time, got {quoted(value)}")
    return value / 1000


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
    """Iterates over the requests of one trace in one or more files. Can be iterated repeatedly.

    Files are read in the order of their first requests, one line at a time. Owns the errors of the
    last iteration: ``num_bad`` invalid lines were skipped, and ``complaints`` has the first few
    with file and line. Time never goes back: a request with an earlier time than its predecessor
    gets the predecessor's time (``num_late``).
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        block_tokens: int | None = None,
    ) -> None:
        """``block_tokens`` is for lines that do not name it. Raises InputError if a file is bad."""
        if not paths:
            raise InputError("no trace was named")
        self.paths = tuple(paths)
        self.complaints: list[str] = []
        self.num_bad = 0
        self.num_late = 0
        firsts = [self._first(path, block_tokens) for path in paths]
        sizes = {size for size, _ in firsts}
        if len(sizes) > 1:
            raise InputError(
                f"the files have blocks of {' and '.join(map(str, sorted(sizes)))} tokens; "
                "read those of one size together"
            )
        self.block_tokens = sizes.pop()
        self.paths = tuple(paths[at] for at in sorted(range(len(paths)), key=lambda at: firsts[at]))

    def __iter__(self) -> Iterator[TraceRequest]:
        self.complaints, self.num_bad, self.num_late = [], 0, 0
        start: float | None = None
        latest = 0.0
        for path in self.paths:
            for number, line in self._lines(path):
                try:
                    request = read_request(parse_object(line), self.block_tokens)
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

    def _first(self, path: Path, told: int | None) -> tuple[int, float]:
        """Return the tokens per block of a file, and the time of its first request."""
        for number, line in self._lines(path):
            try:
                found = parse_object(line)
                if "hash_ids" not in found:
                    raise BadLineError(
                        "no hash_ids: this is no trace that kvferry knows (docs/traces.md)"
                    )
                usual = told or MOONCAKE_BLOCK_TOKENS
                size = _count(found, "block_tokens", default=usual, least=1)
                if told not in (None, size):
                    raise BadLineError(f"its blocks have {size} tokens, not the {told} you say")
                return size, _seconds(found)
            except BadLineError as error:
                raise InputError(f"{path}, line {number}: {error}") from None
        raise InputError(f"{path} is empty: there is no request in it")

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, with their numbers."""
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
