"""What a path must offer: one way to copy, of whatever a device gives it to copy with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.device.driver.base import Driver
from kvferry.device.job import CopyJob
from kvferry.device.kernels.base import Launcher, Variant

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
