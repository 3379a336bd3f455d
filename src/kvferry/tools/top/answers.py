"""The JSON answers of an endpoint, read into dataclasses whose types are checked."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from kvferry.tools.words import clip

T = TypeVar("T")

MOST_BYTES = 4 << 20
MOST_ROWS = 1024
_MOST_TEXT = 4000
_LARGEST = 1 << 63


@dataclass(frozen=True)
class AnswerDecision:
    """The choice between load and compute, and the expected times."""

    verdict: str = ""
    load_seconds: float | None = None
    compute_seconds: float | None = None


@dataclass(frozen=True)
class AnswerExplanation:
    """The hits of a request and its first miss."""

    asked_tokens: int
    device_tokens: int
    host_tokens: int
    reason: str
    lower_tokens: int = 0
    first_missing: int | None = None
    decision: AnswerDecision = AnswerDecision()
    asked_blocks: int = 0
    tiers_away: tuple[str, ...] = ()


@dataclass(frozen=True)
class Copied:
    """One copy for a request."""

    src: str
    dst: str
    num_blocks: int
    num_bytes: int
    seconds: float
    paths: tuple[str, ...] = ()
    reason: str = ""
    why: str = ""


@dataclass(frozen=True)
class Explained:
    """The answer about one request."""

    request_id: str
    explanation: AnswerExplanation | None = None
    others: tuple[str, ...] = ()
    copies: tuple[Copied, ...] = ()
    hints: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    overlap: str = ""


@dataclass(frozen=True)
class RecentRequest:
    """One of the latest requests. None stands for an unknown value."""

    request_id: str
    reason: str | None = None
    asked_tokens: int | None = None
    host_tokens: int | None = None


@dataclass(frozen=True)
class Recent:
    """The latest requests, the latest first, and why tiers cannot be used now."""

    requests: tuple[RecentRequest, ...] = ()
    tiers_away: dict[str, str] = field(default_factory=dict)


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object whose numbers are finite. Raises ValueError for anything else."""
    if len(body) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
    try:
        answer = json.loads(body, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
    if not isinstance(answer, dict):
        raise ValueError(f"{clip(type(answer).__name__)} instead of an object")
    return answer


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{clip(text, 20)} is not a finite number")
    return value


def read_as(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Read one dataclass. Members that are missing or null have their defaults.

    Raises:
        ValueError: A member has another type than its field. The message names the member.
    """
    found = {}
    for name, (expected, is_needed) in _members(cast("Hashable", kind)).items():
        value = values.get(name)
        if value is not None:
            found[name] = _member(expected, value, f"{where}{name}")
        elif is_needed:
            raise ValueError(f"{where}{name} is missing")
    return kind(**found)


@cache
def _members(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether an answer must have it."""
    hints = get_type_hints(kind)
    return {
        each.name: (hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in dataclasses.fields(kind)
    }


def _member(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _member(next(each for each in inner if each is not NoneType), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return read_as(kind, value, f"{where}.")  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        rows = enumerate(value[:MOST_ROWS])
        return tuple(_member(inner[0], each, f"{where}[{n}]") for n, each in rows)
    if origin is dict and isinstance(value, dict):
        return {
            name[:_MOST_TEXT]: each if inner[1] is Any else _member(inner[1], each, where)
            for name, each in list(value.items())[:MOST_ROWS]
        }
    if kind is str and isinstance(value, str):
        return value[:_MOST_TEXT]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in (int, float) and is_number and 0 <= value <= _LARGEST and value == kind(value):
        return kind(value)
    raise ValueError(f"{where} has a wrong type or value")
