"""What a check found: one line, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Grade(Enum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"  # it works, but slower or with less than it could
    FAIL = "fail"  # it will not work as configured


@dataclass(frozen=True)
class Finding:
    """One line of the report. A finding that is not ok says what to do about it."""

    name: str
    grade: Grade
    words: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.grade is not Grade.OK and not self.remedy:
            raise ValueError(f"finding {self.name!r} is {self.grade.value} and names no remedy")


def ok(name: str, words: str) -> Finding:
    return Finding(name, Grade.OK, words)


def warn(name: str, words: str, remedy: str) -> Finding:
    return Finding(name, Grade.WARN, words, remedy)


def fail(name: str, words: str, remedy: str) -> Finding:
    return Finding(name, Grade.FAIL, words, remedy)
