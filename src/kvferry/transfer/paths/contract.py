"""The contract of a copy path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from kvferry.transfer.driver import Driver
from kvferry.transfer.job import CopyJob


class Path(ABC):
    """A way to copy between GPU and host: queues copies on a stream; leaves events to the engine.

    One thread at a time per direction calls a path, but a path for both directions may be called
    by two at once: it must keep state between calls per direction.
    """

    name: ClassVar[str]
    """The path's name in receipts and metrics."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @abstractmethod
    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        """Queue the whole job on ``stream`` (a raw driver handle); DriverError on refusal.

        ``stream`` already waits for everything the job must wait for. Once the event ``ready`` is
        reached, the job's blocks may be read or written, even if earlier jobs on ``stream`` still
        run; a path with its own streams may start then. The caller may record the event anew after
        this returns.

        If this raises, all work queued before (also on the path's own streams) must be ordered
        before later work on ``stream``. The engine relies on it: a failed receipt frees the memory,
        so the engine gives it only after that work has run.
        """

    def prepare(self, job: CopyJob) -> None:  # noqa: B027
        """Allocate the memory and load the kernels that jobs like this one need."""

    def is_quick(self, job: CopyJob) -> bool:
        """Whether ``enqueue`` returns soon: then ``submit`` calls it on the caller's thread."""
        return False

    def close(self) -> None:  # noqa: B027
        """Release staging memory and pinned buffers. Safe to call twice."""
