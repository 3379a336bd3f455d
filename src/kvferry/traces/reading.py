"""Reads traces from files, plain or gzipped, line by line: what is wrong is counted and named."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, cast

from kvferry.errors import InputError
from kvferry.traces.lines import BadLineError, TraceHeader, parse_object, read_header, read_request
from kvferry.traces.request import TraceRequest

_MOST_LINE = 32 << 20
_MOST_NAMED = 5
_GZIP = b"\x1f\x8b"


class TraceReader:
    """The requests of one trace, in as many files as it has; read as often as you like.

    Files are read in the order given, those of one recording in the order they were written.

    Owns what was found wrong: ``num_bad`` lines that are no requests were left out, the first few
    of them are in ``complaints``, each with its file and line. Time never goes back: a request that
    says it came before the one above it came with it (``num_late``). One line is in memory at a
    time.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        block_tokens: int | None = None,
        strict: bool = False,
    ) -> None:
        """``block_tokens`` for formats that do not say it; ``strict`` raises at a bad line."""
        if not paths:
            raise InputError("no trace was named")
        self.paths = tuple(paths)
        self.strict = strict
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
        if self.strict:
            raise InputError(words)
        self.num_bad += 1
        if len(self.complaints) < _MOST_NAMED:
            self.complaints.append(words)


def _open(path: Path) -> IO[bytes]:
    try:
        file = BufferedReader(FileIO(path), 1 << 20)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if file.peek(2)[:2] == _GZIP:
        return cast("IO[bytes]", _Unzipped(file))
    return file


class _Unzipped(gzip.GzipFile):
    """A gzipped file that closes what it reads from."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(fileobj=raw, mode="rb")
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()
