"""The Prometheus text format, read line by line: only what kvferry counts, and with bounds.

vLLM's endpoint has thousands of lines about other things; they are not even looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kvferry.metrics.catalog import PREFIX
from kvferry.watch.words import said

MOST_LINES = 100_000
MOST_LINE = 16 << 10
LARGEST = float(1 << 63)

_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{(.*)\})?"
    r"[ \t]*(?<=[\s}])([^\s{}]+)(?:[ \t]+-?[0-9]+)?[ \t]*"
)
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", '"': '"', "\\": "\\"}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NOT_NUMBERS = {"nan", "inf", "+inf", "-inf"}


class Line(NamedTuple):
    """One value of one series, under the name it has there. None: it says that it has none."""

    name: str
    labels: dict[str, str]
    value: float | None


def lines(text: str) -> Iterator[Line]:
    """Every line about us, buckets left out; ValueError says what is wrong with one."""
    if text and not text.endswith("\n"):
        raise ValueError("it ends in the middle of a line")
    count = 0
    for line in text.split("\n"):
        if PREFIX not in line or line.startswith("#"):
            continue
        count += 1
        if count > MOST_LINES:
            raise ValueError(f"it has more than {MOST_LINES:,} lines about kvferry")
        if len(line) > MOST_LINE:
            raise ValueError(f"it has a line of {len(line):,} characters: {said(line, 40)}")
        if "_bucket{" not in line:
            yield _read(line)


def _read(line: str) -> Line:
    found = _SAMPLE.fullmatch(line.strip(" \t\r"))
    if found is None:
        raise ValueError(f"{said(line, 80)!r} is no line of it")
    name, labels, value = found.groups()
    return Line(name, _labels(labels or ""), _number(value))


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None or found[1] in labels:
            raise ValueError(f"{said(text, 80)!r} are no labels")
        labels[found[1]] = _ESCAPE.sub(lambda e: _ESCAPED.get(e[1], e[0]), found[2])
        at = found.end()
    return labels


def _number(text: str) -> float | None:
    """None for what no count or size of ours can be: not a number, endless, below zero, huge."""
    if text.lower() in _NOT_NUMBERS:
        return None
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{said(text, 40)!r} is no number")
    value = float(text)
    return value if 0 <= value <= LARGEST else None
