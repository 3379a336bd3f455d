"""Who measures what, and when: the processes of one shape, and the order of their work."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from connectors.case import Case
from connectors.child import Child, ChildError
from connectors.engine import PROFILES, variables
from connectors.loads import Load

PEER_ROUNDS = 1
"""Rounds of the load that fits the device, for connectors other than kvferry."""

Result = dict[str, Any]


def read_case(text: str) -> Case:
    fields = json.loads(text)
    loads = {name: Load(**fields[name]) for name in ("over", "fits")}
    return Case(**(fields | loads))


@dataclass(frozen=True)
class Amount:
    """What is measured on a shape, and how often. Without rounds that fit, none has no engine."""

    sections: tuple[str, ...]
    fits_rounds: int
    over_rounds: int

    def rounds_of(self, connector: str) -> int:
        """Of the load that fits; kvferry's cost is the one that is claimed to be small."""
        own = connector in ("kvferry", "idle")
        return self.fits_rounds if own else min(self.fits_rounds, PEER_ROUNDS)


@dataclass(frozen=True)
class Part:
    """One shape, and who is measured on it."""

    case: Case
    connectors: tuple[str, ...]
    amount: Amount

    @property
    def has_base(self) -> bool:
        return self.amount.fits_rounds > 0

    def seats(self) -> list[tuple[str, bool]]:
        """Connectors in the order of their turns, and whether each only starts.

        kvferry's very first start in a run measures the card.
        """
        turns = [(name, False) for name in self.connectors]
        if self.has_base:
            is_timed = "kvferry" in self.connectors and "start" in self.amount.sections
            turns = [("none", False), *([("kvferry", True)] if is_timed else []), *turns]
        return turns


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
        self._environment = environment()
        self._data = data
        self._keep = keep
        self._seconds = seconds
        self._began = time.monotonic()

    def measure(self, parts: Sequence[Part]) -> None:
        """One part after the other, with the imports of all of them done before."""
        rooms = [
            (part, [self._seat(replace(part.case, connector=c), only) for c, only in part.seats()])
            for part in parts
        ]
        try:
            for _, seats in rooms:
                for seat in seats:
                    seat.child.tell("load")
            for _, seats in rooms:
                for seat in seats:
                    seat.result["import_s"] = seat.child.hear()
            for part, seats in rooms:
                self._part(part, seats)
        finally:
            for _, seats in rooms:
                for seat in seats:
                    seat.child.end()

    def _part(self, part: Part, seats: list[Seat]) -> None:
        if part.has_base:
            self._one_by_one(seats[0], seats[1:], part.amount)
        else:
            self._side_by_side(seats, part.amount)

    def _is_late(self, seat: Seat) -> bool:
        is_late = bool(self._seconds) and time.monotonic() - self._began > self._seconds
        if is_late:
            case = seat.result["case"]
            self._data["left_out"].append(f"{case['connector']} on {case['shape']}")
        return is_late

    def _one_by_one(self, plain: Seat, seats: Sequence[Seat], amount: Amount) -> None:
        """Each connector's engine in turn: two would not get the same host memory.

        The one without a connector lives as long as this lasts.
        """
        base: Seat | None = plain
        try:
            self._enter(plain)
            self._measure_plain(plain, amount)
        except ChildError as error:
            self._fail(plain, error)
            base = None
        for seat in seats:
            if not self._is_late(seat):
                self._visit(seat, base, amount)
        if base is not None:
            base.end()

    def _side_by_side(self, seats: Sequence[Seat], amount: Amount) -> None:
        """All engines at once, in turns as short as can be. Needs the host memory of all."""
        here = [seat for seat in seats if not self._is_late(seat)]
        here = self._each(here, self._enter)
        serving = [seat for seat in here if not seat.only_starts and seat.connector != "idle"]
        if "ttft" in amount.sections:
            for step in _first_tokens(seats[0].result["case"]["rounds"]):
                serving = self._each(serving, step)
        for seat in serving:
            self._each([seat], lambda seat: self._measure_rest(seat, amount))
        for seat in here:
            seat.end()
        self._keep()

    def _each(self, seats: Sequence[Seat], step: Callable[[Seat], Any]) -> list[Seat]:
        """Those who could; whatever happens to one, the others have their turn."""
        able = []
        for seat in seats:
            try:
                step(seat)
                able.append(seat)
            except ChildError as error:
                self._fail(seat, error)
        return able

    def _measure_plain(self, base: Seat, amount: Amount) -> None:
        if "ttft" in amount.sections:
            for step in _first_tokens(0):
                step(base)
        if "over" in amount.sections:
            base.note_round("over", 0)
        self._keep()

    def _seat(self, case: Case, only_starts: bool) -> Seat:
        text = json.dumps(asdict(case))
        told = variables(case.connector, case.pool_bytes)
        child = Child([*self._command, "--case", text], self._environment | told)
        return Seat(child, {"case": asdict(case), "only_starts": only_starts}, only_starts)

    def _enter(self, seat: Seat) -> None:
        self._data["runs"].append(seat.result)
        seat.note("start")
        if not seat.only_starts:
            seat.note("warm")

    def _visit(self, seat: Seat, base: Seat | None, amount: Amount) -> None:
        """Everything about one connector."""

        def visit(seat: Seat) -> None:
            self._enter(seat)
            if not seat.only_starts:
                self._measure(seat, base, amount)

        self._each([seat], visit)
        seat.end()
        self._keep()

    def _measure(self, seat: Seat, base: Seat | None, amount: Amount) -> None:
        if "fits" in amount.sections and base is not None:
            self._compare(seat, base, amount.rounds_of(seat.connector))
        if "hooks" in amount.sections and amount.fits_rounds:
            seat.result["hooks"] = seat.ask("hooks", 1000)
        if "toggled" in amount.sections and amount.fits_rounds and seat.connector == "kvferry":
            seat.result["toggled"] = seat.ask("toggled", amount.fits_rounds)
        if "ttft" in amount.sections and seat.connector != "idle":
            for step in _first_tokens(seat.result["case"]["rounds"]):
                step(seat)
        self._measure_rest(seat, amount)

    def _measure_rest(self, seat: Seat, amount: Amount) -> None:
        if "bytes" in amount.sections and seat.connector in ("kvferry", "LMCacheConnectorV1"):
            seat.note("bytes")
        for number in range(amount.over_rounds if "over" in amount.sections else 0):
            seat.note_round("over", number)
        seat.note("counted")

    def _compare(self, seat: Seat, base: Seat, rounds: int) -> None:
        """In turn, and one more without: every round has a neighbour on both sides.

        A first round of each is not counted. Both forget before either serves, so that a round of
        the one comes right behind a round of the other: on a card that another process has just
        used, decode steps take 3 to 4% less than on one that only served their own (one NVIDIA
        H200, docs/benchmarks/first-token.md). A connector that stores something in between would
        lose that.
        """
        pairs = seat.result.setdefault("fits", {"own": [], "none": []})
        if not rounds:
            return
        for number in range(-1, rounds + 1):
            seat.ask("forget")
            base.ask("forget")
            none = base.ask("fits", number)
            own = seat.ask("fits", number) if number < rounds else None
            if number >= 0:
                pairs["none"].append(none)
            if number >= 0 and own is not None:
                pairs["own"].append(own)
            self._keep()

    def _fail(self, seat: Seat, error: ChildError) -> None:
        seat.result["error"] = str(error)
        print(f"== {seat.connector}: {error}", flush=True)
        self._keep()


def _first_tokens(rounds: int) -> Iterator[Callable[[Seat], Any]]:
    """What one engine is asked for its times to first token, or several are by turns."""
    yield partial(Seat.ask, order="ttft_begin")
    for number in range(rounds):
        yield partial(Seat.ask, order="ttft_round", about=number)

    def end(seat: Seat) -> None:
        seat.result["ttft"] = seat.ask("ttft_end")

    yield end


def environment() -> dict[str, str]:
    """For all processes of a run: kvferry's first start in it finds no profile of this card."""
    return os.environ | {
        PROFILES: tempfile.mkdtemp(prefix="bench-vllm-profiles-"),
        # The engine in the process that times it: no message between the two is measured.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
