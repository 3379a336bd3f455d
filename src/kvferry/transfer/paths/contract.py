"""What a path must offer: one way to copy, of whatever a device gives it to copy with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.transfer.driver.base import Driver, EventPool
from kvferry.transfer.job import CopyJob
from kvferry.transfer.kernels.launch import Launcher, Variant
from kvferry.transfer.kernels.tables import RowTable

QUICK_BYTES = 8 << 20
"""No job of more bytes is queued on the thread of ``submit``: its copy takes so long that the way
to another thread does not show."""


class Path(Protocol):
    """One way to copy. Enqueues on a stream and returns; completion is the engine's event.

    ``enqueue`` is called from one thread at a time per direction, but from two threads at once if
    both directions use the same path: what it keeps between calls must be kept per direction.
    """

    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        """Queue the whole job on ``stream`` (a raw driver handle); DriverError on refusal.

        ``stream`` comes after everything the job must wait for. ``ready`` says more: the event
        after which its blocks may be read or written, whatever earlier jobs still do on
        ``stream``. A path with streams of its own may begin there; the caller may record the event
        anew when this returns. None means that only ``stream`` knows.

        Whatever was queued before a raise, also on streams of the path's own, must come before
        anything queued on ``stream`` from then on: the engine holds the failed receipt back until
        that part has run, so that nobody reuses memory a copy is still writing to.
        """

    def is_quick(self, job: CopyJob) -> bool:
        """Whether ``enqueue`` would return within some tens of microseconds.

        The engine then calls it on the thread of ``submit``; else it hands the job to its own, as
        it does with every job of more than ``QUICK_BYTES``.
        """

    def close(self) -> None:
        """Give back staging memory and pinned buffers. Safe to call twice."""


class PiecewisePath(Path, Protocol):
    """A path that queues a large job piece by piece."""

    def pieces(self, job: CopyJob, stream: int, ready: int | None = None) -> Iterator[None]:
        """What ``enqueue`` does, a piece whenever it is asked on; some of it may be another thread.

        One that is closed before its end has fenced what it queued, as after a raise.
        """

    def is_prepared(self, job: CopyJob, ahead: int) -> bool:
        """Whether that takes no memory and loads no kernel, though ``ahead`` others come first."""


def in_pieces(path: Path, job: CopyJob, stream: int, ready: int | None) -> Iterator[None]:
    """Queue a job on any path, piece by piece where it has pieces."""
    pieces = getattr(path, "pieces", None)
    if pieces is None:
        return _whole(path, job, stream, ready)
    found: Iterator[None] = pieces(job, stream, ready)
    return found


def _whole(path: Path, job: CopyJob, stream: int, ready: int | None) -> Iterator[None]:
    path.enqueue(job, stream, ready)
    yield from ()


def is_prepared(path: Path, job: CopyJob, ahead: int) -> bool:
    """As :meth:`PiecewisePath.is_prepared`, of any path; those without pieces never are."""
    ask = getattr(path, "is_prepared", None)
    return job.in_parts is None and ask is not None and bool(ask(job, ahead))


@dataclass(frozen=True)
class Means:
    """What there is to copy with. Owns none of it."""

    driver: Driver
    launcher: Launcher | None
    """None where no kernel can be launched."""
    ring_bytes: int
    """Device memory a path may take for a ring of its own."""


class PathClass(Protocol):
    """What the class of a path offers to whoever opens all of them."""

    COMMON: Sequence[Variant]
    """The kernels most engines need of it: compiled before, they hold up no transfer."""

    def open(self, means: Means) -> Path:
        """The path on one device; takes memory only when it is first used."""


# ------------------------------------------------------------------------------------------------
# Going through a job in chunks that fit a ring's slots: rows for the kernel, bytes for copies.


class ChunkCursor:
    """Goes through a job in chunks as large as it is told; its attributes are the chunk at hand.

    Rows ``first_row`` to ``last_row`` of the job are bytes ``start`` to ``end`` of its blocks.
    """

    def __init__(self, job: CopyJob, rows: RowTable) -> None:
        self._rows = rows
        self._total = job.num_bytes
        self.first_row = self.last_row = self.start = self.end = 0

    @property
    def is_last(self) -> bool:
        return self.end == self._total

    @property
    def num_left(self) -> int:
        """The bytes after this chunk."""
        return self._total - self.end

    def fit(self, num_bytes: int, *, keep: int = 0) -> None:
        """Go on to the next chunk, of at most ``num_bytes``; leave ``keep`` bytes, or none."""
        self.first_row, self.start = self.last_row, self.end
        left = self._total - self.start
        wanted = left - keep if left > keep else left
        # A chunk ends where a row does, so it may fall short of its size but never exceed it.
        row = self._rows.row_at(self.start + (wanted if wanted < num_bytes else num_bytes))
        self.last_row = row if row > self.first_row else self.first_row + 1
        self.end = self._rows.position_of(self.last_row)


# ------------------------------------------------------------------------------------------------
# A point in one stream's work that others must come after.


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
