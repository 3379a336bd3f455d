"""Hands every request to who learns from it: once it was answered, and again when it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry import reach
from kvferry.config import Config
from kvferry.hints import Hints
from kvferry.keys import Keys
from kvferry.observed import TIMES, MemoryCurve, ObservedRequest, Observer, Recorder, TierSizes
from kvferry.observed.curve import Points
from kvferry.observed.observer import Student
from kvferry.policy import policy_named
from kvferry.pool import Pool
from kvferry.scheduler.level import Level, WriteMode
from kvferry.scheduler.matching import Matcher
from kvferry.scheduler.why import Explanation
from kvferry.types import HOST

if TYPE_CHECKING:
    from kvferry.scheduler.request import Request


Noted = tuple[float, Keys, Explanation, Hints | None]
"""When a request was answered, its keys, what it was told, and what was said of it."""


class Observing:
    """Owns the observer, and which requests of those it was told of are under way."""

    def __init__(
        self,
        students: Sequence[Student],
        curve: MemoryCurve | None,
        *,
        wants_ends: bool,
        hash_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """``wants_ends``: whether anybody wants to know how long answers are."""
        self.wants_ends = wants_ends
        self._observer: Observer[Noted | ObservedRequest] = Observer(students, self._read)
        self._see = self._observer.see
        self._curve = curve
        self._hash_tokens = hash_tokens
        self._clock = clock
        self._open: dict[Request, ObservedRequest] = {}

    @property
    def curve(self) -> Points:
        """What other sizes of each tier would hit, as far as is known."""
        return self._curve.points if self._curve is not None else {}

    def answered(self, request: Request, explanation: Explanation) -> None:
        """A request was looked up for the first time, and this is what it was told."""
        self.note(self._clock(), request.chain.keys(), request, explanation)

    def note(self, at: float, keys: Keys, request: Request, explanation: Explanation) -> None:
        """The same, where it was ``at`` this time that it asked for these."""
        noted = (at, keys, explanation, request.hints)
        if self.wants_ends:  # how long its answer is will be written into what is handed over
            seen = self._open[request] = self._read(noted)
            self._see(seen)
        else:
            self._see(noted)

    def _read(self, noted: Noted | ObservedRequest) -> ObservedRequest:
        """On the observer's thread, mostly: the engine's has no time for it."""
        if isinstance(noted, ObservedRequest):
            return noted
        at, keys, told, hints = noted
        tokens, found = told.asked_tokens, told.device_tokens + told.host_tokens
        return ObservedRequest(at, keys, tokens // self._hash_tokens, tokens, found, hints)

    def ended(self, request: Request) -> None:
        """A request is over: what its chain has grown by is its answer.

        A chain that has not grown says nothing of it: the library's are those of prompts alone.
        """
        seen = self._open.pop(request, None)
        if seen is not None:
            grown = len(request.chain) * self._hash_tokens - seen.tokens
            seen.end(grown if grown > 0 else None)

    def close(self) -> None:
        self._observer.close()


def observing(
    config: Config,
    pool: Pool,
    levels: Sequence[Level],
    matcher: Matcher,
    clock: Callable[[], float],
) -> Observing | None:
    """As the settings say; None where nobody wants to learn. ConfigError if a file cannot be."""
    students: list[Student] = []
    hash_tokens = matcher.hash_tokens
    curve = None
    if config.memory_curve == "on":
        tiers = _tiers(pool, levels, matcher.groups, hash_tokens, config.level_policy)
        curve = MemoryCurve(tiers, policy_named(config.policy), block_tokens=hash_tokens)
        students.append(curve)
    if config.record is not None:
        recorder = Recorder(
            Path(config.record),
            block_tokens=hash_tokens,
            most_bytes=config.record_size,
            now=clock(),
        )
        students.append(recorder)
    if not students:
        return None
    return Observing(
        students,
        curve,
        wants_ends=config.record is not None,
        hash_tokens=hash_tokens,
        clock=clock,
    )


def _tiers(
    pool: Pool,
    levels: Sequence[Level],
    groups: Sequence[reach.Group],
    hash_tokens: int,
    level_policy: str,
) -> list[TierSizes]:
    """How many blocks of a chain each tier and those above it hold, by how large it is."""
    slots_each = sum(hash_tokens / group.block_tokens for group in groups)
    above = pool.num_slots / slots_each
    sizes = [above * times for times in TIMES]
    tiers = [TierSizes(HOST, tuple(sizes), feeds_below=bool(levels))]
    for level in levels:
        if level.pool is None:
            continue  # it knows itself how much it holds
        own = level.pool.num_slots / slots_each
        # What is written through lies below as well; what is spilled hardly ever does.
        sizes = [
            max(above, own * times) if level.write is WriteMode.THROUGH else above + own * times
            for times in TIMES
        ]
        tiers.append(TierSizes(level.name, tuple(sizes), policy_named(level_policy)))
        above = sizes[TIMES.index(1.0)]
    return tiers
