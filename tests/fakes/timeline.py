"""Streams and events that behave as badly as the rules allow.

Work queued on a stream runs in its order, and not before the events it waits for. Nothing else is
promised, so nothing else is given: streams run when someone looks, in an order drawn from a seed,
and the streams named in ``late`` run only when nothing else can.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Record:
    """A point in one stream's work."""

    is_done: bool = False
    clock: int = 0


@dataclass(eq=False)
class FakeEvent:
    """Stands for its last record; one that was never recorded is done."""

    timing: bool
    last: Record = field(default_factory=lambda: Record(is_done=True))

    @property
    def is_done(self) -> bool:
        return self.last.is_done

    @property
    def clock(self) -> int:
        return self.last.clock


@dataclass
class Work:
    run: Callable[[], None]
    may_run: Callable[[], bool] = lambda: True


@dataclass
class FakeStream:
    queue: deque[Work] = field(default_factory=deque)

    @property
    def can_run(self) -> bool:
        return bool(self.queue) and self.queue[0].may_run()


class Timeline:
    """Owns the queues; leaves memory and errors to the driver."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.late: set[int] = set()
        self.frozen: set[int] = set()
        self.clock = 0
        self.lock = threading.RLock()
        self.streams: dict[int, FakeStream] = {0: FakeStream()}
        self._destroyed: dict[int, FakeStream] = {}

    def put(self, stream: int, run: Callable[[], None]) -> None:
        with self.lock:
            self._put(stream, run)

    def destroy(self, stream: int) -> None:
        """The handle is gone at once; what is queued still runs."""
        self._destroyed[stream] = self.streams.pop(stream)

    def put_record(self, stream: int, event: FakeEvent) -> None:
        record = event.last = Record()

        def run() -> None:
            record.is_done = True
            record.clock = self.clock

        self._put(stream, run)

    def put_wait(self, stream: int, event: FakeEvent) -> None:
        # The last record so far, whatever is recorded later, and on whichever stream.
        record = event.last
        self._put(stream, lambda: None, lambda: record.is_done)

    def _put(
        self, stream: int, run: Callable[[], None], may_run: Callable[[], bool] = lambda: True
    ) -> None:
        self.streams[stream].queue.append(Work(run, may_run))

    def step(self) -> bool:
        """Run one piece of work somewhere; False when nothing can run."""
        with self.lock:
            streams = {**self.streams, **self._destroyed}
            ready = [s for s in streams if streams[s].can_run and s not in self.frozen]
            ready = [s for s in ready if s not in self.late] or ready
            if not ready:
                return False
            work = streams[self.rng.choice(ready)].queue.popleft()
            self.clock += 1
            work.run()
            return True

    def dawdle(self) -> None:
        """Some progress, perhaps none: what happens while the host looks away."""
        for _ in range(self.rng.randrange(4)):
            self.step()

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            if not self.step():
                raise AssertionError("the device can never get there: a wait without its record")

    def run_all(self) -> None:
        while self.step():
            pass
