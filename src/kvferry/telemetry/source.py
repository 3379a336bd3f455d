"""Questions and orders from other threads to a scheduler on the engine's thread."""

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

PATIENCE_SECONDS = 0.25
"""An engine that has not come by for so long is idle, or in a long step that changes nothing."""

PAUSE_SECONDS = 0.05
"""However many questions come, the engine is left alone for so long between two answers."""

MAX_A_STEP = 4
"""Questions that one step answers; each of them only picks up facts, and takes microseconds."""

ORDER_SECONDS = 5.0
"""So long an order waits for the engine; a step of a busy one takes less."""


_LOOKS = 10


class _Mail(NamedTuple):
    """A piece of work, and the future of its result. An order is done on the engine's thread."""

    future: Future[Any]
    work: Callable[[], Any]
    is_order: bool

    def is_done(self, seconds: float) -> bool:
        """Whether its result is there within so many seconds."""
        try:
            self.future.exception(seconds)
        except TimeoutOfFuture:
            return False
        return True

    def settle(self) -> None:
        """Do the work; what it raises is raised in the thread that asked."""
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise


class Mailbox:
    """Takes questions from any thread; the engine's own thread answers them as it comes by.

    A step answers a few questions that waited when it came by, and never waits for another thread.
    An idle engine never comes by: then the thread that asked does the work itself. It may do so in
    the very moment the engine wakes up, so a question must only read, and may mix numbers of two
    neighbouring steps; if it fails over that, it is tried again. Only the thread that takes mail
    out, under the lock, does its work.
    """

    def __init__(
        self,
        *,
        pause: float = PAUSE_SECONDS,
        most: int = MAX_A_STEP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pause = pause
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._open: deque[_Mail] = deque()  # the longest waiting first
        self._next_at = float("-inf")
        self._ended = ""
        self.has_mail = False
        """Whether something may wait for :meth:`answer`."""
        self.wake: Callable[[], None] = lambda: None
        """Called when an order was given, so that an idle engine comes by."""
        self.before_answers: Callable[[], object] = lambda: None
        """Called on the engine's thread before questions are answered there."""

    @property
    def has_orders(self) -> bool:
        """Whether an order waits for the engine."""
        return self.has_mail and any(mail.is_order for mail in tuple(self._open))

    def order(self, work: Callable[[], T], patience: float = ORDER_SECONDS) -> T:
        """The result of ``work()``, done on the engine's thread and on no other.

        StateError once abandoned, DeadlineError if the engine did not come by: then
        nothing was done, nor will it be.
        """
        order = self._put(work, is_order=True)
        if self._ended and self._take_back(order):
            raise StateError(self._ended)
        self.wake()
        if not order.is_done(patience) and self._take_back(order):
            raise DeadlineError(f"the engine did not come by within {patience:g} s")
        done: T = order.future.result()
        return done

    def abandon(self, reason: str) -> None:
        """The engine will not come by any more: orders fail, now and later."""
        self._ended = reason
        with self._lock:
            orders = [mail for mail in self._open if mail.is_order]
        for order in orders:
            if self._take_back(order):
                order.future.set_exception(StateError(reason))

    def ask(self, work: Callable[..., T], *args: object, patience: float = PATIENCE_SECONDS) -> T:
        """The result of ``work(*args)``, run on the engine's thread if it comes by in time."""
        for left in reversed(range(_LOOKS)):
            question = self._put(partial(work, *args), is_order=False)
            if not question.is_done(patience) and self._take_back(question):
                question.settle()
            try:
                answer: T = question.future.result()
                return answer
            except RuntimeError:
                # What was looked at changed meanwhile: the engine is awake, and may answer.
                if not left:
                    raise
        raise AssertionError

    def answer(self) -> None:
        """Once a step, on the engine's thread: what waits, up to a few, and then a pause."""
        if self._clock() < self._next_at or not self._lock.acquire(blocking=False):
            return  # a thread is just asking; the next step will do
        try:
            waiting = [self._open.popleft() for _ in range(min(self._most, len(self._open)))]
            self.has_mail = bool(self._open)
        finally:
            self._lock.release()
        if waiting:
            self.before_answers()
            for mail in waiting:
                mail.settle()
            self._next_at = self._clock() + self._pause

    def _put(self, work: Callable[[], Any], *, is_order: bool) -> _Mail:
        mail = _Mail(Future(), work, is_order)
        with self._lock:
            self._open.append(mail)
            self.has_mail = True
        return mail

    def _take_back(self, mail: _Mail) -> bool:
        """Take mail out again, unless another thread has it."""
        with self._lock:
            is_here = mail in self._open
            if is_here:
                self._open.remove(mail)
        return is_here


MOST_REQUESTS = 256
"""Of one answer, for one order: the engine waits until it is carried out."""

_RANDOM = r"(?:-[0-9a-f]{8})?"  # vLLM can be told to leave it out
# A client may choose the middle of a name, so only what vLLM adds there in every case is taken off:
# "chatcmpl-agent_3" is a name of its own, no part of "chatcmpl-agent".
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


def read_name(request_id: RequestId) -> tuple[str, str]:
    """The id in vLLM's answer, and which of that answer's requests this is.

    A client knows ``cmpl-5f2c``, the engine ``cmpl-5f2c-0-8b2677e5``: the prompt's number and eight
    random digits more::

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


def is_of_client(name: str, request_id: RequestId) -> bool:
    """Whether a client knows it so: by its answer's id, or by the X-Request-Id it sent itself."""
    if name not in request_id:  # far cheaper, and there are a thousand
        return False
    answer, _ = read_name(request_id)
    return bool(name) and name in (answer, _SERVERS.sub("", answer))


def requests_of(answer: str, request_ids: Iterable[RequestId]) -> list[RequestId]:
    """Those of one answer, in their order. InputError where several answers had this id.

    A client that sends one X-Request-Id twice has two answers of one id: which one it means is not
    known, and the wrong one would be dropped.
    """
    found: dict[RequestId, str] = {}
    for request_id in request_ids:
        its_answer, part = read_name(request_id) if answer in request_id else ("", "")
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
    """Asks a scheduler through its mailbox, from any thread. Owns neither."""

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
        stats = self._mailbox.ask(self._scheduler.stats)
        return Snapshot(
            stats,
            installed_version(),
            self._slot_bytes,
            self._pinned_bytes(),
            disks=self._disks(),
        )

    def explain(self, request_id: RequestId) -> dict[str, Any] | None:
        """What is remembered of a request, as plain data; None if nothing is.

        A server tells its users a shorter name than its engine has, and may make several requests
        of one: then it is the latest that ``request_id`` is the client's name of, and ``others``
        names the rest.
        """
        ids = [request_id]
        entry = self._mailbox.ask(self._entry, request_id)
        if entry is None:
            every = self._mailbox.ask(self._scheduler.recent)
            ids = [found for found in reversed(every) if is_of_client(request_id, found)]
            entry = self._mailbox.ask(self._entry, ids[0]) if ids else None
        if entry is None:
            return None
        return {**plain(ids[0], entry), "others": ids[1:]}

    def recent(self, most: int = 50) -> list[dict[str, Any]]:
        """The latest requests and what each of them missed, the latest first."""
        rows: list[dict[str, Any]] = []
        for request_id, why in self._mailbox.ask(self._latest, most):
            told = why.as_dict() if why is not None else {}
            names = ("reason", "asked_tokens", "host_tokens", "tier_hit_tokens")
            rows.append({"request_id": request_id, **{name: told.get(name) for name in names}})
        return rows

    def away(self) -> dict[str, str]:
        """The tiers that cannot be used now, and why."""
        ailments = self._mailbox.ask(self._scheduler.stats).ailments
        return {tier: ailment for tier, ailment in ailments.items() if ailment}

    # Run on the engine's thread, so they only pick up facts.

    def _entry(self, request_id: RequestId) -> Entry | None:
        """A copy: the journal's own goes on changing."""
        entry = self._scheduler.journal(request_id)
        return None if entry is None else replace(entry, copies=entry.copies.copy())

    def _latest(self, most: int) -> list[tuple[RequestId, Explanation | None]]:
        found = []
        for request_id in reversed(self._scheduler.recent()[-most:]):
            entry = self._scheduler.journal(request_id)
            found.append((request_id, entry.explanation if entry is not None else None))
        return found


def plain(request_id: RequestId, entry: Entry) -> dict[str, Any]:
    """One journal entry, ready for JSON."""
    why = entry.explanation
    return {
        "request_id": request_id,
        "explanation": why.as_dict() if why is not None else None,
        "hints": entry.hints.as_dict() if entry.hints is not None else None,
        "refused": list(entry.refused),
        "overlaps": entry.overlaps,
        "copies": [copy._asdict() for copy in entry.copies],
    }
