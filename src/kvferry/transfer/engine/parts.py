"""Loads that land part by part: how far each is, and compute that waits for one part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvferry.errors import DriverError
from kvferry.transfer.driver.base import Driver, EventPool
from kvferry.transfer.engine.fences import Submission
from kvferry.transfer.job import CopyJob
from kvferry.transfer.paths.contract import Path, in_pieces
from kvferry.types import TransferId


def queue_parts(
    path: Path,
    job: CopyJob,
    stream: int,
    submission: Submission,
    driver: Driver,
    events: EventPool,
) -> Iterator[None]:
    """Queue a job piece by piece, with a mark after each of its parts."""
    if job.in_parts is None:
        return in_pieces(path, job, stream, submission.ready)
    return _with_marks(path, job, stream, submission, driver, events)


def _with_marks(
    path: Path,
    job: CopyJob,
    stream: int,
    submission: Submission,
    driver: Driver,
    events: EventPool,
) -> Iterator[None]:
    for part in job.parts():
        yield from in_pieces(path, part, stream, submission.ready)
        mark = events.take()
        submission.marks.append(mark)
        # Here the part has landed, and all before it.
        driver.record_event(mark, stream)


class GpuParts:
    """The loads in parts of one engine that are not over. Owns their marks from queue to receipt.

    Belongs to the thread that queues compute.
    """

    def __init__(
        self, driver: Driver, events: EventPool, compute_stream: Callable[[], int]
    ) -> None:
        self._driver = driver
        self._events = events
        self._compute_stream = compute_stream
        self._loads: dict[TransferId, Submission] = {}

    def begun(self, submission: Submission, job: CopyJob) -> None:
        """A job is on its way, and may have parts."""
        if job.in_parts is not None:
            self._loads[submission.transfer_id] = submission

    def ended(self, submission: Submission) -> Submission:
        """One is over, whether it had parts or not: nobody need wait for it any more."""
        if submission.marks:
            self._loads.pop(submission.transfer_id, None)
            for mark in submission.marks:
                self._events.give(mark)
        return submission

    def num_landed(self, transfer_id: TransferId) -> int | None:
        """See ``PartwiseEngine``."""
        submission = self._loads.get(transfer_id)
        if submission is None or not submission.queued or submission.reason:
            return None
        done = 0
        try:
            with self._driver.current():
                while done < len(submission.marks):
                    if not self._driver.event_is_done(submission.marks[done]):
                        break
                    done += 1
        except DriverError:  # it may say more later; its receipt will
            return None
        return done

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        """See ``PartwiseEngine``. Of loads for which ``num_landed`` had an answer."""
        with self._driver.current():
            compute = self._compute_stream()
            for transfer_id in transfer_ids:
                submission = self._loads.get(transfer_id)
                if submission is not None and submission.marks:
                    mark = submission.marks[min(number, len(submission.marks) - 1)]
                    self._driver.stream_wait_event(compute, mark)
