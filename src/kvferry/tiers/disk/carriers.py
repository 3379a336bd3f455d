"""A drive's threads: each carries one job at a time between the engine's memory and the file.

::

    read    file ──> buffer ──check──> engine; a block whose proof fails is lost, not delivered
    write   engine ──> buffer ──prove──> file ──> shelf: readable now, durable with the next commit
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvferry.errors import KvferryError
from kvferry.tiers.base import Way
from kvferry.tiers.disk.block_file import BlockFile
from kvferry.tiers.disk.engine_memory import EngineMemory
from kvferry.tiers.disk.health import DriveHealth
from kvferry.tiers.disk.lanes import Job, Lanes
from kvferry.tiers.disk.messages import Numbers
from kvferry.tiers.disk.proofs import Buffer, Prover
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
        places = order.places[job.positions]
        is_here, proofs = parts.shelf.look(places, order.generation)
        for at in np.flatnonzero(~is_here).tolist():
            reason = f"place {places[at]} holds nothing"
            self._fail(job.positions[at : at + 1], Count.ABSENT, reason)
        if not is_here.any():
            return
        positions, places, proofs = job.positions[is_here], places[is_here], proofs[is_here]
        keys = order.keys[positions]
        whole = self._move(parts.file.read, positions, places, Count.READ_MICROSECONDS)
        right = parts.prover.check(self._buffer, places, keys, proofs)
        for at in np.flatnonzero(whole & ~right).tolist():
            reason = f"place {places[at]}: its bytes are not what was written"
            self._fail(positions[at : at + 1], Count.DAMAGED, reason)
        if not right[whole].all():
            parts.shelf.lose_damaged(places[whole & ~right], proofs[whole & ~right])
        self._deliver(job, positions, np.flatnonzero(whole & right))

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
        arrived = np.asarray(arrived.reshape(len(good), -1).all(axis=1))
        parts.status.add(Count.READ_BYTES, int(arrived.sum()) * self._block_bytes(job))
        self._fail_unreachable(positions[good[~arrived]])

    # -- down -------------------------------------------------------------------------------------

    def _write(self, job: Job) -> None:
        parts, order = self._parts, job.order.message
        positions, places = job.positions, order.places[job.positions]
        keys = order.keys[positions]
        here, there, sizes = self._pieces(job, positions, np.arange(len(positions)))
        fetched = parts.memory.fetch(here, there, sizes).reshape(len(positions), -1).all(axis=1)
        self._fail_unreachable(positions[~fetched])
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
        parts.status.add(Count.WRITTEN_BYTES, int(whole.sum()) * self._block_bytes(job))
        parts.shelf.lose(places[~whole])

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
        slots = np.arange(len(places)) if slots is None else slots
        whole = np.ones(len(places), dtype=bool)
        start = time.monotonic()
        for first, last in _runs(places, slots):
            if self._try(call, places, slots, first, last) is None:
                continue
            for at in range(first, last):  # one bad block is one bad block
                error = self._try(call, places, slots, at, at + 1)
                if error is not None:
                    whole[at] = False
                    reason = f"place {places[at]}: {_words(error)}"
                    self._fail(positions[at : at + 1], Count.DRIVE_ERRORS, reason)
        self._parts.status.add(clock, int((time.monotonic() - start) * 1e6))
        return whole

    def _try(
        self,
        call: Callable[[int, memoryview], None],
        places: Numbers,
        slots: Numbers,
        first: int,
        last: int,
    ) -> Exception | None:
        pitch = self._parts.pitch
        start = int(slots[first]) * pitch
        data = self._buffer.stored[start : start + (last - first) * pitch]
        try:
            call(int(places[first]), data)
        except Exception as error:  # whatever a drive on a bad day makes the kernel say
            if last - first == 1:
                self._parts.health.failed(self._way, error)
            return error
        self._parts.health.worked(self._way)
        return None

    def _pieces(
        self, job: Job, positions: Numbers, which: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Where the pieces of the blocks ``which`` are: in the buffer, in the engine, how long."""
        order = job.order.message
        offsets = order.sizes.cumsum() - order.sizes
        here = (self._buffer.address + which * self._parts.pitch)[:, None] + offsets
        there = order.addresses[positions[which]]
        sizes = np.empty_like(here)
        sizes[:] = order.sizes
        return here.ravel(), there.ravel(), sizes.ravel()

    def _block_bytes(self, job: Job) -> int:
        return int(job.order.message.sizes.sum())

    def _fail_unreachable(self, positions: Numbers) -> None:
        if len(positions):
            self._fail(positions, Count.UNREACHABLE, "its host memory cannot be reached")


def _runs(places: Numbers, slots: Numbers) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours, on the drive and in the buffer."""
    if len(places):
        is_cut = (places[1:] - places[:-1] != 1) | (slots[1:] - slots[:-1] != 1)
        edges = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(places)]
        yield from pairwise(edges)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, KvferryError) else f"{type(error).__name__}: {error}"
