"""The objects that callers of a ferry hold (tickets, hits), and checks of their block tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakMethod

import numpy as np

from kvferry.core.quantities import Integers, integers
from kvferry.errors import ClosedError, InputError
from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import NO_BLOCK, Ordered
from kvferry.types import Landing, SlotArray, TransferId

if TYPE_CHECKING:  # asyncio takes long to import, and few callers need it
    from asyncio import AbstractEventLoop, Event


class Ticket:
    """One load or store: ``await`` it, or pass it to ``Ferry.wait``.

    Once it ``has_ended``, kvferry no longer touches its device blocks, and ``num_blocks`` were
    copied. If it is not ``ok``, it failed: after a load, compute those blocks. ``reason`` says why
    it failed, or why a store copied only some of its blocks: the others were stored already, follow
    a block that is not stored, or found no room.
    """

    has_ended = False
    ok = False
    num_blocks = 0
    reason = ""
    _has_failed = False
    _waiting: int
    owner: Tickets

    def __repr__(self) -> str:
        state = ("ok" if self.ok else "failed") if self.has_ended else "under way"
        return f"<Ticket {state}, {self.num_blocks} blocks{self.reason and ': '}{self.reason}>"

    def __await__(self) -> Generator[Any, None, Ticket]:
        return self.owner.ended(self).__await__()


_MOST_UNREPORTED = 65_536
"""The most ended tickets kept for the caller; beyond it the oldest are dropped."""
_NO_TRANSFER = TransferId(-1)
_MOST_SLEEP = 2e-3
_SLEEP_SHARE = 8
"""A waiting task polls after an eighth of the time it has waited, at most ``_MOST_SLEEP``."""


class Tickets:
    """Owns the map from transfers to tickets, and the ended tickets not yet returned."""

    def __init__(self, advance: WeakMethod[Callable[[], None]]) -> None:
        """``advance`` makes the ferry collect receipts; tickets do not keep their ferry alive."""
        self._advance = advance
        self._in_flight: dict[TransferId, tuple[Ticket, int]] = {}
        self.unreported: dict[Ticket, Ticket] = {}
        """Ended tickets that were not returned to the caller yet, in the order of their ends."""
        self._num_ended = 0
        self._poller: tuple[AbstractEventLoop, Event] | None = None
        """The event loop whose one task polls the ferry, and the event that wakes the others."""

    def issue(self, ordered: Sequence[Ordered], note: str = "", failure: str = "") -> Ticket:
        """Return a ticket that ends with the last transfer; its reason is ``note`` if all succeed.

        Without transfers it ends at once, and fails with ``failure`` unless that is empty.
        """
        ticket = Ticket()
        ticket.owner, ticket._waiting, ticket.reason = self, len(ordered) or 1, note
        for part in ordered:
            self._in_flight[part.transfer] = (ticket, len(part.blocks))
        if not ordered:
            self.end(ticket, failure)
        return ticket

    def add(self, ticket: Ticket, ordered: Ordered | None = None) -> None:
        """Let a ticket also wait for this transfer, or else for a call of :meth:`end`."""
        ticket._waiting += 1
        if ordered is not None:
            self._in_flight[ordered.transfer] = (ticket, len(ordered.blocks))

    def end(self, ticket: Ticket, failure: str) -> None:
        """End one thing a ticket waits for that is no transfer; ``failure`` is empty on success."""
        self._in_flight[_NO_TRANSFER] = (ticket, 0)
        self.complete([Landing(_NO_TRANSFER, failure)])

    def complete(self, landings: Iterable[Landing]) -> None:
        """Note that these transfers have ended; ignores those of no ticket."""
        for transfer_id, failure in landings:
            if transfer_id not in self._in_flight:
                continue
            ticket, num_blocks = self._in_flight.pop(transfer_id)
            ticket._waiting -= 1
            if failure and not ticket._has_failed:
                ticket.reason, ticket._has_failed = failure, True
            elif not ticket._has_failed:
                ticket.num_blocks += num_blocks
            if not ticket._waiting:
                ticket.has_ended, ticket.ok = True, not ticket._has_failed
                self._num_ended += 1
                self.unreported[ticket] = ticket
        while len(self.unreported) > _MOST_UNREPORTED:
            del self.unreported[next(iter(self.unreported))]

    def take_all(self) -> list[Ticket]:
        """Return the ended tickets not yet returned, in the order of their ends."""
        ended, self.unreported = self.unreported, {}
        return list(ended)

    def _poll(self) -> None:
        advance = self._advance()
        if advance is None:
            raise ClosedError("this ferry was dropped")
        advance()

    async def ended(self, ticket: Ticket) -> Ticket:
        """Wait until a ticket has ended. Cancelling the caller does not cancel the copy.

        One of the tasks that wait in an event loop polls for all of them, until any ticket ends.
        """
        from asyncio import Event, get_running_loop, sleep

        loop, began = get_running_loop(), time.monotonic()
        self._poll()
        while not ticket.has_ended:
            if self._poller is not None and self._poller[0] is loop:
                await self._poller[1].wait()
                continue
            mine = self._poller = (loop, Event())
            before = self._num_ended
            try:
                while self._num_ended == before:
                    waited = time.monotonic() - began
                    await sleep(min(_MOST_SLEEP, waited / _SLEEP_SHARE))
                    self._poll()
            finally:
                if self._poller is mine:
                    self._poller = None
                if not loop.is_closed():
                    mine[1].set()
        self.unreported.pop(ticket, None)
        return ticket


# -- hits ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Hit:
    """The blocks of a request that can be loaded: ``len(hit)``, after the first ``on_device``.

    They are leased until the hit is loaded, released, or not loaded within
    ``Config.match_deadline`` seconds. ``needed`` has, for each group, the positions in the
    request's block table that a load fills. A hit that ``is_pending`` has no blocks yet: a lower
    tier is looking them up or promoting them. Pass it to ``Ferry.await_hit``, or compute instead.
    """

    request: Request
    num_blocks: int
    on_device: int
    is_pending: bool = False

    def __len__(self) -> int:
        return self.num_blocks

    @property
    def needed(self) -> tuple[range, ...]:
        return self.request.needed_blocks


# -- block tables ----------------------------------------------------------------------------------

Tables = Integers | Sequence[Integers]
"""Device blocks: one block table, or one for each group."""


def whole_tables(
    num_blocks: Sequence[int], given: Tables, *, before: int, needed: Sequence[range] = ()
) -> list[SlotArray]:
    """Return the whole block table of each group, after checking it.

    ``num_blocks`` are those of each group's tensors. A single group's table begins after the
    ``before`` first blocks, which the result has as ``NO_BLOCK``.

    Raises:
        InputError: a block does not exist, tables are missing, or a table has a block twice: in
            the ``needed`` positions, by group, or else in any from ``before`` on.
    """
    is_single = len(num_blocks) == 1
    if not is_single and (not isinstance(given, Sequence) or len(given) != len(num_blocks)):
        raise InputError(f"there are {len(num_blocks)} groups: give a block table for each of them")
    tables = cast("Sequence[Integers]", (given,) if is_single else given)
    found, least = [], 0 if is_single else NO_BLOCK
    for group, (table, most) in enumerate(zip(tables, num_blocks, strict=True)):
        numbers: SlotArray | None = None
        if type(table) is list and {int}.issuperset(map(type, table)):  # the common case
            with suppress(OverflowError):
                numbers = np.fromiter(table, dtype=np.int64, count=len(table))
        if numbers is None:
            numbers = integers(table, "device blocks")
        ordered = np.sort(numbers)
        if len(ordered) and (ordered[0] < least or ordered[-1] >= most):
            wrong = ordered[0] if ordered[0] < least else ordered[-1]
            raise InputError(
                f"device block {wrong} does not exist: the tensors have blocks 0 to {most - 1}"
            )
        if needed:
            ordered = np.sort(numbers[needed[group].start : needed[group].stop])
        elif before and not is_single:
            ordered = np.sort(numbers[before:])
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(again) and again[-1] != NO_BLOCK:
            raise InputError(f"device block {again[-1]} is given twice; it holds one block only")
        found.append(numbers)
    if before and is_single:
        found[0] = np.concatenate((np.full(before, NO_BLOCK), found[0]))
    return found
