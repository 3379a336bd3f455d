"""An order under way in the process of a store, and what became of each of its blocks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from kvferry.tiers.contract import Way
from kvferry.tiers.ipc.messages import OrderMessage, ResultMessage
from kvferry.tiers.remote.client import Fault, NotAsked, NotThere
from kvferry.tiers.remote.objects import Parcel

NOT_BEGUN = "not begun in time"

End = NotThere | Fault | None
"""What became of one block; None: it moved, or is there."""


@dataclass(eq=False)
class Errand:
    """An order under way. Owns what became of each block so far."""

    order: OrderMessage
    names: list[str]
    keys: Sequence[bytes]
    is_cancelled: bool = False
    ends: list[End] = field(init=False)
    came: float = field(init=False)

    def __post_init__(self) -> None:
        self.came = time.monotonic()
        self.ends = [NotAsked(NOT_BEGUN)] * len(self.names)

    def end(self, parcels: Sequence[Parcel], end: End) -> None:
        """This became of all blocks of these objects."""
        for parcel in parcels:
            for at in parcel.positions:
                self.ends[at] = end

    @property
    def left(self) -> float:
        """Seconds until its deadline."""
        return self.order.deadline - time.monotonic()

    def result(self, block_bytes: int, seconds: float) -> ResultMessage:
        """What the engine is told."""
        ok = np.array([end is None for end in self.ends], dtype=bool)
        reasons = {at: end.reason for at, end in enumerate(self.ends) if end is not None}
        moved = 0 if self.order.way is Way.FIND else int(ok.sum()) * block_bytes
        return ResultMessage(self.order.id, ok, reasons, moved, seconds)


# ------------------------------------------------------------------------------------------------
# Blocking calls one after the other in one thread, each begun the moment the one before is over.
#
# Who waits for a call hears of it in a loop of his own, later; the next call does not wait for
# that.
# A call that nobody waits for any more is left behind: those after it go on in another thread.

T = TypeVar("T")


class CallLane(Generic[T]):
    """Owns its thread, and what waits for it. A thread that was left ends with its call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._change = threading.Condition()  # guards all below
        self._waiting: deque[tuple[Callable[[], T], Future[T]]] = deque()
        self._under_way: Future[T] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def call(self, function: Callable[[], T]) -> Future[T]:
        """When all before it are over; what it raises is the future's."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # whether it can be taken back, leave() says
        with self._change:
            self._waiting.append((function, future))
            self._go_on()
        return future

    def leave(self, future: Future[T], never_begun: T) -> None:
        """Nobody waits for it any more: it ends with ``never_begun``, or whenever it ends."""
        with self._change:
            waiting = [each for each in self._waiting if each[1] is future]
            for each in waiting:
                self._waiting.remove(each)
            if self._under_way is future:
                self._under_way, self._thread = None, None
                self._go_on()
        if waiting:
            future.set_result(never_begun)

    def close(self) -> None:
        """No thread is kept any more."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def _go_on(self) -> None:
        if self._thread is None and self._waiting:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._change.notify_all()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            function, future = call
            try:
                answer = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(answer)

    def _next(self) -> tuple[Callable[[], T], Future[T]] | None:
        """What this thread does next; None: it has been left, or there is nothing to wait for."""
        with self._change:
            while self._thread is threading.current_thread():
                self._under_way = None
                if self._waiting:
                    function, self._under_way = self._waiting.popleft()
                    return function, self._under_way
                if self._is_closed:
                    self._thread = None
                    return None
                self._change.wait()
            return None
