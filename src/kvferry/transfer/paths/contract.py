"""What a copy path must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from kvferry.transfer.driver import Driver
from kvferry.transfer.job import CopyJob


class Path(ABC):
    """One way to copy. Enqueues on a stream and returns; the engine's event marks completion.

    One thread at a time per direction calls a path, but a path for both directions may be called
    by two at once: what it keeps between calls must be kept per direction.
    """

    name: ClassVar[str]
    """What receipts and metrics call it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @abstractmethod
    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        """Queue the whole job on ``stream`` (a raw driver handle); DriverError on refusal.

        ``stream`` comes after everything the job must wait for. ``ready`` is the event after which
        the job's blocks may be read or written, whatever earlier jobs still do on ``stream``; a
        path with streams of its own may begin there. The caller may record the event anew when
        this returns.

        If this raises, everything queued before the raise (also on streams of the path) comes
        before anything queued on ``stream`` from then on. The engine relies on it: it gives the
        failed receipt only when that part has run, because the memory is reused afterwards.
        """

    def prepare(self, job: CopyJob) -> None:  # noqa: B027
        """Take the memory and load the kernels that jobs like this one need."""

    def is_quick(self, job: CopyJob) -> bool:
        """Whether ``enqueue`` returns soon: then it is called on the thread of ``submit``."""
        return False

    def close(self) -> None:  # noqa: B027
        """Give back staging memory and pinned buffers. Safe to call twice."""
