"""What a ferry's callers hold, tickets and hits, and the block tables that they give."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.core.quantities import Integers, integer, integers, written
from kvferry.errors import ClosedError, InputError
from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import NO_BLOCK, Ordered
from kvferry.transfer.layout import GroupLayout
from kvferry.types import Landing, SlotArray, TransferId

if TYPE_CHECKING:  # asyncio takes long to import, and few callers need it
    from asyncio import AbstractEventLoop, Future


class Ticket(int):
    """The number of a load or store in progress. ``await`` it, or give it to ``Ferry.wait``."""

    _wait: Callable[[Ticket], Coroutine[Any, Any, Done]] | None = None
    _end: tuple[int, str, bool] | None = None

    @property
    def done(self) -> Done | None:
        """How it ended, whichever caller was told; None while it has not ended."""
        return Done(self, *self._end) if self._end is not None else None

    def __await__(self) -> Generator[Any, None, Done]:
        if self._wait is None:
            raise InputError(f"ticket {int(self)} was not given out by a ferry: await ferry.ended")
        return self._wait(self).__await__()


MOST_UNTOLD = 65_536
"""Ends kept until they are asked for, about 15 MB; beyond that the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class Done:
    """A load or store that ended: nothing touches its device blocks any more.

    ``num_blocks`` were copied. If it is not ``ok`` it failed: after a load, compute those blocks.
    ``reason`` says why it failed, or why a store copied fewer blocks than it was given: they are
    stored already, follow a block that is not, or found no room.
    """

    ticket: Ticket
    num_blocks: int
    reason: str = ""
    ok: bool = True


@dataclass(slots=True)
class _Underway:
    """What a ticket still waits for, and what is known of its end so far."""

    waiting: int
    num_blocks: int
    note: str
    failure: str = ""


class Tickets:
    """Owns which tickets are in progress, and the ends that were not asked for yet.

    An end is told once: to all tasks that await its ticket, or else to the first caller that asks.
    A task that comes later finds it in the ticket.
    The newest ``most_untold`` ends are kept.
    """

    def __init__(self, most_untold: int = MOST_UNTOLD) -> None:
        self.wait: Callable[[Ticket], Coroutine[Any, Any, Done]] | None = None
        """How tickets that are given out from now on are awaited."""
        self.futures: dict[Ticket, list[Future[Done]]] = {}
        """Of the tasks that await a ticket, until each has its end."""
        self._most_untold = most_untold
        self._numbers = itertools.count()
        self._underway: dict[Ticket, _Underway] = {}
        self._moving: dict[TransferId, tuple[Ticket, int]] = {}
        self._ended: dict[Ticket, Done] = {}

    def send(self, ordered: Sequence[Ordered], note: str = "", failure: str = "") -> Ticket:
        """A ticket that ends with the last of these transfers; with ``note`` if all succeed.

        Without any it ends at once, with the ``failure`` if there is one.
        """
        ticket = Ticket(next(self._numbers))
        ticket._wait = self.wait
        self._underway[ticket] = _Underway(len(ordered) or 1, 0, note)
        for part in ordered:
            self._moving[part.transfer] = (ticket, len(part.blocks))
        if not ordered:
            self.finish(ticket, 0, failure)
        return ticket

    def begin(self) -> Ticket:
        """A ticket that ends by :meth:`finish`."""
        ticket = Ticket(next(self._numbers))
        ticket._wait = self.wait
        self._underway[ticket] = _Underway(1, 0, "")
        return ticket

    def add(self, ticket: Ticket, ordered: Ordered) -> None:
        """A ticket that was begun also waits for this transfer."""
        self._underway[ticket].waiting += 1
        self._moving[ordered.transfer] = (ticket, 0)

    def drop(self, ticket: Ticket) -> None:
        """Forget a ticket that was never given to the caller."""
        self._underway.pop(ticket, None)
        self._ended.pop(ticket, None)
        self._moving = {each: way for each, way in self._moving.items() if way[0] != ticket}

    def land(self, landings: Iterable[Landing]) -> None:
        """These transfers have ended; those that no ticket waits for are ignored."""
        for transfer_id, reason in landings:
            if transfer_id in self._moving:
                ticket, num_blocks = self._moving.pop(transfer_id)
                self.finish(ticket, 0 if reason else num_blocks, reason)

    def finish(self, ticket: Ticket, num_blocks: int, reason: str = "") -> None:
        """One of the things that a ticket waits for has ended; it ends with the last of them."""
        way = self._underway[ticket]
        way.waiting -= 1
        way.num_blocks += num_blocks
        way.failure = way.failure or reason
        if way.waiting:
            return
        del self._underway[ticket]
        done = Done(ticket, way.num_blocks, way.failure or way.note, not way.failure)
        ticket._end = (done.num_blocks, done.reason, done.ok)
        self._ended[ticket] = done
        if len(self._ended) > self._most_untold:
            del self._ended[next(iter(self._ended))]

    def take_all(self) -> list[Done] | None:
        """The ends that were not told yet and that no task awaits, in their order; None of none."""
        ended, self._ended = self._ended, {}
        if self.futures:
            self._ended = {each: done for each, done in ended.items() if self.is_awaited(each)}
            ended = {each: done for each, done in ended.items() if each not in self._ended}
        return list(ended.values()) or None

    def take(self, ticket: Ticket | int) -> Done | None:
        """Return how a ticket ended; None while it has not. InputError if it never will again."""
        if type(ticket) is not Ticket:
            ticket = Ticket(integer(ticket, "ticket"))
        done = self._ended.get(ticket)
        if done is None and ticket not in self._underway:
            raise InputError(
                f"ticket {written(ticket)} is not in flight: it was never given out, its end was "
                f"already told, or it was not asked for before {self._most_untold} others ended"
            )
        if done is not None and not (self.futures and self.is_awaited(ticket)):
            del self._ended[ticket]
        return done

    def told(self, ticket: Ticket) -> None:
        """A task has the end of its ticket."""
        self._ended.pop(ticket, None)

    def is_awaited(self, ticket: Ticket) -> bool:
        """Whether a task awaits this ticket; the tasks of a closed loop never run again."""
        return any(not future.get_loop().is_closed() for future in self.futures.get(ticket, ()))


# -- tickets in an event loop -------------------------------------------------------------------

_LOOK_SECONDS, _TIER_LOOK_SECONDS = 0.02, 2e-3
"""How often the ferry is served though no copy has ended: for its mailbox, and for lower tiers."""


class Awaited:
    """Sets the futures of tickets that are awaited. Owns one thread that watches the copies.

    ::

        event loop   await ticket ──> future            <── set by _tell, in the loop
        the thread        watches the copy engine ──> something ended ──> _tell in the loop

    The ferry stays in the loop's thread: the watching thread runs only while a ticket is awaited,
    and only finds out whether anything ended. ``advance`` lets the ferry learn what ended; it is
    called in the loop's thread. ``wait_for_end`` waits for a copy's end, so many seconds at most.
    """

    def __init__(
        self,
        tickets: Tickets,
        advance: Callable[[], None],
        wait_for_end: Callable[[float], None],
        *,
        has_tiers: bool,
    ) -> None:
        tickets.wait = self.wait
        self._tickets = tickets
        self._advance = advance
        self._wait_for_end = wait_for_end
        self._look_seconds = _TIER_LOOK_SECONDS if has_tiers else _LOOK_SECONDS
        self._futures = tickets.futures
        self._changed = threading.Condition()
        self._loop: AbstractEventLoop | None = None  # set while a ticket is awaited
        self._is_telling = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    async def wait(self, ticket: Ticket) -> Done:
        """Return how a ticket ends. A cancelled caller leaves the copy, and its end, to others."""
        from asyncio import get_running_loop

        self._advance()
        if (done := ticket.done or self._tickets.take(ticket)) is not None:
            self._tickets.told(ticket)
            return done
        loop = get_running_loop()
        future: Future[Done] = loop.create_future()
        futures = self._futures.setdefault(ticket, [])
        futures.append(future)
        self._watch(loop)
        try:
            done = await future
        finally:
            futures.remove(future)
            if not futures and self._futures.get(ticket) is futures:
                del self._futures[ticket]
        self._tickets.told(ticket)
        return done

    def close(self) -> None:
        """Refuse all that still wait, and end the thread. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        pending = self._pending()
        self._futures.clear()
        for future in pending:
            _call_in(future.get_loop(), _refuse, future)

    def _pending(self) -> list[Future[Done]]:
        return [each for futures in self._futures.values() for each in futures if not each.done()]

    def _watch(self, loop: AbstractEventLoop) -> None:
        with self._changed:
            if self._loop is not loop:
                self._is_telling = False  # another loop may have dropped the call
            self._loop = loop
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvferry-await", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or (self._loop is not None and not self._is_telling)
                )
                if self._is_closed:
                    return
                loop = self._loop
            self._wait_for_end(self._look_seconds)
            with self._changed:
                self._is_telling = True
            if not _call_in(loop, self._tell):
                with self._changed:  # a loop that is closed has no task that waits
                    self._is_telling = False
                    if self._loop is loop:
                        self._loop = None

    def _tell(self) -> None:
        """In the event loop: learn what ended, and set the futures of those tickets."""
        failure: Exception | None = None
        try:
            self._advance()
        except Exception as error:  # the ferry is closed, or another thread's: all must learn of it
            failure = error
        for ticket in tuple(self._futures):
            if self._tickets.is_awaited(ticket):
                self._set(ticket, failure)
            else:
                del self._futures[ticket]
        with self._changed:
            self._is_telling = False
            if self._pending():
                self._changed.notify_all()
            else:  # the thread sleeps on: it would compete with the task that was just woken
                self._loop = None

    def _set(self, ticket: Ticket, failure: Exception | None) -> None:
        done = ticket.done
        try:
            if done is None and failure is None:
                done = self._tickets.take(ticket)
        except InputError as error:  # a number, of an end that was told or dropped since
            failure = error
        for future in self._futures[ticket]:
            if future.done() or future.get_loop().is_closed():
                continue
            if done is not None:
                future.set_result(done)
            elif failure is not None:
                future.set_exception(failure)


def _refuse(future: Future[Done]) -> None:
    if not future.done():
        future.set_exception(ClosedError("the ferry was closed before this ended"))


def _call_in(loop: AbstractEventLoop | None, call: Callable[..., None], *arguments: object) -> bool:
    """Return whether the loop will make this call; a closed one will not."""
    if loop is None:
        return False
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return False
    return True


# -- hits ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Hit:
    """Blocks that can be loaded: ``len(hit)`` of them, after the ``on_device`` first ones.

    They stay where they are until the hit is loaded, released, or unused for
    ``Config.match_deadline`` seconds. ``needed`` says for each group which places of the request's
    block table a load fills. A hit that ``is_pending`` has no blocks yet: a lower tier was asked
    for them or brings them up. Ask again with ``Ferry.again``, or compute without them; or, where
    ``coming`` says how many are on their way, load them as they come.
    """

    request: Request
    num_blocks: int
    on_device: int
    is_pending: bool = False
    coming: int = 0

    def __len__(self) -> int:
        return self.num_blocks

    @property
    def needed(self) -> tuple[range, ...]:
        return self.request.needed_blocks


# -- block tables ----------------------------------------------------------------------------------

Tables = Integers | Sequence[Integers]
"""Device blocks: one vector, or one block table for each group."""


class BlockTables:
    """Checks the block tables that callers give. Owns a scratch place for each device block."""

    def __init__(self, layouts: Sequence[GroupLayout]) -> None:
        self._num_blocks = [layout.num_blocks for layout in layouts]
        # One place more than there are blocks: NO_BLOCK leads there.
        self._place = np.empty(max(self._num_blocks) + 1, dtype=np.int64)

    def whole(self, given: Tables, *, before: int, needed: Sequence[range] = ()) -> list[SlotArray]:
        """Return whole block tables, by group; a single one is given without the blocks ``before``.

        Raises:
            InputError: a block does not exist, tables are missing, or a table names a block twice:
                in the ``needed`` places, by group, or else in any from ``before`` on.
        """
        sizes = self._num_blocks
        tables: Sequence[Any] = (given,)
        least = 0 if len(sizes) == 1 else NO_BLOCK
        if len(sizes) > 1:
            if not isinstance(given, Sequence) or len(given) != len(sizes):
                raise InputError(
                    f"there are {len(sizes)} groups: give a block table for each of them"
                )
            tables = given
        found = []
        for group, table in enumerate(tables):
            numbers: SlotArray | None = None
            if type(table) is list and {int}.issuperset(map(type, table)):  # as most give them
                with suppress(OverflowError):
                    numbers = np.fromiter(table, dtype=np.int64, count=len(table))
            if numbers is None:
                numbers = integers(table, "device blocks")
            most = sizes[group]
            # Counted from the least one, as unsigned numbers, what is too small is too large.
            counted = numbers if not least else numbers - least
            if len(numbers) and int(np.maximum.reduce(counted.view(np.uint64))) >= most - least:
                wrong = int(numbers[(numbers < least) | (numbers >= most)][0])
                raise InputError(
                    f"device block {wrong} does not exist: the tensors have blocks 0 to {most - 1}"
                )
            blocks = numbers
            if needed:
                blocks = numbers[needed[group].start : needed[group].stop]
            elif before and len(sizes) > 1:
                blocks = numbers[before:]
            at = np.arange(len(blocks))
            self._place[blocks] = at  # of a block that is named twice the last place stays
            again = self._place.take(blocks) != at
            if np.count_nonzero(again) and len(twice := blocks[again & (blocks != NO_BLOCK)]):
                raise InputError(f"device block {twice[0]} is given twice; it holds one block only")
            found.append(numbers)
        if before and len(sizes) == 1:
            found[0] = np.concatenate((np.full(before, NO_BLOCK), found[0]))
        return found
