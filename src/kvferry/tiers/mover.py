"""Moves blocks between host slots and a tier below, on threads of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from kvferry.errors import ClosedError, InputError, KvferryError
from kvferry.tiers.base import Tier
from kvferry.tiers.host import HostTier
from kvferry.types import FIRST_RANK, Outcome, Rank, Receipt, Transfer


class TierMover:
    """Executes transfers between the host and one lower tier, a thread for each direction.

    Owns its threads and queues. Every exception on a thread becomes a failed receipt: a request
    that waits for a lost block waits no longer than the fault takes.
    """

    def __init__(self, host: HostTier, lower: Tier, *, rank: Rank = FIRST_RANK) -> None:
        if host.slot_bytes != lower.slot_bytes:
            raise InputError(
                f"tier {lower.name} has slots of {lower.slot_bytes} bytes, the host of "
                f"{host.slot_bytes}; blocks move whole, so they must agree"
            )
        self._host = host
        self._lower = lower
        self._rank = rank
        self._done: queue.SimpleQueue[Receipt] = queue.SimpleQueue()
        self._spills = _Lane(f"kvferry-to-{lower.name}", self._move)
        self._fetches = _Lane(f"kvferry-from-{lower.name}", self._move)
        self._closed = False

    def submit(self, transfer: Transfer) -> None:
        """Queue one transfer and return at once."""
        if self._closed:
            raise ClosedError(f"the mover for tier {self._lower.name} is closed")
        lane = self._spills if transfer.src == self._host.name else self._fetches
        lane.put(transfer)

    def poll(self) -> list[Receipt]:
        """Receipts of transfers that ended since the last call; never blocks."""
        receipts = []
        while True:
            try:
                receipts.append(self._done.get_nowait())
            except queue.Empty:
                return receipts

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is queued or moving (or ``timeout`` passed); returns the receipts."""
        end = None if timeout is None else time.monotonic() + timeout
        for lane in (self._spills, self._fetches):
            lane.wait_idle(None if end is None else max(0.0, end - time.monotonic()))
        return self.poll()

    def close(self) -> None:
        """Finish what was submitted, then end the threads. Safe to call twice."""
        self._closed = True
        self._spills.close()
        self._fetches.close()

    def _move(self, transfer: Transfer) -> None:
        start = time.perf_counter()
        outcome, reason = Outcome.OK, ""
        try:
            self._copy(transfer)
        except KvferryError as error:
            outcome, reason = Outcome.FAILED, str(error)
        except Exception as error:  # a thread that dies leaves its request waiting for ever
            outcome, reason = Outcome.FAILED, f"{type(error).__name__}: {error}"
        num_bytes = len(transfer) * self._lower.slot_bytes if outcome is Outcome.OK else 0
        seconds = time.perf_counter() - start
        self._done.put(
            Receipt(transfer.id, self._rank, outcome, reason, num_bytes, seconds, "tier")
        )

    def _copy(self, transfer: Transfer) -> None:
        if {transfer.src, transfer.dst} != {self._host.name, self._lower.name}:
            raise InputError(
                f"no way from {transfer.src} to {transfer.dst}: this mover serves "
                f"{self._host.name} and {self._lower.name}"
            )
        rows = self._host.rows
        if transfer.src == self._host.name:
            self._lower.write(transfer.dst_slots, rows[transfer.src_slots])
        else:
            landed = rows[transfer.dst_slots]
            self._lower.read(transfer.src_slots, landed)
            rows[transfer.dst_slots] = landed


class _Lane:
    """One thread and its queue of transfers, done in order."""

    def __init__(self, name: str, move: Callable[[Transfer], None]) -> None:
        self._move = move
        self._queue: queue.Queue[Transfer | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, transfer: Transfer) -> None:
        self._queue.put(transfer)

    def wait_idle(self, timeout: float | None) -> None:
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout)

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            self._move(transfer)
            self._queue.task_done()
        self._queue.task_done()
