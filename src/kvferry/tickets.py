"""Copies under way as a caller knows them: a ticket for each call, and how it ended."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.core.quantities import integer, written
from kvferry.errors import ClosedError, InputError
from kvferry.scheduler.request import Request
from kvferry.scheduler.scheduler import Scheduler
from kvferry.types import MatchState, SlotArray, TransferId

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future


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


# ------------------------------------------------------------------------------------------------
# Tickets that asyncio waits for: one thread for all of a ferry's, and only while there are any.
#
# ::
#
#     event loop   await ticket ──> future            <── set by _tell, in the loop
#     the thread        watches the copy engine ──> something ended ──> _tell, please
#
# The ferry stays the loop's: the thread only looks whether anything ended.

_LOOK_SECONDS, _LEVEL_SECONDS = 0.02, 2e-3
"""So often the ferry is served though no copy has ended: who asks it, and tiers below it."""


class Awaited:
    """Owns the futures of tickets that are awaited, and the thread that watches for them.

    ``advance`` has the ferry learn what ended; it is called in the thread of the event loop.
    ``await_news`` waits for that, so many seconds at most; it is called in our own.
    """

    def __init__(
        self,
        tickets: Tickets,
        advance: Callable[[], None],
        await_news: Callable[[float], None],
        *,
        has_tiers: bool,
    ) -> None:
        self._tickets = tickets
        self._advance = advance
        self._await_news = await_news
        self._look_seconds = _LEVEL_SECONDS if has_tiers else _LOOK_SECONDS
        self._futures: dict[Ticket, list[Future[Done]]] = {}
        self._changed = threading.Condition()
        self._loop: AbstractEventLoop | None = None  # that is to be told, while anyone waits
        self._is_telling = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    async def wait(self, ticket: Ticket) -> Done:
        """How a ticket ends. Who is cancelled leaves the copy alone, and its end to others."""
        from asyncio import CancelledError, get_running_loop

        self._advance()
        if ticket not in self._futures and (done := self._tickets.take(ticket)) is not None:
            return done
        loop = get_running_loop()
        future: Future[Done] = loop.create_future()
        self._futures.setdefault(ticket, []).append(future)
        self._watch(loop)
        try:
            return await future
        except CancelledError:
            self._leave(ticket, future)
            raise

    def close(self) -> None:
        """Refuse whoever still waits, and end the thread. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        waiting, self._futures = self._futures, {}
        for future in (each for futures in waiting.values() for each in futures):
            _call_in(future.get_loop(), _refuse, future)

    def _leave(self, ticket: Ticket, future: Future[Done]) -> None:
        """The one who waited is gone."""
        if future.done() and not future.cancelled() and future.exception() is None:
            self._tickets.end(future.result())  # told, but not heard: it stays for who asks next
            return
        futures = self._futures.get(ticket, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._futures.pop(ticket, None)

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
                self._changed.wait_for(lambda: self._is_closed or self._is_wanted())
                if self._is_closed:
                    return
                loop = self._loop
            self._await_news(self._look_seconds)
            with self._changed:
                self._is_telling = True
            if not _call_in(loop, self._tell):
                with self._changed:  # a loop that is closed has nobody in it
                    self._is_telling = False
                    if self._loop is loop:
                        self._loop = None

    def _is_wanted(self) -> bool:
        return self._loop is not None and not self._is_telling

    def _tell(self) -> None:
        """In the event loop: learn what ended, and tell who waits for it."""
        try:
            self._advance()
            for ticket in tuple(self._futures):
                done = self._tickets.take(ticket)
                if done is not None:
                    self._end(ticket, done)
        except Exception as error:  # the ferry is closed, or another thread's: say so, to all
            waiting, self._futures = self._futures, {}
            for future in (each for futures in waiting.values() for each in futures):
                if not future.done():
                    future.set_exception(error)
        finally:
            with self._changed:
                self._is_telling = False
                if self._futures:
                    self._changed.notify_all()
                else:  # the thread sleeps on: it would take turns with who was told just now
                    self._loop = None

    def _end(self, ticket: Ticket, done: Done) -> None:
        futures = [each for each in self._futures.pop(ticket) if not each.done()]
        for future in futures:
            future.set_result(done)
        if not futures:
            self._tickets.end(done)


def _refuse(future: Future[Done]) -> None:
    if not future.done():
        future.set_exception(ClosedError("the ferry was closed before this ended"))


def _call_in(loop: AbstractEventLoop | None, call: Callable[..., None], *arguments: object) -> bool:
    """Whether the loop will do it; one that is closed will not."""
    if loop is None:
        return False
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------
# What a ferry finds of a request: blocks to load, or blocks on their way up from a lower tier.


@dataclass(frozen=True, eq=False, slots=True)
class Hit:
    """Blocks that can be loaded: ``len(hit)`` of them, after the ``on_device`` first ones.

    They stay where they are until the hit is loaded, released, or left alone for
    ``Config.match_deadline`` seconds. ``needed`` says for each group which places of the request's
    block table a load fills. One that ``is_pending`` has no blocks yet: a tier below host memory
    was asked for them or brings them up. Ask again with ``Ferry.again``, or compute without; or,
    where ``coming`` says how many are on their way, load them as they come.
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


def pending(request: Request, on_device: int, block_tokens: int) -> Hit:
    """The hit of a request that waits for a tier."""
    hoped = request.below.hoped_tokens // block_tokens if request.below is not None else 0
    return Hit(request, 0, on_device, is_pending=True, coming=max(0, hoped - on_device))


def not_a_hit(given: object) -> InputError:
    return InputError(f"a hit must come from ferry.match, got {type(given).__name__}")


class PendingHits:
    """Requests whose hits are pending, and until when somebody must ask for each again.

    Owns these times; one that nobody asks for in time is ended, so that a hit which was dropped
    leaves nothing behind.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._until: dict[Request, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def keep(self, request: Request) -> None:
        """Somebody asked for it just now."""
        self._until.pop(request, None)
        self._until[request] = self._clock() + self._patience

    def again(self, hit: Hit, scheduler: Scheduler, block_tokens: int) -> Hit:
        """What has become of a hit; one that is not pending is the answer itself."""
        request, on_device = hit.request, hit.on_device
        if not hit.is_pending:
            return hit
        if request not in scheduler:
            return Hit(request, 0, on_device)
        match = request.match(computed_tokens=on_device * block_tokens)
        if request.waits_below:
            self.keep(request)
            return pending(request, on_device, block_tokens)
        self.drop(request)
        if match.state is not MatchState.HIT:
            request.end()
        return Hit(request, (match.num_tokens - match.computed_tokens) // block_tokens, on_device)

    def drop(self, request: Request) -> None:
        """It is pending no longer."""
        self._until.pop(request, None)

    def expire(self) -> None:
        """End those that nobody asked for; the one that was left alone longest comes first."""
        now = self._clock()
        for request in [request for request, until in self._until.items() if until <= now]:
            del self._until[request]
            request.end()
