"""A drive's threads: each carries one job at a time between the engine's memory and the file.

::

    read    file ──> buffer ──check──> engine; a block whose proof fails is lost, not delivered
    write   engine ──> buffer ──prove──> file ──> shelf: readable now, durable with the next commit
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.errors import KvferryError
from kvferry.tiers.base import Way
from kvferry.tiers.disk.block_file import BlockFile
from kvferry.tiers.disk.engine_memory import EngineMemory
from kvferry.tiers.disk.health import DriveHealth
from kvferry.tiers.disk.lanes import Job, Lanes
from kvferry.tiers.disk.messages import Numbers
from kvferry.tiers.disk.proofs import Buffer, Proofs, Prover
from kvferry.tiers.disk.shelf import Shelf
from kvferry.tiers.disk.status import Count, Flags, Status


@dataclass(frozen=True)
class DriveParts:
    """What the threads of one drive share."""

    lanes: Lanes
    shelf: Shelf
    file: BlockFile
    memory: EngineMemory
    prover: Prover
    health: DriveHealth
    status: Status
    pitch: int
    most_blocks: int
    hands: threading.Semaphore
    """Who copies and proves has one; who waits for the drive has none. With as many at it as there
    are threads, a machine of few cores spends its time on changing between them. On 2 cores, shares
    of the drive with one hand, and with one for each of the 8 threads, in turn three times: read
    0.83, 0.86, 0.80 and 0.78, 0.70, 0.79, write 0.59, 0.71, 0.69 and 0.54, 0.61, 0.56;
    beside a busy interpreter writes gained as much, reads nothing.
    (``bench/disk.py --size 1GiB --blocks 1MiB --rounds 2``, AMD EPYC, virtual machine, 2026-11-18.)
    """


def num_hands() -> int:
    """A quarter of the cores that we may use: the others are the engine's."""
    return max(1, len(os.sched_getaffinity(0)) // 4)


class DriveThread:
    """One thread and its buffer, for one way."""

    def __init__(self, parts: DriveParts, way: Way, number: int) -> None:
        self._parts = parts
        self._way = way
        self._number = number
        self._buffer = Buffer(parts.most_blocks, parts.pitch, is_sealed=parts.prover.is_sealed)
        self._reasons: dict[int, str] = {}
        self.thread = threading.Thread(
            target=self._run, name=f"kvferry-drive-{way.value}-{number}", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        carry = self._read if self._way is Way.READ else self._write
        while (job := self._parts.lanes.take(self._way)) is not None:
            self._reasons = {}
            try:
                carry(job)
            except Exception as error:  # a thread that dies leaves its order waiting for ever
                said = str(error) if isinstance(error, KvferryError) else repr(error)
                self._fail(job.positions, Count.OTHER_FAILURES, said)
                if self._way is Way.WRITE:
                    self._parts.shelf.lose(job.order.message.places[job.positions])
            is_wanted = self._parts.lanes.end(job, self._reasons)
            if not is_wanted and self._way is Way.WRITE:
                # It was answered as failed long ago: a write that failed leaves no block.
                self._parts.shelf.lose(job.order.message.places[job.positions])

    def _fail(self, positions: Numbers, count: Count, reason: str) -> None:
        for position in positions.tolist():
            self._reasons[position] = reason
        self._parts.status.add(count, len(positions))

    # -- up ---------------------------------------------------------------------------------------

    def _read(self, job: Job) -> None:
        parts, order = self._parts, job.order.message
        positions, places = job.positions, order.places[job.positions]
        is_here, proofs = parts.shelf.look(places, order.generation)
        if not is_here.all():
            self._fail_absent(positions[~is_here], places[~is_here])
            positions, places, proofs = positions[is_here], places[is_here], proofs[is_here]
            if not len(positions):
                return
        whole = self._move(parts.file.read, positions, places, Count.READ_MICROSECONDS)
        with parts.hands:
            right = parts.prover.check(self._buffer, places, order.keys[positions], proofs)
            good = whole & right
            if not good.all():
                is_bad = whole & ~right
                self._fail_damaged(positions[is_bad], places[is_bad], proofs[is_bad])
            self._deliver(job, positions, np.flatnonzero(good))

    def _fail_absent(self, positions: Numbers, places: Numbers) -> None:
        for at, place in enumerate(places.tolist()):
            self._fail(positions[at : at + 1], Count.ABSENT, f"place {place} holds nothing")

    def _fail_damaged(self, positions: Numbers, places: Numbers, proofs: Proofs) -> None:
        for at, place in enumerate(places.tolist()):
            reason = f"place {place}: its bytes are not what was written"
            self._fail(positions[at : at + 1], Count.DAMAGED, reason)
        if len(places):
            self._parts.shelf.lose_damaged(places, proofs)

    def _deliver(self, job: Job, positions: Numbers, good: Numbers) -> None:
        parts = self._parts
        if not len(good) or not parts.lanes.begin_delivery(job):
            return
        here, there, sizes = self._pieces(job, positions, good)
        parts.status.set_copying(self._number, True)
        try:
            arrived = parts.memory.deliver(here, there, sizes)
        finally:
            parts.status.set_copying(self._number, False)
            parts.lanes.end_delivery(job)
        num_arrived = len(good)
        if not arrived.all():
            arrived = np.asarray(arrived.reshape(len(good), -1).all(axis=1))
            num_arrived = int(arrived.sum())
            self._fail_unreachable(positions[good[~arrived]])
        parts.status.add(Count.READ_BYTES, num_arrived * job.order.block_bytes)

    # -- down -------------------------------------------------------------------------------------

    def _write(self, job: Job) -> None:
        parts, order = self._parts, job.order.message
        positions, places = job.positions, order.places[job.positions]
        keys = order.keys[positions]
        with parts.hands:
            fetched = self._fetch(job)
            begun = parts.shelf.begin(places)
            if not parts.lanes.begin_delivery(job):
                return  # given up meanwhile: the memory may have been used again while we read it
            parts.lanes.end_delivery(job)
            proofs = parts.prover.prove(self._buffer, places, keys)
        at = np.flatnonzero(fetched)
        whole = np.zeros(len(positions), dtype=bool)
        whole[at] = self._move(
            parts.file.write, positions[at], places[at], Count.WRITE_MICROSECONDS, at
        )
        why_not = parts.shelf.keep(
            places[whole], keys[whole], proofs[whole], order.generation, begun
        )
        if why_not:
            self._fail(positions[whole], Count.OTHER_FAILURES, why_not)
        parts.status.add(Count.WRITTEN_BYTES, int(whole.sum()) * job.order.block_bytes)
        parts.shelf.lose(places[~whole])

    def _fetch(self, job: Job) -> Flags:
        """Bring a job's blocks into the buffer; which of them are there."""
        positions = job.positions
        here, there, sizes = self._pieces(job, positions, np.arange(len(positions)))
        pieces = self._parts.memory.fetch(here, there, sizes).reshape(len(positions), -1)
        fetched: Flags = np.asarray(pieces.all(axis=1))
        if not fetched.all():
            self._fail_unreachable(positions[~fetched])
        return fetched

    # -- both -------------------------------------------------------------------------------------

    def _move(
        self,
        call: Callable[[int, memoryview], None],
        positions: Numbers,
        places: Numbers,
        clock: Count,
        slots: Numbers | None = None,
    ) -> Flags:
        """Read or write blocks, a call for each run of neighbours; which of them moved whole.

        ``slots`` are their places in the buffer, if those are not 0, 1, ...
        """
        there = places.tolist()
        here = list(range(len(there))) if slots is None else slots.tolist()
        whole = np.ones(len(there), dtype=bool)
        start = time.monotonic()
        for first, last in _runs(there, here):
            if self._try(call, there[first], here[first], last - first) is None:
                continue
            for at in range(first, last):  # one bad block is one bad block
                error = self._try(call, there[at], here[at], 1)
                if error is not None:
                    whole[at] = False
                    reason = f"place {there[at]}: {_words(error)}"
                    self._fail(positions[at : at + 1], Count.DRIVE_ERRORS, reason)
        self._parts.status.add(clock, int((time.monotonic() - start) * 1e6))
        return whole

    def _try(
        self, call: Callable[[int, memoryview], None], place: int, slot: int, count: int
    ) -> Exception | None:
        pitch = self._parts.pitch
        data = self._buffer.stored[slot * pitch : (slot + count) * pitch]
        try:
            call(place, data)
        except Exception as error:  # whatever a drive on a bad day makes the kernel say
            if count == 1:
                self._parts.health.failed(self._way, error)
            return error
        self._parts.health.worked(self._way)
        return None

    def _pieces(
        self, job: Job, positions: Numbers, which: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Where the pieces of the blocks ``which`` are: in the buffer, in the engine, how long."""
        order = job.order
        here = (self._buffer.address + which * self._parts.pitch)[:, None] + order.offsets
        there = order.message.addresses[positions[which]]
        sizes = np.empty_like(here)
        sizes[:] = order.message.sizes
        return here.ravel(), there.ravel(), sizes.ravel()

    def _fail_unreachable(self, positions: Numbers) -> None:
        self._fail(positions, Count.UNREACHABLE, "its host memory cannot be reached")


def _runs(places: list[int], slots: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours, on the drive and in the buffer."""
    first = 0
    for at in range(1, len(places) + 1):
        step = at - first
        if (
            at == len(places)
            or places[at] - places[first] != step
            or slots[at] - slots[first] != step
        ):
            yield first, at
            first = at


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, KvferryError) else f"{type(error).__name__}: {error}"
