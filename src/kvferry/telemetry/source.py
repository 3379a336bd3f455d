"""Queries and control requests from other threads to a scheduler on the engine's thread."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimeoutOfFuture
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvferry.core.quantities import quoted
from kvferry.errors import DeadlineError, InputError, StateError
from kvferry.scheduler.journal import Entry, Explanation, Onlooker
from kvferry.telemetry.catalog import Snapshot, installed_version
from kvferry.types import RequestId

if TYPE_CHECKING:
    from kvferry.tiers.disk.protocol import DiskFigures

T = TypeVar("T")

QUERY_SECONDS = 0.25
"""Seconds a query waits for an engine, which is then idle or in a long step without changes."""

PAUSE_SECONDS = 0.05
"""Seconds between two steps that answer queries, however many queries wait."""

MAX_CALLS_PER_STEP = 4
"""Most queries that one step answers. A query only copies data and takes microseconds."""

COMMAND_SECONDS = 5.0
"""Seconds a control request waits for the engine. A busy engine's step takes less."""

_MAX_TRIES = 10


class _Call(NamedTuple):
    """A function and the future of its result. A command runs on the engine's thread only."""

    future: Future[Any]
    work: Callable[[], Any]
    is_command: bool

    def is_done(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the result. Returns whether there is one."""
        try:
            self.future.exception(seconds)
        except TimeoutOfFuture:
            return False
        return True

    def settle(self) -> None:
        """Run the function. Its exception is raised in the thread that waits for the result."""
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise


class Mailbox:
    """Owns a queue of functions from any thread that the engine's thread runs between its steps.

    Queries only read. If the engine is idle and does not run a query, the calling thread runs it,
    perhaps while the engine starts a step. So a query may mix numbers of two adjacent steps, and is
    retried if that makes it fail. Commands change state and run only on the engine's thread. A step
    runs a few functions and never waits for another thread. A thread must take a function out of
    the queue, under the lock, before it runs it.
    """

    def __init__(
        self,
        *,
        pause: float = PAUSE_SECONDS,
        most: int = MAX_CALLS_PER_STEP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pause = pause
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._open: deque[_Call] = deque()  # oldest first
        self._next_at = float("-inf")
        self._ended = ""
        self.has_mail = False
        """Whether the queue may hold work for :meth:`answer`."""
        self.wake: Callable[[], None] = lambda: None
        """Called after a command is queued, so that an idle engine runs a step."""
        self.before_answers: Callable[[], object] = lambda: None
        """Called on the engine's thread before it runs queued functions."""

    @property
    def has_commands(self) -> bool:
        """Whether a command waits for the engine."""
        return self.has_mail and any(call.is_command for call in tuple(self._open))

    def command(self, work: Callable[[], T], patience: float = COMMAND_SECONDS) -> T:
        """Run ``work`` on the engine's thread, and on no other, and return its result.

        Raises StateError after :meth:`abandon`, and DeadlineError if the engine does not take the
        work within ``patience`` seconds. In both cases the work is never done.
        """
        call = self._put(work, is_command=True)
        if self._ended and self._take_back(call):
            raise StateError(self._ended)
        self.wake()
        if not call.is_done(patience) and self._take_back(call):
            raise DeadlineError(f"the engine did not come by within {patience:g} s")
        done: T = call.future.result()
        return done

    def abandon(self, reason: str) -> None:
        """Fail all commands, queued and future ones: the engine runs no more steps."""
        self._ended = reason
        with self._lock:
            commands = [call for call in self._open if call.is_command]
        for call in commands:
            if self._take_back(call):
                call.future.set_exception(StateError(reason))

    def query(self, work: Callable[..., T], *args: object, patience: float = QUERY_SECONDS) -> T:
        """Return ``work(*args)``, run on the engine's thread if it is free in time, else here."""
        for left in reversed(range(_MAX_TRIES)):
            call = self._put(partial(work, *args), is_command=False)
            if not call.is_done(patience) and self._take_back(call):
                call.settle()
            try:
                answer: T = call.future.result()
                return answer
            except RuntimeError:
                # The data changed while it was read: the engine is awake now, and may answer.
                if not left:
                    raise
        raise AssertionError

    def answer(self) -> None:
        """Run a few queued functions, then none for ``pause`` seconds. Called once per step."""
        if self._clock() < self._next_at or not self._lock.acquire(blocking=False):
            return  # another thread holds the lock; the next step answers
        try:
            waiting = [self._open.popleft() for _ in range(min(self._most, len(self._open)))]
            self.has_mail = bool(self._open)
        finally:
            self._lock.release()
        if waiting:
            self.before_answers()
            for call in waiting:
                call.settle()
            self._next_at = self._clock() + self._pause

    def _put(self, work: Callable[[], Any], *, is_command: bool) -> _Call:
        call = _Call(Future(), work, is_command)
        with self._lock:
            self._open.append(call)
            self.has_mail = True
        return call

    def _take_back(self, call: _Call) -> bool:
        """Remove work from the queue. Returns False if another thread has taken it."""
        with self._lock:
            is_here = call in self._open
            if is_here:
                self._open.remove(call)
        return is_here


MOST_REQUESTS = 256
"""Most requests of one answer that a control request may name: the engine waits meanwhile."""

_RANDOM = r"(?:-[0-9a-f]{8})?"  # vLLM's suffix, which an option turns off
# A client may choose the middle of an id, so only parts that vLLM adds in every case are removed:
# "chatcmpl-agent_3" is an id of its own, not a request of the answer "chatcmpl-agent".
_FORMS = tuple(
    re.compile(rf"(?P<sample>(?:\d+_)?)(?P<answer>{answer})(?P<part>{part}){_RANDOM}")
    for answer, part in (
        (r".+?", r"-[0-9a-f]{16}-beam-\d+"),
        (r"(?:cmpl|embd|pooling|classify|score)-.+?", r"-\d+"),
        (r"chatcmpl-[0-9a-f]{16}", r"_\d+"),
        (r"resp_.+?", r"_\d+"),
        (r".+?", ""),
    )
)
_SERVERS = re.compile(r"^(?:chat)?cmpl-")


def split_request_id(request_id: RequestId) -> tuple[str, str]:
    """Split an engine's request id into the id of vLLM's answer, and the request's part in it.

    A client knows ``cmpl-5f2c``. The engine's ``cmpl-5f2c-0-8b2677e5`` adds the prompt's number and
    eight random digits::

        cmpl-5f2c-1-8b2677e5                            the second of several prompts
        1_cmpl-5f2c-0-8b2677e5                          the second of several samples
        chatcmpl-5f2c-8b2677e5                          a chat has one prompt, and no number
        chatcmpl-0f1e2d3c4b5a6978_1-8b2677e5            but for a batch of them
        resp_5f2c_1-8b2677e5                            the second turn of one response
        cmpl-5f2c-0f1e2d3c4b5a6978-beam-0-8b2677e5      a beam, of any answer
    """
    for form in _FORMS:
        if found := form.fullmatch(request_id):
            return found["answer"], found["sample"] + found["part"]
    return request_id, ""


def matches_client_id(name: str, request_id: RequestId) -> bool:
    """Whether a client calls the request ``name``: its answer's id or the client's X-Request-Id."""
    if name not in request_id:  # cheap, and there are a thousand ids to test
        return False
    answer, _ = split_request_id(request_id)
    return bool(name) and name in (answer, _SERVERS.sub("", answer))


def answer_requests(answer: str, request_ids: Iterable[RequestId]) -> list[RequestId]:
    """Return the requests of one answer, in order. Raises InputError if several answers match.

    A client that sends one X-Request-Id twice gets two answers with one id. An action on that id
    could drop the wrong one.
    """
    found: dict[RequestId, str] = {}
    for request_id in request_ids:
        its_answer, part = split_request_id(request_id) if answer in request_id else ("", "")
        if answer and its_answer == answer:
            found[request_id] = part
    if len(set(found.values())) < len(found):
        raise InputError(f"several answers have the id {quoted(answer)}; {_one_of(found)}")
    if len(found) > MOST_REQUESTS:
        raise InputError(
            f"{quoted(answer)} has {len(found)} requests, and an order is for {MOST_REQUESTS} at "
            f"most; {_one_of(found)}"
        )
    return list(found)


def _one_of(found: Iterable[RequestId]) -> str:
    some = ", ".join(quoted(request_id) for request_id in list(found)[-3:])
    return f"name one by its engine's name, such as {some}"


class Source:
    """Reads a scheduler's counts and journal from any thread, through a mailbox. Owns neither."""

    def __init__(
        self,
        scheduler: Onlooker,
        mailbox: Mailbox,
        *,
        slot_bytes: Mapping[str, int] | None = None,
        pinned_bytes: Callable[[], int | None] = lambda: None,
        disks: Callable[[], Mapping[str, DiskFigures]] = dict,
    ) -> None:
        self._scheduler = scheduler
        self._mailbox = mailbox
        self._slot_bytes = dict(slot_bytes or {})
        self._pinned_bytes = pinned_bytes
        self._disks = disks

    def snapshot(self) -> Snapshot:
        stats = self._mailbox.query(self._scheduler.stats)
        return Snapshot(
            stats,
            installed_version(),
            self._slot_bytes,
            self._pinned_bytes(),
            disks=self._disks(),
        )

    def explain(self, request_id: RequestId) -> dict[str, Any] | None:
        """Return the journal entry of a request as data for JSON, or None if there is none.

        ``request_id`` may be the engine's id, or the shorter id that the server's client knows. A
        client's request may be several of the engine's: then this returns the latest of them, and
        ``others`` names the rest.
        """
        ids = [request_id]
        entry = self._mailbox.query(self._entry, request_id)
        if entry is None:
            every = self._mailbox.query(self._scheduler.recent)
            ids = [found for found in reversed(every) if matches_client_id(request_id, found)]
            entry = self._mailbox.query(self._entry, ids[0]) if ids else None
        if entry is None:
            return None
        return {**entry_as_data(ids[0], entry), "others": ids[1:]}

    def recent(self, most: int = 50) -> list[dict[str, Any]]:
        """Return the latest requests, latest first, with their tokens and miss reasons."""
        rows: list[dict[str, Any]] = []
        for request_id, why in self._mailbox.query(self._latest, most):
            told = why.as_dict() if why is not None else {}
            names = ("reason", "asked_tokens", "host_tokens", "tier_hit_tokens")
            rows.append({"request_id": request_id, **{name: told.get(name) for name in names}})
        return rows

    def unavailable(self) -> dict[str, str]:
        """Return the unavailable tiers, and why each is unavailable."""
        ailments = self._mailbox.query(self._scheduler.stats).ailments
        return {tier: ailment for tier, ailment in ailments.items() if ailment}

    # These run on the engine's thread, so they only copy data.

    def _entry(self, request_id: RequestId) -> Entry | None:
        """Return a copy of a journal entry. The journal's own keeps changing."""
        entry = self._scheduler.journal(request_id)
        return None if entry is None else replace(entry, copies=entry.copies.copy())

    def _latest(self, most: int) -> list[tuple[RequestId, Explanation | None]]:
        found = []
        for request_id in reversed(self._scheduler.recent()[-most:]):
            entry = self._scheduler.journal(request_id)
            found.append((request_id, entry.explanation if entry is not None else None))
        return found


def entry_as_data(request_id: RequestId, entry: Entry) -> dict[str, Any]:
    """Return one journal entry as data for JSON."""
    why = entry.explanation
    return {
        "request_id": request_id,
        "explanation": why.as_dict() if why is not None else None,
        "hints": entry.hints.as_dict() if entry.hints is not None else None,
        "refused": list(entry.refused),
        "overlaps": entry.overlaps,
        "copies": [copy._asdict() for copy in entry.copies],
    }
