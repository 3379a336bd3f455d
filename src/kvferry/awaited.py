"""Tickets that asyncio waits for: one thread for all of a ferry's, and only while there are any.

::

    event loop   await ticket ──> future            <── set by _tell, in the loop
    the thread        watches the copy engine ──> something ended ──> _tell, please

The ferry stays the loop's: the thread only looks whether anything ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.errors import ClosedError
from kvferry.tickets import Done, Ticket, Tickets

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

_LOOK_SECONDS, _LEVEL_SECONDS = 0.02, 2e-3
"""So often the ferry is served though no copy has ended: who asks it, and levels below it."""


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
        has_levels: bool,
    ) -> None:
        self._tickets = tickets
        self._advance = advance
        self._await_news = await_news
        self._look_seconds = _LEVEL_SECONDS if has_levels else _LOOK_SECONDS
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
