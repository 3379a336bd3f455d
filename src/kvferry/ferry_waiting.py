"""Waiting for what a ferry does: for one end, for any, for a hit, or in an event loop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from kvferry.awaited import Awaited
from kvferry.errors import DeadlineError
from kvferry.hits import Hit
from kvferry.integers import integer
from kvferry.rank import RankMemory
from kvferry.tickets import Done, Ticket, Tickets

_LOOK_SECONDS = 0.02
"""So often a ferry is served though no copy has ended: its growth, and who asks it."""
_LEVEL_SECONDS = 5e-4
"""The same where levels bring something up, which nobody tells us."""


class FerryWaiting(ABC):
    """The ways to wait. Leaves tickets, hits and copies to the ferry."""

    _tickets: Tickets
    _rank: RankMemory
    _has_levels: bool
    _awaited: Awaited

    @abstractmethod
    def again(self, hit: Hit) -> Hit: ...

    @abstractmethod
    def _advance(self) -> None: ...

    def poll(self, timeout: float = 0.0) -> list[Done]:
        """What ended since the last call; with a ``timeout``, waits so long for the first end.

        What nobody asks for is kept, up to the newest 65,536 ends.
        """
        began = time.monotonic()
        while True:
            self._advance()
            ended = self._tickets.take_all()
            waited = time.monotonic() - began
            if ended or waited >= timeout:
                return ended
            self._rest(waited, timeout)

    def wait(self, ticket: Ticket | int, timeout: float | None = None) -> Done:
        """Wait for one ticket; what else ends meanwhile stays for :meth:`poll`.

        In an event loop ``await`` the ticket instead: the loop goes on meanwhile.
        """
        began = time.monotonic()
        while True:
            self._advance()
            if (done := self._tickets.take(ticket)) is not None:
                return done
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                raise DeadlineError(f"ticket {ticket} did not end within {timeout} seconds")
            self._rest(waited, timeout)

    def await_hit(self, hit: Hit, timeout: float | None = None) -> Hit:
        """Poll until a hit is not pending any more; after ``timeout`` it may still be.

        What else ends meanwhile stays for :meth:`poll`.
        """
        began = time.monotonic()
        while (hit := self.again(hit)).is_pending:
            self._advance()
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                return self.again(hit)
            self._rest(waited, timeout)
        return hit

    async def ended(self, ticket: Ticket | int) -> Done:
        """What ``await ticket`` does: how a ticket ends, without holding the event loop.

        The loop must run in the thread the ferry belongs to. Any number of tasks may wait. One that
        is cancelled leaves the copy alone, and how it ended to whoever asks next.
        """
        return await self._awaited.wait(Ticket(integer(ticket, "ticket")))

    def _rest(self, waited: float, timeout: float | None) -> None:
        """Until something may have ended, or somebody else must be served."""
        most = _LEVEL_SECONDS if self._has_levels else _LOOK_SECONDS
        left = most if timeout is None else timeout - waited
        self._rank.engine.await_news(min(most, left))
