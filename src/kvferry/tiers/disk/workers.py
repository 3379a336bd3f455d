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

from kvferry.core.keys import Keys
from kvferry.errors import KvferryError
from kvferry.tiers.contract import Way
from kvferry.tiers.disk.blocks import BlockFile, Buffer, Proofs, Prover
from kvferry.tiers.disk.figures import Count, Flags
from kvferry.tiers.disk.ledger import Ledger
from kvferry.tiers.disk.queue import DriveHealth, Job, Lanes
from kvferry.tiers.ipc.memory import EngineMemory
from kvferry.tiers.ipc.messages import Numbers, Words
from kvferry.tiers.ipc.status_page import StatusPage


@dataclass(frozen=True, eq=False)
class Mark:
    """A point in the order of events: what a commit has to cover."""

    notes: int
    generation: int
    places: list[Numbers]
    """Written since the last commit, in the order of their writes."""


class Shelf:
    """Owns the order of events; leaves the medium to the ledger. Any thread may use it."""

    def __init__(self, ledger: Ledger, status: StatusPage, commit_seconds: float) -> None:
        self._ledger = ledger
        self._status = status
        self._commit_seconds = commit_seconds
        self._changed = threading.Condition()  # guards all below
        self._generation = 0
        self._written: list[Numbers] = []
        self._num_written = 0
        self._since = 0.0
        """When the oldest event that no commit covers happened; 0: there is none."""
        self._committing: tuple[int, float] = (0, 0.0)
        """How many blocks the commit under way is for, and the time of the first."""
        self._num_failed_syncs = 0
        self._is_urgent = False
        self._is_closed = False

    def look(self, places: Numbers, generation: int) -> tuple[Flags, Proofs]:
        """Which of these hold a block, and the proofs of what they hold."""
        with self._changed:
            here = self._ledger.present[places]
            if generation != self._generation:
                here[:] = False
            return here, self._ledger.proofs[places]

    def begin(self, places: Numbers) -> int:
        """These are about to be overwritten; the answer is for :meth:`keep`."""
        with self._changed:
            self._ledger.present[places] = False
            return self._num_failed_syncs

    def keep(
        self, places: Numbers, keys: Words, proofs: Proofs, generation: int, begun: int
    ) -> str:
        """These were written whole, since ``begun``; why they are not kept, or nothing."""
        with self._changed:
            if generation != self._generation:
                return "told to forget it meanwhile"
            if begun != self._num_failed_syncs:
                # The kernel may have dropped their bytes with the others', and says so only once.
                return "the drive did not keep what was written meanwhile"
            if len(places):
                self._ledger.note_written(places, Keys(keys), proofs)
                self._written.append(places)
                self._num_written += len(places)
                self._note()
            return ""

    def lose(self, places: Numbers) -> None:
        """Nothing at these places can be read any more."""
        with self._changed:
            if len(places):
                self._ledger.note_lost(places)
                self._note()

    def lose_damaged(self, places: Numbers, proofs: Proofs) -> None:
        """As :meth:`lose`, but for places where something else was written meanwhile."""
        with self._changed:
            same = (self._ledger.proofs[places] == proofs).all(axis=1)
            self.lose(places[same & self._ledger.present[places]])

    def forget(self, generation: int) -> None:
        """Nothing of an earlier generation is here any more; to be committed at once."""
        with self._changed:
            self._generation = generation
            self._ledger.forget()
            self._written.clear()
            self._num_written = 0
            self._is_urgent = True
            self._note()

    def start_at(self, generation: int) -> None:
        """Count generations from here: what was recovered belongs to this one."""
        with self._changed:
            self._generation = generation

    def _note(self) -> None:
        if not self._since:
            self._since = time.monotonic()
            self._changed.notify_all()
        elif self._is_urgent:
            self._changed.notify_all()
        self._show()

    # -- for the one thread that commits ----------------------------------------------------------

    def wait_until_due(self, timeout: float) -> bool:
        """Until something must be committed now, or time is up, or all is over; whether it must."""
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                now = time.monotonic()
                due = self._since + self._commit_seconds if self._since else end
                if self._is_urgent or (self._since and now >= due):
                    return True
                if self._is_closed or now >= end:
                    return False
                self._changed.wait(min(due, end) - now)

    def mark(self) -> Mark:
        """What has happened until now. The next commit answers for it, or :meth:`put_back` does."""
        with self._changed:
            mark = Mark(self._ledger.num_noted, self._generation, self._written)
            self._committing = (self._num_written, self._since)
            self._written = []
            self._num_written = 0
            self._since = 0.0
            self._is_urgent = False
            return mark

    def put_back(self, mark: Mark, *, are_lost: bool) -> None:
        """The commit failed. ``are_lost``: so may be the bytes, whatever a later call says."""
        with self._changed:
            if are_lost:  # and so may be those of writes that came or began meanwhile
                self._num_failed_syncs += 1
                for places in (*mark.places, *self._written):
                    self._ledger.note_lost(places)
                self._written = []
                self._num_written = 0
            else:
                self._written[:0] = mark.places
                self._num_written += self._committing[0]
            self._since = self._committing[1] or self._since or time.monotonic()
            self._committing = (0, 0.0)
            self._show()

    def committed(self) -> None:
        with self._changed:
            self._committing = (0, 0.0)
            self._show()

    def _show(self) -> None:
        count, since = self._committing
        self._status.put(Count.PENDING, count + self._num_written)
        self._status.put(Count.PENDING_SINCE, int((since or self._since) * 1e6))

    def close(self) -> None:
        """Let the thread that waits go on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


# ------------------------------------------------------------------------------------------------
# A drive's threads: each carries one job at a time between the engine's memory and the file.
#
# ::
#
#     read    file ──> buffer ──check──> engine; a block whose proof fails is lost, not delivered
#     write   engine ──> buffer ──prove──> file ──> shelf: readable now, durable with the next
# commit


@dataclass(frozen=True)
class DriveParts:
    """What the threads of one drive share."""

    lanes: Lanes
    shelf: Shelf
    file: BlockFile
    memory: EngineMemory
    prover: Prover
    health: DriveHealth
    status: StatusPage
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
