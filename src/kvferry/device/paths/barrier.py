"""A point in one stream's work that others must come after."""

from __future__ import annotations

from kvferry.device.driver.base import Driver
from kvferry.device.driver.events import EventPool


class StreamBarrier:
    """The point that a job's kernels must come after, on whatever stream they run.

    That is ``ready`` or, where none was given, all that ``stream`` holds at the mark.
    """

    def __init__(
        self, driver: Driver, events: EventPool, stream: int, ready: int | None = None
    ) -> None:
        self.stream = stream
        self._ready = ready
        self._driver = driver
        self._events = events
        self._event: int | None = None
        self._held: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether there was nothing left to wait for at the mark."""
        return self._event is None

    def mark(self) -> None:
        """Here, if anything before is still to be waited for."""
        if self._ready is not None:
            self._event = None if self._driver.event_is_done(self._ready) else self._ready
        elif not self._driver.stream_is_idle(self.stream):
            self._event = self._events.take()
            self._driver.record_event(self._event, self.stream)

    def hold(self, stream: int) -> None:
        """Keep what is queued on ``stream`` from now on behind the mark."""
        if self._event is not None and stream not in self._held:
            self._driver.stream_wait_event(stream, self._event)
            self._held.add(stream)

    def close(self) -> None:
        """Every wait has captured the mark, so its event is free for the next job."""
        if self._event is not None and self._ready is None:
            self._events.give(self._event)
        self._event = None
