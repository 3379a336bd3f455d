"""What a device must offer: an engine that copies blocks between device memory and host slots."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from kvferry.types import Receipt, Transfer, TransferId


class CopyEngine(Protocol):
    """Copies blocks between paged device memory and host slots, asynchronously.

    Owns its streams, events and staging memory; leaves slots, keys and requests to the scheduler.
    A store (device to host) is ordered after everything queued on the compute stream when it was
    submitted; a load (host to device) too, because its destination may still be read there.
    """

    def submit(self, transfer: Transfer) -> None:
        """Queue one transfer and return at once. A fault is a failed receipt, never a raise."""

    def poll(self) -> list[Receipt]:
        """Receipts of transfers that ended since the last call; never blocks."""

    def wait_for_end(self, seconds: float) -> None:
        """Return when a transfer has ended that ``poll`` has not returned, or after ``seconds``.

        From any thread, and without the interpreter meanwhile; it may return early.
        """

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed); returns the receipts."""

    def starting_here(self, *, compute_waits: bool = False) -> AbstractContextManager[None]:
        """Begin transfers submitted inside on this thread, at the end of the ``with`` block.

        For a caller that would only wait: no other thread has to wake up before the first bytes
        move. ``compute_waits`` orders compute as ``order_compute_after_loads`` does.
        """

    def order_compute_after_loads(self) -> None:
        """Make compute queued from now on wait for every load submitted so far."""

    def num_landed(self, transfer_id: TransferId) -> int | None:
        """How many parts of a load ``in_parts`` have landed; None while it may still fail.

        Also None once ``poll`` has returned its receipt. In between only the loss of the device can
        keep the other parts from landing.
        """

    def order_compute_after_part(self, transfer_ids: Iterable[TransferId], number: int) -> None:
        """Make compute queued from now on wait for that part of these loads, and those before.

        Ignores loads that are over; where a load has fewer parts, the last one counts.
        """

    def close(self) -> None:
        """Drain, then give back streams, events and memory. Safe to call twice."""
