"""Copies under way as a caller knows them: a ticket for each call, and how it ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.errors import InputError
from kvferry.integers import integer, written
from kvferry.types import SlotArray, TransferId


class Ticket(int):
    """The number of a load or store under way. ``await`` it, or give it to ``Ferry.wait``."""

    _wait: Callable[[Ticket], Coroutine[Any, Any, Done]] | None = None

    def __await__(self) -> Generator[Any, None, Done]:
        if self._wait is None:
            raise InputError(f"ticket {int(self)} was not given out by a ferry: await ferry.ended")
        return self._wait(self).__await__()


MOST_UNTOLD = 65_536
"""Ends kept for whoever asks later, about 15 MB. Who never asks loses the oldest of them."""


@dataclass(frozen=True, slots=True)
class Done:
    """A load or store that ended: nothing touches its device blocks any more.

    ``num_blocks`` were copied. One that is not ``ok`` failed: after a load, compute those blocks.
    ``reason`` says why it failed, or why a store kept fewer blocks than it was given: they are kept
    already, follow a block that is not, or found no room.
    """

    ticket: Ticket
    num_blocks: int
    reason: str = ""
    ok: bool = True


class Moving(Protocol):
    """Blocks that a transfer takes or brings."""

    @property
    def transfer(self) -> TransferId: ...

    @property
    def blocks(self) -> SlotArray: ...


@dataclass(slots=True)
class _Underway:
    """What a ticket still waits for, and what is known of its end so far."""

    waiting: int
    num_blocks: int
    note: str
    failure: str = ""


class Tickets:
    """Owns which tickets are under way and the ends nobody has asked for; the copies are others'.

    An end is told once. The newest ``most_untold`` wait for that as long as it takes.
    """

    def __init__(self, most_untold: int = MOST_UNTOLD) -> None:
        self._most_untold = most_untold
        self._numbers = itertools.count()
        self._wait: Callable[[Ticket], Coroutine[Any, Any, Done]] | None = None
        self._underway: dict[Ticket, _Underway] = {}
        self._moving: dict[TransferId, tuple[Ticket, int]] = {}
        self._ended: dict[Ticket, Done] = {}

    def awaited_by(self, wait: Callable[[Ticket], Coroutine[Any, Any, Done]]) -> None:
        """How tickets that are given out from now on are awaited."""
        self._wait = wait

    def give(self) -> Ticket:
        ticket = Ticket(next(self._numbers))
        ticket._wait = self._wait
        return ticket

    def send(self, ticket: Ticket, ordered: Sequence[Moving], note: str = "") -> None:
        """The ticket ends with the last of the transfers that were ordered.

        ``note`` becomes its reason if all of them bring their bytes.
        """
        if not ordered:
            self.end(Done(ticket, 0, note))
            return
        self._underway[ticket] = _Underway(len(ordered), 0, note)
        for part in ordered:
            self._moving[part.transfer] = (ticket, len(part.blocks))

    def drop(self, ticket: Ticket) -> None:
        """Whoever was to have it never got it: nobody is told of its end."""
        self._underway.pop(ticket, None)
        self._ended.pop(ticket, None)
        self._moving = {each: way for each, way in self._moving.items() if way[0] != ticket}

    def begin(self, ticket: Ticket) -> None:
        """The ticket ends when somebody says so, by :meth:`finish`."""
        self._underway[ticket] = _Underway(1, 0, "")

    def finish(self, done: Done) -> None:
        """End a ticket that was begun."""
        del self._underway[done.ticket]
        self.end(done)

    def land(self, transfer_id: TransferId, reason: str) -> None:
        """A transfer has ended; with a ``reason`` if it failed. Those of others are not ours."""
        ticket, num_blocks = self._moving.pop(transfer_id, (None, 0))
        if ticket is None:
            return
        way = self._underway[ticket]
        way.waiting -= 1
        way.failure = way.failure or reason
        way.num_blocks += 0 if reason else num_blocks
        if not way.waiting:
            del self._underway[ticket]
            self.end(Done(ticket, way.num_blocks, way.failure or way.note, not way.failure))

    def end(self, done: Done) -> None:
        """A ticket has ended; keep it until it is asked for."""
        self._ended[done.ticket] = done
        if len(self._ended) > self._most_untold:
            del self._ended[next(iter(self._ended))]

    def take_all(self) -> list[Done]:
        """What ended and was not told yet, in the order it ended."""
        done, self._ended = self._ended, {}
        return list(done.values())

    def take(self, ticket: Ticket | int) -> Done | None:
        """How a ticket ended; None while it has not. InputError if it never will again."""
        ticket = Ticket(integer(ticket, "ticket"))
        done = self._ended.pop(ticket, None)
        if done is None and ticket not in self._underway:
            raise InputError(
                f"ticket {written(ticket)} is not in flight: it was never given out, its end was "
                f"already told, or nobody asked before {self._most_untold} others had ended"
            )
        return done
