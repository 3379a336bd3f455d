"""Where a submission ends on its stream, and whether the card has got there."""

from __future__ import annotations

import logging
import time

from kvferry.device.driver.base import Driver
from kvferry.device.driver.events import EventPool
from kvferry.device.engine.submission import Submission
from kvferry.device.paths.ahead import ReadAhead

log = logging.getLogger(__name__)


class Fences:
    """Records and asks for the ends of one lane's submissions; leaves these to the lane.

    ``patience`` is how long a driver may refuse to say whether a copy is over.
    """

    def __init__(
        self, name: str, driver: Driver, stream: int, timing_events: EventPool, patience: float
    ) -> None:
        self._name = name
        self._driver = driver
        self._timing_events = timing_events
        self._patience = patience
        self.stream = stream

    def fence(self, submission: Submission) -> int:
        if submission.end is None:
            event = self._timing_events.take()
            try:
                self._driver.record_event(event, self.stream)
            except Exception:
                self._timing_events.give(event)
                raise
            submission.end = event
        return submission.end

    def is_over(self, submission: Submission) -> bool:
        try:
            with self._driver.current():
                if not self._driver.event_is_done(self.fence(submission)):
                    return False
                self._measure(submission)
        except Exception as error:
            submission.fail(error)
            return self._give_up(submission)
        ahead = submission.ahead
        around = (ahead.begun, ahead.ended) if ahead is not None else ()
        for event in (submission.start, submission.end, *around):
            if event is not None:
                self._timing_events.give(event)
        return True

    def _measure(self, submission: Submission) -> None:
        if submission.start is None or submission.end is None or submission.reason:
            return
        try:
            submission.seconds = self._seconds(submission.start, submission.end, submission.ahead)
        except Exception as error:
            # Often the late news of a copy that went wrong: not a receipt to call good.
            submission.fail(error)

    def _seconds(self, start: int, end: int, ahead: ReadAhead | None) -> float:
        elapsed = self._driver.elapsed_seconds
        if ahead is None or not ahead.is_used:
            return elapsed(start, end)
        # From its first byte on, but for the time in which nobody had ordered the rest: that may be
        # long, so it is left out, not subtracted.
        if elapsed(ahead.ended, start) <= 0.0:
            return elapsed(ahead.begun, end)
        return elapsed(ahead.begun, ahead.ended) + elapsed(start, end)

    def _give_up(self, submission: Submission) -> bool:
        """Whether the driver has refused to answer for so long that it never will.

        Its events stay with the pool, unused, until the engine closes: they may be pending.
        """
        now = time.monotonic()
        if submission.trouble_since is None:
            submission.trouble_since = now
        if now - submission.trouble_since < self._patience:
            return False
        log.error(
            "%s lane: gave up on transfer %d: %s",
            self._name,
            submission.transfer_id,
            submission.reason,
        )
        return True
