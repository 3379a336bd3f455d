"""Blocks brought up for requests that still wait for their turn.

::

    request comes ──> waits in the engine's queue ──> its turn: match finds its blocks in the host
       prefetch         within a share of the host
                        └── its turn does not come in time, or it is gone: its blocks go first
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry import reach
from kvferry.scheduler.parts import Parts
from kvferry.scheduler.prefetch import Prefetch
from kvferry.scheduler.request import Request

AHEAD_SHARE = 8
"""Blocks of waiting requests may take one host slot in so many: they must not flush it."""

AHEAD_SECONDS = 30.0
"""What was brought up and is not asked for by then goes before anything else."""

_MOST_REQUESTS = 256
_LAST = 0  # no priority is lower


@dataclass(eq=False)
class _Early:
    """One waiting request's blocks. ``until`` is None as long as some are still to come."""

    prefetch: Prefetch
    until: float | None = None


class Ahead:
    """Fetches for those who wait, the first first. Owns what was fetched and is not used yet."""

    def __init__(self, parts: Parts, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._clock = clock
        self._most_slots = parts.pool.num_slots // AHEAD_SHARE
        self._asked: dict[Request, None] = {}  # nothing is fetched for them yet, oldest first
        self._early: dict[Request, _Early] = {}

    @property
    def is_busy(self) -> bool:
        """Whether there is something to :meth:`advance` with every plan."""
        return bool(self._asked or self._early)

    @property
    def num_slots(self) -> int:
        """Host slots that hold, or will hold, blocks nobody has asked for yet."""
        return sum(early.prefetch.num_slots for early in self._early.values())

    def ask(self, request: Request) -> None:
        """This one will be matched soon; more than can be served are not remembered."""
        is_known = request.is_counted or request in self._early
        if self._parts.lower.levels and not is_known and len(self._asked) < _MOST_REQUESTS:
            self._asked[request] = None

    def advance(self) -> None:
        """Order what comes next, let go of what was not used in time."""
        now = self._clock()
        for request, early in tuple(self._early.items()):
            if request.is_counted:  # its turn has come: what is on its way it waits for itself
                self._end(request, early)
            elif request not in self._parts.live or (
                early.until is not None and early.until <= now
            ):
                self._end(request, early)
                self._let_go(early)
            elif early.until is None and not early.prefetch.advance(self._room()):
                early.until = now + AHEAD_SECONDS
        for request in tuple(self._asked):
            if request.is_counted or request not in self._parts.live:
                del self._asked[request]
            elif self._room() <= 0:
                break
            else:
                del self._asked[request]
                self._begin(request, now)

    def reset(self) -> None:
        """Everything is forgotten, so is what was fetched."""
        for early in self._early.values():
            early.prefetch.drop()
        self._early.clear()
        self._asked.clear()

    def _room(self) -> int:
        return self._most_slots - self.num_slots

    def _begin(self, request: Request, now: float) -> None:
        prefetch = Prefetch(request.id, request.chain.keys(), None, self._parts, request.tenant)
        early = _Early(prefetch)
        if not prefetch.advance(self._room()):
            early.until = now + AHEAD_SECONDS
        if prefetch.num_slots or early.until is None:
            self._early[request] = early

    def _end(self, request: Request, early: _Early) -> None:
        del self._early[request]
        early.prefetch.drop()

    def _let_go(self, early: _Early) -> None:
        """Nobody came for these: they go before what others wait for."""
        parts = self._parts
        for g, group in enumerate(parts.matcher.groups):
            if isinstance(group, reach.FullAttention):
                slots = parts.pool.leading(parts.matcher.all_keys(g, early.prefetch.keys))
                came = slots[-early.prefetch.num_slots :]
                if len(came):
                    parts.pool.go_first(came, _LAST)
