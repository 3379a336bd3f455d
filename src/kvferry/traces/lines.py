"""One line of a trace, in each of the formats: read, or refused with what is wrong.

::

    Mooncake   {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
    ours       {"kvferry_trace": 1, "block_tokens": 128}                      the first line
               {"time": 27.482, "keys": "AQAAAAAAAAA=", "input": 200, "output": 52}
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from kvferry.errors import ConfigError, InputError
from kvferry.hints import Hints
from kvferry.quantities import quoted
from kvferry.traces.request import Numbers, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
"""What one of its hash ids covers."""

VERSION = 1
MARK = "kvferry_trace"
NUMBER_BYTES = 8
_HINTS = ("over", "goes_on", "keep_seconds", "tenant")
_MOST_TOKENS = 1 << 40
_MOST_SECONDS = 1e10
_MOST_NUMBER = (1 << 64) - 1


class BadLineError(InputError):
    """A line that is no request; the message says what is wrong with it."""


class TraceFormat(Enum):
    """Who writes such lines."""

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
        raise BadLineError(f"no JSON: {_short(error)}") from None
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
        return TraceHeader(
            TraceFormat.OURS,
            own,
            recording if isinstance(recording, str) else "",
            _count(first, "part", default=0),
        )
    if "hash_ids" in first:
        return TraceHeader(TraceFormat.MOONCAKE, block_tokens or MOONCAKE_BLOCK_TOKENS)
    raise BadLineError(
        f"neither {MARK} nor hash_ids: this is no trace that kvferry knows (docs/traces.md)"
    )


def read_request(found: dict[str, Any], header: TraceHeader) -> TraceRequest:
    """The request on one line."""
    if header.format is TraceFormat.MOONCAKE:
        return _read_mooncake(found, header.block_tokens)
    return _read_ours(found, header.block_tokens)


def _read_mooncake(found: dict[str, Any], block_tokens: int) -> TraceRequest:
    ids = found.get("hash_ids")
    if not isinstance(ids, list):
        raise BadLineError(f"hash_ids must be a list of numbers, got {quoted(ids)}")
    return _request(
        _seconds(found, "timestamp") / 1000,
        _numbers(ids),
        _count(found, "input_length"),
        _count(found, "output_length", default=0),
        block_tokens,
    )


def _read_ours(found: dict[str, Any], block_tokens: int) -> TraceRequest:
    text = found.get("keys")
    if not isinstance(text, str):
        raise BadLineError(f"keys must be base64 of 8 bytes for each block, got {quoted(text)}")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadLineError(f"keys is no base64: {_short(error)}") from None
    if len(raw) % NUMBER_BYTES:
        raise BadLineError(f"keys has {len(raw)} bytes, which are no blocks of {NUMBER_BYTES}")
    return _request(
        _seconds(found, "time"),
        np.frombuffer(raw, dtype="<u8").astype(np.uint64, copy=False),
        _count(found, "input"),
        _count(found, "output", default=0),
        block_tokens,
        hit_tokens=_count(found, "hit") if "hit" in found else None,
        hints=_hints(found),
    )


def _request(
    at: float,
    numbers: Numbers,
    input_tokens: int,
    output_tokens: int,
    block_tokens: int,
    *,
    hit_tokens: int | None = None,
    hints: Hints | None = None,
) -> TraceRequest:
    # The last block, where the prompt only begins it, may be named or not; none else may be left
    # out: tokens that no block has would count among those that are asked for.
    num_full, most = input_tokens // block_tokens, -(-input_tokens // block_tokens)
    if not num_full <= len(numbers) <= most:
        raise BadLineError(
            f"{len(numbers)} blocks for {input_tokens} tokens, which are {most} blocks of "
            f"{block_tokens}; say another block size (--block-tokens)"
        )
    if len(np.unique(numbers)) < len(numbers):
        raise BadLineError("it names a block twice; a chain never repeats")
    return TraceRequest(at, numbers, num_full, input_tokens, output_tokens, hit_tokens, hints)


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
    if not said:
        return None
    try:
        return Hints.read(said)
    except (ConfigError, InputError) as error:
        raise BadLineError(str(error)) from None


def _short(error: Exception) -> str:
    return str(error)[:100]
