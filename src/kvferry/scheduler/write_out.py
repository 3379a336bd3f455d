"""What only the host holds, sent to what outlives us while nothing else is to do.

With spilling a block goes down before the host drops it, so what was used last would be lost with
the process. Sent here it only goes sooner: a block that is below is not written again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from kvferry.keys import Keys
from kvferry.pool import Pool
from kvferry.scheduler.level import Level, WriteMode
from kvferry.types import TierName

if TYPE_CHECKING:
    from kvferry.scheduler.levels import LowerLevels

log = logging.getLogger(__name__)

_SAY_AFTER, _SAY_EVERY = 2.0, 5.0
_LOOK_RESTS = 20
"""Times as long as a look took pass before the next. A look at 100,000 blocks takes 13 ms, which a
request that comes just then waits for. (2 vCPU, Python 3.11, 2026-11-16.)"""

_GOING_SHARE = 8
"""Blocks of the host that may be on their way at a time, one in so many: they cannot be evicted."""


class WriteOut:
    """Owns what the level lacked of the host at the last look, and until when it may be sent.

    The level is the first of ``names`` with places. ``seconds`` bounds the time from a look until
    no more is sent; 0: nothing is. Whoever calls :meth:`advance` has nothing to do: it looks
    through the whole host when something has come.
    """

    def __init__(
        self,
        host: Pool,
        lower: LowerLevels,
        clock: Callable[[], float],
        *,
        names: Collection[TierName],
        seconds: float,
        most_going: int,
    ) -> None:
        self._host = host
        self._lower = lower
        self._clock = clock
        self._names = names
        can_be = any(each.name in names and each.write is WriteMode.SPILL for each in lower.levels)
        self._seconds = seconds if can_be else 0.0
        self._most_going = max(1, min(most_going, host.num_slots // _GOING_SHARE))
        self._left = Keys.empty()
        self._seen = host.generation
        self._began = self._say_at = self._look_at = 0.0
        self._num_found = 0

    @property
    def is_due(self) -> bool:
        """Whether there may be something to send: the engine should go on, or close later."""
        return bool(self._seconds) and (len(self._left) > 0 or self._host.generation != self._seen)

    @property
    def is_under_way(self) -> bool:
        """Whether there may be something to send, now or once it is stored, or something goes down.

        What comes up is no matter: whoever closes would wait for a read that hangs.
        """
        return self.is_due or self._lower.is_keeping

    @property
    def can_be(self) -> bool:
        """Whether there is a level that is spilled to and can be used, and time for this."""
        return bool(self._seconds) and self._level() is not None

    def advance(self) -> None:
        """Send some of what is left, with the next plan; nothing while much is on its way."""
        level = self._level()
        if level is None or not self.is_due:
            self._left, self._seen = Keys.empty(), self._host.generation
            return
        now = self._clock()
        if self._host.generation != self._seen and now >= self._look_at:
            self._look(level, now)
        elif not len(self._left):
            return
        elif now >= self._began + self._seconds or not self._lower.can_spill_to(level):
            log.info("%d blocks that only host memory holds are left as they are", len(self._left))
            self._left = Keys.empty()
            return
        self._say(level.name, now)
        going = self._most_going - self._lower.num_going(level)
        if going > 0:
            # A run's end comes before its beginning here, and is to be evicted before it there.
            piece, self._left = self._left[:going][::-1], self._left[going:]
            self._send(level, piece)

    def stop(self) -> None:
        """Nothing is to be sent any more: after a reset no other life asks for these blocks."""
        self._seconds = 0.0
        self._left = Keys.empty()

    def _level(self) -> Level | None:
        for level in self._lower.usable:
            if level.name in self._names and level.pool is not None:
                return level if level.write is WriteMode.SPILL else None
        return None

    def _look(self, level: Level, now: float) -> None:
        host = self._host
        self._seen = host.generation
        found = host.coldest(host.num_slots)
        self._left = found.take(~level.known(found, now))
        self._num_found = len(self._left)
        self._began, self._say_at = now, now + _SAY_AFTER
        done = self._clock()
        self._look_at = done + _LOOK_RESTS * (done - now)

    def _send(self, level: Level, piece: Keys) -> None:
        """Those of them that are still here, still lacking below, and let through."""
        now = self._clock()
        wanted = self._host.cached(piece) & ~level.known(piece, now)
        if level.gate is not None:
            wanted[wanted] = level.gate.lets(piece.take(wanted), now)
        if np.count_nonzero(wanted):
            self._lower.send_out(level, piece.take(wanted))

    def _say(self, name: TierName, now: float) -> None:
        if now >= self._say_at:
            self._say_at = now + _SAY_EVERY
            done = self._num_found - len(self._left)
            log.info(
                "writing to %s what only host memory holds: %d of %d blocks, %.0f of %.0f s",
                name,
                done,
                self._num_found,
                now - self._began,
                self._seconds,
            )
