"""What a ferry's callers hold, tickets and hits, and the block tables that they give."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.core.quantities import Integers, integer, integers, written
from kvferry.errors import InputError
from kvferry.scheduler.request import Request
from kvferry.scheduler.transfers import NO_BLOCK, Ordered
from kvferry.transfer.layout import GroupLayout
from kvferry.types import Landing, SlotArray, TransferId

if TYPE_CHECKING:  # asyncio takes long to import, and few callers need it
    from asyncio import AbstractEventLoop, Future
    from concurrent.futures import ThreadPoolExecutor


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


_MOST_UNTOLD = 65_536
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
    A task that comes later finds it in the ticket. The newest 65,536 ends are kept.

    While a ticket is awaited, one thread watches the copies, and the loop's thread then learns what
    ended: the ferry stays in that thread.
    """

    def __init__(
        self, advance: Callable[[], None], wait_for_end: Callable[[float], None], look: float
    ) -> None:
        """``advance`` lets the ferry learn what ended.

        ``wait_for_end`` waits for a copy's end, so many seconds at most. The ferry is served every
        ``look`` seconds though no copy ends.
        """
        self._advance = advance
        self._wait_for_end = wait_for_end
        self._look_seconds = look
        self._numbers = itertools.count()
        self._underway: dict[Ticket, _Underway] = {}
        self._moving: dict[TransferId, tuple[Ticket, int]] = {}
        self._ended: dict[Ticket, Done] = {}
        self._futures: dict[Ticket, list[Future[Done]]] = {}  # of tasks, until each has its end
        self._watcher: ThreadPoolExecutor | None = None
        self._looking: Future[None] | None = None

    def send(self, ordered: Sequence[Ordered] | None, note: str = "", failure: str = "") -> Ticket:
        """A ticket that ends with the last of these transfers; with ``note`` if all succeed.

        Without any it ends at once, with the ``failure`` if there is one. Of None, it ends by
        :meth:`finish`.
        """
        ticket = Ticket(next(self._numbers))
        ticket._wait = self.ended
        self._underway[ticket] = _Underway(len(ordered or ()) or 1, 0, note)
        for part in ordered or ():
            self._moving[part.transfer] = (ticket, len(part.blocks))
        if not ordered and ordered is not None:
            self.finish(ticket, 0, failure)
        return ticket

    def add(self, ticket: Ticket, ordered: Ordered) -> None:
        """A ticket also waits for this transfer."""
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
        if len(self._ended) > _MOST_UNTOLD:
            del self._ended[next(iter(self._ended))]

    def take_all(self) -> list[Done] | None:
        """The ends that were not told yet and that no task awaits, in their order; None of none."""
        ended, self._ended = self._ended, {}
        if self._futures:
            self._ended = {each: done for each, done in ended.items() if self._is_awaited(each)}
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
                f"already told, or it was not asked for before {_MOST_UNTOLD} others ended"
            )
        if done is not None and not (self._futures and self._is_awaited(ticket)):
            del self._ended[ticket]
        return done

    # -- in an event loop -----------------------------------------------------------------------

    async def ended(self, ticket: Ticket) -> Done:
        """Return how a ticket ends. A cancelled caller leaves the copy, and its end, to others."""
        from asyncio import get_running_loop

        self._advance()
        done = ticket.done or self.take(ticket)
        if done is None:
            loop = get_running_loop()
            future: Future[Done] = loop.create_future()
            futures = self._futures.setdefault(ticket, [])
            futures.append(future)
            if self._looking is None or self._looking.get_loop() is not loop:
                self._look(loop)
            try:
                done = await future
            finally:
                futures.remove(future)
                if not futures and self._futures.get(ticket) is futures:
                    del self._futures[ticket]
        self._ended.pop(ticket, None)
        return done

    def close(self) -> None:
        """End the thread; the loop then learns that the ferry is closed. Safe to call twice."""
        if self._watcher is not None:
            self._watcher.shutdown()

    def _is_awaited(self, ticket: Ticket) -> bool:
        """Whether a task awaits this ticket; the tasks of a closed loop never run again."""
        return any(not future.get_loop().is_closed() for future in self._futures.get(ticket, ()))

    def _look(self, loop: AbstractEventLoop) -> None:
        if self._watcher is None:
            from concurrent.futures import ThreadPoolExecutor

            self._watcher = ThreadPoolExecutor(1, "kvferry-await")
        # Futures, not tasks: a caller may cancel all tasks of its loop.
        self._looking = loop.run_in_executor(self._watcher, self._wait_for_end, self._look_seconds)
        self._looking.add_done_callback(self._tell)

    def _tell(self, looked: Future[None]) -> None:
        """In the event loop: learn what ended, and set the futures of those tickets."""
        failure: Exception | None = None
        try:
            self._advance()
        except Exception as error:  # the ferry is closed, or another thread's: all must learn of it
            failure = error
        for ticket in tuple(self._futures):
            if self._is_awaited(ticket):
                self._set(ticket, failure)
            else:
                del self._futures[ticket]
        if looked is self._looking:  # no other loop has begun to look since
            self._looking = None
            if any(not each.done() for futures in self._futures.values() for each in futures):
                self._look(looked.get_loop())

    def _set(self, ticket: Ticket, failure: Exception | None) -> None:
        done = ticket.done
        try:
            if done is None and failure is None:
                done = self.take(ticket)
        except InputError as error:  # a number, of an end that was told or dropped since
            failure = error
        for future in self._futures[ticket]:
            if future.done() or future.get_loop().is_closed():
                continue
            if done is not None:
                future.set_result(done)
            elif failure is not None:
                future.set_exception(failure)


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
