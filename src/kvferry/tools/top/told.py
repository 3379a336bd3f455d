"""What an endpoint tells of requests, checked: whoever shows it need not fear its shape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvferry.tools.words import said

T = TypeVar("T")

MOST_BYTES = 4 << 20
MOST_ROWS = 1024
_MOST_TEXT = 4000
_LARGEST = 1 << 63


@dataclass(frozen=True)
class RecentRequest:
    """One of the latest requests; None is what its engine does not know of it."""

    request_id: str
    reason: str | None
    asked_tokens: int | None
    host_tokens: int | None


@dataclass(frozen=True)
class Why:
    """Why a request got no more than it did."""

    asked_tokens: int
    device_tokens: int
    host_tokens: int
    lower_tokens: int
    first_missing: int | None
    reason: str
    verdict: str
    load_seconds: float | None
    compute_seconds: float | None
    asked_blocks: int = 0
    tiers_away: tuple[str, ...] = ()


@dataclass(frozen=True)
class Copied:
    """One copy that was made for a request."""

    src: str
    dst: str
    num_blocks: int
    num_bytes: int
    seconds: float
    paths: tuple[str, ...]
    reason: str
    why: str


@dataclass(frozen=True)
class Told:
    """All that is remembered of one request."""

    request_id: str
    why: Why | None
    others: tuple[str, ...]
    copies: tuple[Copied, ...]
    hints: str = ""
    refused: tuple[str, ...] = ()
    overlap: str = ""


def read_json(body: bytes) -> dict[str, Any]:
    """A JSON object, with numbers that are numbers; ValueError where it is something else."""
    if len(body) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
    try:
        answer = json.loads(body, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
    if not isinstance(answer, dict):
        raise ValueError(f"{said(type(answer).__name__)} where an object should be")
    return answer


def read_rows(answer: Mapping[str, Any]) -> list[RecentRequest]:
    """The latest requests, the latest first."""
    return [
        RecentRequest(
            row.text("request_id"),
            row.maybe_text("reason"),
            row.maybe_count("asked_tokens"),
            row.maybe_count("host_tokens"),
        )
        for row in _ToldFields(answer, "").rows("requests")
    ]


def read_away(answer: Mapping[str, Any]) -> dict[str, str]:
    """The tiers that cannot be used now, and why."""
    away = _ToldFields(answer, "").fields("tiers_away")
    return away.all_texts() if away is not None else {}


def read_told(answer: Mapping[str, Any]) -> Told:
    """One request."""
    told = _ToldFields(answer, "")
    why = told.fields("explanation")
    return Told(
        request_id=told.text("request_id"),
        why=None if why is None else _why(why),
        others=told.texts("others"),
        copies=tuple(_copied(copy) for copy in told.rows("copies")),
        hints=told.as_text("hints"),
        refused=told.texts("refused"),
        overlap=told.maybe_text("overlap") or "",
    )


def _why(why: _ToldFields) -> Why:
    decision = why.fields("decision") or _ToldFields({}, "")
    return Why(
        asked_tokens=why.count("asked_tokens"),
        device_tokens=why.count("device_tokens"),
        host_tokens=why.count("host_tokens"),
        lower_tokens=why.maybe_count("lower_tokens") or 0,
        first_missing=why.maybe_count("first_missing"),
        reason=why.text("reason"),
        verdict=decision.maybe_text("verdict") or "",
        load_seconds=decision.maybe_number("load_seconds"),
        compute_seconds=decision.maybe_number("compute_seconds"),
        asked_blocks=why.maybe_count("asked_blocks") or 0,
        tiers_away=why.texts("tiers_away"),
    )


def _copied(copy: _ToldFields) -> Copied:
    return Copied(
        src=copy.text("src"),
        dst=copy.text("dst"),
        num_blocks=copy.count("num_blocks"),
        num_bytes=copy.count("num_bytes"),
        seconds=copy.number("seconds"),
        paths=copy.texts("paths"),
        reason=copy.maybe_text("reason") or "",
        why=copy.maybe_text("why") or "",
    )


class _ToldFields:
    """One JSON object, its members read by the type they must have; ValueError names the place."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def text(self, name: str) -> str:
        return self._must(name, self.maybe_text(name))

    def count(self, name: str) -> int:
        return self._must(name, self.maybe_count(name))

    def number(self, name: str) -> float:
        return self._must(name, self.maybe_number(name))

    def maybe_text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value if value is None else value[:_MOST_TEXT]

    def maybe_count(self, name: str) -> int | None:
        value = self.maybe_number(name)
        if value is not None and value != int(value):
            raise self._wrong(name, "a whole number")
        return value if value is None else int(value)

    def maybe_number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, "a number")
        if not 0 <= value <= _LARGEST:
            raise self._wrong(name, "a number that can be")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "a list of texts")
        return tuple(value[:_MOST_TEXT] for value in values)

    def as_text(self, name: str) -> str:
        """A member that is an object of any shape, to be read by people."""
        value = self.fields(name)
        return json.dumps(value._values)[:_MOST_TEXT] if value is not None else ""

    def all_texts(self) -> dict[str, str]:
        """Every member, where all are texts."""
        names = [name[:_MOST_TEXT] for name in list(self._values)[:MOST_ROWS]]
        return {name: self.text(name) for name in names if name in self._values}

    def fields(self, name: str) -> _ToldFields | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return _ToldFields(value, f"{self._where}{name}.")

    def rows(self, name: str) -> list[_ToldFields]:
        values = self._list(name)
        if not all(isinstance(value, dict) for value in values):
            raise self._wrong(name, "a list of objects")
        return [_ToldFields(value, f"{self._where}{name}[{n}].") for n, value in enumerate(values)]

    def _list(self, name: str) -> list[Any]:
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value[:MOST_ROWS]

    def _must(self, name: str, value: T | None) -> T:
        if value is None:
            raise self._wrong(name, "there")
        return value

    def _wrong(self, name: str, expected: str) -> ValueError:
        return ValueError(f"{self._where}{name} should be {expected}")


def _no_number(word: str) -> float:
    raise ValueError(f"{word} where a number should be")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{said(text, 20)} is too large a number")
    return value
