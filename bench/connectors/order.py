"""Who measures what, and when: the processes of one shape, and the order of their work."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from connectors.case import Case
from connectors.child import Child, ChildError
from connectors.loads import Load

PEER_ROUNDS = 3
"""Rounds of the load that fits the device, for connectors other than kvferry."""

Result = dict[str, Any]


def read_case(text: str) -> Case:
    fields = json.loads(text)
    loads = {name: Load(**fields[name]) for name in ("over", "fits")}
    return Case(**(fields | loads))


@dataclass(frozen=True)
class Amount:
    """What is measured on a shape, and how often."""

    sections: tuple[str, ...]
    fits_rounds: int
    over_rounds: int
    starts_again: bool

    def rounds_of(self, connector: str) -> int:
        """Of the load that fits; kvferry's cost is the one that is claimed to be small."""
        own = connector in ("kvferry", "idle")
        return self.fits_rounds if own else min(self.fits_rounds, PEER_ROUNDS)


@dataclass
class Seat:
    """A process and what it has found."""

    child: Child
    result: Result
    only_starts: bool
    laps: dict[str, float] = field(default_factory=dict)

    @property
    def connector(self) -> str:
        return str(self.result["case"]["connector"])

    def ask(self, order: str, about: Any = None) -> Any:
        began = time.monotonic()
        found = self.child.ask(order, about)
        self.laps[order] = self.laps.get(order, 0.0) + time.monotonic() - began
        return found

    def note(self, order: str) -> None:
        self.result[order] = self.ask(order)

    def note_round(self, order: str, number: int) -> None:
        self.result.setdefault(order, []).append(self.ask(order, number))

    def end(self) -> None:
        self.laps["end"] = self.child.end()
        laps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.laps.items())
        print(f"== {self.connector} on {self.result['case']['shape']}: {laps} s", flush=True)


class Run:
    """Owns the processes of a run and ``data``, what they found."""

    def __init__(
        self, command: list[str], data: Result, *, keep: Callable[[], None], seconds: float
    ) -> None:
        self._command = command
        self._environment = _environment()
        self._data = data
        self._keep = keep
        self._seconds = seconds
        self._began = time.monotonic()

    def shape(self, case: Case, connectors: Sequence[str], amount: Amount) -> None:
        """One engine without a connector for as long as this lasts, and each connector's beside.

        One connector at a time: two would not get the same host memory.
        """
        base, *others = self._seats(case, connectors, amount)
        try:
            self._enter(base)
            if "ttft" in amount.sections:
                base.note("ttft")
            if "over" in amount.sections:
                base.note_round("over", 0)
            self._keep()
            for seat in others:
                if self._seconds and time.monotonic() - self._began > self._seconds:
                    self._data["left_out"].append(f"{seat.connector} on {case.shape}")
                else:
                    self._visit(seat, base, amount)
        except ChildError as error:
            self._fail(base, error)
        finally:
            for seat in (base, *others):
                seat.child.end()

    def _seats(self, case: Case, connectors: Sequence[str], amount: Amount) -> list[Seat]:
        """All processes, with their imports done."""
        seats = [self._seat(replace(case, connector=c), False) for c in ("none", *connectors)]
        if amount.starts_again:
            # kvferry's very first start measures the card; the last ones show how starts differ.
            first = ["kvferry"] if "kvferry" in connectors else []
            seats[1:1] = [self._seat(replace(case, connector=c), True) for c in first]
            seats += [self._seat(replace(case, connector=c), True) for c in (*connectors, "none")]
        for seat in seats:
            seat.child.tell("load")
        for seat in seats:
            seat.result["import_s"] = seat.child.hear()
        return seats

    def _seat(self, case: Case, only_starts: bool) -> Seat:
        text = json.dumps(asdict(case))
        child = Child([*self._command, "--case", text], self._environment)
        return Seat(child, {"case": asdict(case), "only_starts": only_starts}, only_starts)

    def _enter(self, seat: Seat) -> None:
        self._data["runs"].append(seat.result)
        seat.note("start")
        if not seat.only_starts:
            seat.note("warm")

    def _visit(self, seat: Seat, base: Seat, amount: Amount) -> None:
        """Everything about one connector. Whatever happens to it, the others have their turn."""
        try:
            self._enter(seat)
            if not seat.only_starts:
                self._measure(seat, base, amount)
        except ChildError as error:
            self._fail(seat, error)
        seat.end()
        self._keep()

    def _measure(self, seat: Seat, base: Seat, amount: Amount) -> None:
        if "fits" in amount.sections:
            self._compare(seat, base, amount.rounds_of(seat.connector))
        if "hooks" in amount.sections and amount.fits_rounds:
            seat.result["hooks"] = seat.ask("hooks", 1000)
        for name in ("ttft", "bytes"):
            if name in amount.sections and seat.connector != "idle":
                seat.note(name)
        for number in range(amount.over_rounds if "over" in amount.sections else 0):
            seat.note_round("over", number)
        seat.note("counted")

    def _compare(self, seat: Seat, base: Seat, rounds: int) -> None:
        """In turn, and one more without: every round has a neighbour on both sides."""
        pairs = seat.result.setdefault("fits", {"own": [], "none": []})
        for number in range(rounds):
            pairs["none"].append(base.ask("fits", number))
            pairs["own"].append(seat.ask("fits", number))
            self._keep()
        if rounds:
            pairs["none"].append(base.ask("fits", rounds))

    def _fail(self, seat: Seat, error: ChildError) -> None:
        seat.result["error"] = str(error)
        print(f"== {seat.connector}: {error}", flush=True)
        self._keep()


def _environment() -> dict[str, str]:
    """For all processes of a run: kvferry's first start in it finds no profile of this card."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return os.environ | {
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(cache / "vllm")),
        "XDG_CACHE_HOME": tempfile.mkdtemp(prefix="bench-vllm-cache-"),
        # The engine in the process that times it: no message between the two is measured.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
