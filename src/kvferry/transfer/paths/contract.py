"""What a copy path must offer: one way to copy, with the means a device gives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvferry.transfer.driver.base import Driver
from kvferry.transfer.job import CopyJob
from kvferry.transfer.kernels.launch import Launcher, Variant

QUICK_BYTES = 8 << 20
"""A larger job is never queued on the thread of ``submit``: its copy takes so long that the hand
over to another thread does not show."""


@dataclass(frozen=True)
class Means:
    """What a path may copy with. Owns none of it."""

    driver: Driver
    launcher: Launcher | None
    """None where no kernel can be launched."""
    ring_bytes: int
    """Device memory a path may take for a ring of its own."""


class Path(ABC):
    """One way to copy. Enqueues on a stream and returns; the engine's event marks completion.

    One thread at a time per direction calls a path, but both directions may call it at once: what
    it keeps between calls must be kept per direction.
    """

    COMMON: ClassVar[Sequence[Variant]] = ()
    """The kernels most engines need of it: compiled when paths open, they delay no transfer."""

    @property
    def streams(self) -> Sequence[int]:
        """Its own streams, besides the one of the job."""
        return ()

    @classmethod
    @abstractmethod
    def open(cls, means: Means) -> Path:
        """The path on one device; takes memory only when it is first used."""

    @abstractmethod
    def enqueue(self, job: CopyJob, stream: int, ready: int | None = None) -> None:
        """Queue the whole job on ``stream`` (a raw driver handle); DriverError on refusal.

        ``stream`` comes after everything the job must wait for. ``ready`` is the event after which
        the job's blocks may be read or written, whatever earlier jobs still do on ``stream``; a
        path with streams of its own may begin there. The caller may record the event anew when
        this returns. Without ``ready`` only ``stream`` knows.

        If this raises, everything queued before the raise (also on streams of the path) comes
        before anything queued on ``stream`` from then on. The engine relies on it: it gives the
        failed receipt only when that part has run, because the memory is reused afterwards.
        """

    def pieces(self, job: CopyJob, stream: int, ready: int | None = None) -> Iterator[None]:
        """Queue the same piece by piece, one for each step of the iterator.

        Steps may come from different threads. Closing the iterator early fences what it has queued,
        as after a raise.
        """
        self.enqueue(job, stream, ready)
        yield from ()

    def is_quick(self, job: CopyJob) -> bool:
        """Whether ``enqueue`` returns within some tens of microseconds.

        Then the engine calls it on the thread of ``submit``, for jobs of up to ``QUICK_BYTES``.
        """
        return False

    def is_prepared(self, job: CopyJob, num_before: int) -> bool:
        """Whether queueing takes no memory and loads no kernel, after ``num_before`` other jobs."""
        return False

    def close(self) -> None:  # noqa: B027
        """Give back staging memory and pinned buffers. Safe to call twice."""
