"""A drive's threads: those that move blocks, and the one that makes them durable.

::

    read    file ──> buffer ──check──> engine; a block whose proof fails is lost, not delivered
    write   engine ──> buffer ──prove──> file ──> commits: readable now
    commit  bytes synced ──> index synced: durable. Begins at most half a second after a write
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.core.keys import Keys
from kvferry.errors import KvferryError, words_of
from kvferry.tiers.contract import Way
from kvferry.tiers.disk.block_file import BlockFile, Buffer, Proofs, Prover
from kvferry.tiers.disk.index import DiskIndex
from kvferry.tiers.disk.io_queue import DriveHealth, IoQueue, Job
from kvferry.tiers.disk.protocol import Count, DriveSetup
from kvferry.tiers.disk.state import DayBudget
from kvferry.tiers.ipc.memory import EngineMemory, StatusPage
from kvferry.tiers.ipc.messages import Flags, Numbers, Words


class Committer:
    """Owns the order of changes between threads and index, and the thread that commits them.

    A generation is the reset number under which an order was sent. At most a second passes from a
    write to the end of the commit that covers it, if the drive is well. A failed commit ends the
    process: its changes are lost, and the next process begins with what was committed before.

    The thread also checks the drive every second: it is the thread that may hang doing so.
    """

    def __init__(
        self,
        index: DiskIndex,
        file: BlockFile,
        health: DriveHealth,
        status: StatusPage,
        setup: DriveSetup,
        *,
        was_reset: Callable[[int], None],
        budget: DayBudget | None = None,
    ) -> None:
        """``was_reset`` is called with a reset number once it is durable."""
        self._index = index
        self._file = file
        self._health = health
        self._status = status
        self._setup = setup
        self._was_reset = was_reset
        self._budget = budget
        self._persisted = index.reset_number
        self._changed = threading.Condition()  # guards all below
        self._generation = index.reset_number
        self._since = 0.0
        """Time of the oldest change that no commit covers; 0: there is none."""
        self._covered_since = 0.0
        """The same for the commit in flight."""
        self._is_urgent = False
        self._is_closed = False
        self.began = 0.0
        """Time when the thread's current call to the drive began; 0: there is none."""
        self.thread = threading.Thread(target=self._run, name="kvferry-drive-commit", daemon=True)

    # -- for the threads that move blocks ---------------------------------------------------------

    def lookup(self, places: Numbers, generation: int) -> tuple[Flags, Proofs]:
        """Return which of these places hold a readable block, and the proofs of all."""
        with self._changed:
            here = self._index.present[places]
            if generation != self._generation:
                here[:] = False
            return here, self._index.proofs[places]

    def begin_write(self, places: Numbers) -> None:
        with self._changed:
            self._index.present[places] = False

    def end_write(self, places: Numbers, keys: Words, proofs: Proofs, generation: int) -> bool:
        """Record written blocks; return False if a reset dropped them meanwhile."""
        with self._changed:
            is_kept = generation == self._generation
            if is_kept and len(places):
                self._index.record_written(places, Keys(keys), proofs)
                self._note()
            return is_kept

    def lose(self, places: Numbers) -> None:
        with self._changed:
            if len(places):
                self._index.record_lost(places)
                self._note()

    def lose_damaged(self, places: Numbers, proofs: Proofs) -> None:
        """As :meth:`lose`, except where another block was written meanwhile."""
        with self._changed:
            same = (self._index.proofs[places] == proofs).all(axis=1)
            self.lose(places[same & self._index.present[places]])

    def reset(self, generation: int, *, is_kept: bool) -> None:
        """Drop all blocks of earlier generations; a commit of that is due at once."""
        with self._changed:
            self._generation = generation
            self._index.reset(generation, is_kept=is_kept)
            self._is_urgent = True
            self._note()

    def _note(self) -> None:
        if not self._since or self._is_urgent:
            self._since = self._since or time.monotonic()
            self._changed.notify_all()
        self._show()

    def _show(self) -> None:
        """Publish the number of blocks that wait for a commit, and since when."""
        self._status.put(Count.PENDING, self._index.num_pending)
        since = self._covered_since or self._since
        self._status.put(Count.PENDING_SINCE, int(since * 1e6))

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        check_at, is_last = 0.0, False
        while not is_last:
            is_due = self._wait_until_due()
            is_last = self._is_closed
            self.began = time.monotonic()
            if self.began >= check_at:
                self._health.check()
                check_at = self.began + self._setup.check_seconds
            try:
                if is_due or is_last:
                    self._commit()
            except (OSError, KvferryError) as error:
                self._index.is_failed = is_last = True
                self._health.end(f"what is written cannot be made durable: {error}")
            self.began = 0.0

    def _wait_until_due(self) -> bool:
        """Wait for a commit, a check of the drive or the end; return whether a commit is due."""
        end = time.monotonic() + self._setup.check_seconds
        with self._changed:
            while True:
                now = time.monotonic()
                due = self._since + self._setup.commit_seconds if self._since else end
                if self._is_urgent or (self._since and now >= due):
                    return True
                if self._is_closed or now >= end:
                    return False
                self._changed.wait(min(due, end) - now)

    def _commit(self) -> None:
        with self._changed:
            num_recorded, generation = self._index.num_recorded, self._generation
            self._covered_since, self._since, self._is_urgent = self._since, 0.0, False
        # Bytes first: a commit must record no block whose bytes this sync did not cover.
        self._file.sync()
        self._index.commit(num_recorded)
        if generation != self._persisted:
            self._persisted = generation
            self._was_reset(generation)
        if self._budget is not None:
            self._budget.save()
        with self._changed:
            self._covered_since = 0.0
            self._show()

    def close(self, timeout: float) -> bool:
        """Commit what is left; return whether the thread ended within ``timeout`` seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.thread.join(timeout)
        return not self.thread.is_alive()


@dataclass(frozen=True)
class WorkerContext:
    """Objects that the worker threads of one drive share."""

    queue: IoQueue
    commits: Committer
    file: BlockFile
    memory: EngineMemory
    prover: Prover
    health: DriveHealth
    status: StatusPage
    budget: DayBudget | None
    cpu_slots: threading.Semaphore
    """A thread holds one while it copies and proves, not while it waits for the drive.

    There is one for every four cores that we may use: the others are the engine's. On 2 cores one
    slot instead of 8 gave reads 0.83 of the drive instead of 0.76, writes 0.66 instead of 0.57.
    """


class IoWorker:
    """One thread and its buffer, for reads or for writes. It outlives every failure of a job."""

    def __init__(self, context: WorkerContext, buffer: Buffer, way: Way, number: int) -> None:
        self._context = context
        self._buffer = buffer
        self._way = way
        self._number = number
        self._reasons: dict[int, str] = {}
        self.thread = threading.Thread(
            target=self._run, name=f"kvferry-drive-{way.value}-{number}", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        move = self._read if self._way is Way.READ else self._write
        queue = self._context.queue
        while (job := queue.take(self._way)) is not None:
            self._reasons = {}
            places = job.order.places[job.positions]
            try:
                move(job, places)
            except Exception as error:  # a thread that dies leaves its order waiting for ever
                self._fail(job.positions, Count.OTHER, words_of(error))
                if self._way is Way.WRITE:  # a failed write leaves no block
                    self._context.commits.lose(places)
            queue.end(job, self._reasons)

    def _fail(self, positions: Numbers, count: Count, reason: str) -> None:
        for position in positions.tolist():
            self._reasons[position] = reason
        self._context.status.add(count, len(positions))

    def _read(self, job: Job, places: Numbers) -> None:
        context, order, positions = self._context, job.order.message, job.positions
        is_here, proofs = context.commits.lookup(places, job.order.generation)
        if not is_here.all():
            for at in np.flatnonzero(~is_here).tolist():
                reason = f"place {places[at]} holds nothing"
                self._fail(positions[at : at + 1], Count.ABSENT, reason)
            positions, places, proofs = positions[is_here], places[is_here], proofs[is_here]
            if not len(positions):
                return
        whole = self._move(positions, places, np.arange(len(places)))
        with context.cpu_slots:
            right = context.prover.check(self._buffer, places, order.keys.array[positions], proofs)
            bad = np.flatnonzero(whole & ~right)
            for at in bad.tolist():
                reason = f"place {places[at]}: its bytes are not what was written"
                self._fail(positions[at : at + 1], Count.DAMAGED, reason)
            if len(bad):
                context.commits.lose_damaged(places[bad], proofs[bad])
            self._deliver(job, positions, np.flatnonzero(whole & right))

    def _deliver(self, job: Job, positions: Numbers, good: Numbers) -> None:
        context = self._context
        if not len(good):
            return
        here, there, sizes = self._segments(job, positions, good)
        context.status.set_copying(self._number, True)
        try:
            arrived = context.memory.deliver(here, there, sizes)
        finally:
            context.status.set_copying(self._number, False)
        is_whole = arrived.reshape(len(good), -1).all(axis=1)
        self._fail_unreachable(positions[good[~is_whole]])
        context.status.add(Count.READ_BYTES, int(is_whole.sum()) * job.order.block_bytes)

    def _write(self, job: Job, places: Numbers) -> None:
        context, order, positions = self._context, job.order.message, job.positions
        keys = order.keys.array[positions]
        num_bytes = len(positions) * job.order.block_bytes
        if context.budget is not None and not context.budget.take(num_bytes):
            self._fail(positions, Count.OTHER, "no bytes are left of disk_write_per_day")
            context.commits.lose(places)
            return
        with context.cpu_slots:
            here, there, sizes = self._segments(job, positions, np.arange(len(positions)))
            segments = context.memory.fetch(here, there, sizes)
            fetched = segments.reshape(len(positions), -1).all(axis=1)
            self._fail_unreachable(positions[~fetched])
            context.commits.begin_write(places)
            proofs = context.prover.prove(self._buffer, places, keys)
        at = np.flatnonzero(fetched)
        whole = np.zeros(len(positions), dtype=bool)
        whole[at] = self._move(positions[at], places[at], at)
        good = places[whole], keys[whole], proofs[whole]
        if not context.commits.end_write(*good, job.order.generation):
            self._fail(positions[whole], Count.OTHER, "told to forget it meanwhile")
        context.status.add(Count.WRITTEN_BYTES, int(whole.sum()) * job.order.block_bytes)
        context.commits.lose(places[~whole])

    def _move(self, positions: Numbers, places: Numbers, slots: Numbers) -> Flags:
        """Read or write the blocks in these slots of the buffer; return which moved whole."""
        context, way = self._context, self._way
        whole = np.ones(len(places), dtype=bool)
        start = time.monotonic()
        for first, last, error in context.file.move(way, places, slots, self._buffer):
            if error is None:
                context.health.succeeded(way)
                continue
            context.health.failed(way, error)
            whole[first] = False
            reason = f"place {places[first]}: {words_of(error)}"
            self._fail(positions[first:last], Count.DRIVE, reason)
        clock = Count.READ_MICROSECONDS if way is Way.READ else Count.WRITE_MICROSECONDS
        context.status.add(clock, int((time.monotonic() - start) * 1e6))
        return whole

    def _segments(
        self, job: Job, positions: Numbers, which: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return the segments of these blocks: addresses here and in the engine, and sizes."""
        order = job.order
        here = (self._buffer.address + which * self._buffer.pitch)[:, None] + order.offsets
        there = order.message.addresses[positions[which]]
        sizes = np.broadcast_to(order.message.sizes, here.shape)
        return here.ravel(), there.ravel(), sizes.ravel()

    def _fail_unreachable(self, positions: Numbers) -> None:
        self._fail(positions, Count.UNREACHABLE, "its host memory cannot be reached")
