"""A drive process: one store on one drive, served to one engine.

It is a process of its own because its threads call the kernel and the hash for every few megabytes:
inside the engine each of these calls would wait for the engine's interpreter. And what hangs in the
kernel can keep its own process from ending, but not the engine.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvferry.errors import KvferryError, StoreError, StoreInUseError
from kvferry.tiers.contract import Way
from kvferry.tiers.disk import io_workers, superblock
from kvferry.tiers.disk.block_file import (
    BlockFile,
    Digests,
    Seals,
    key_check,
    open_prover,
    pitch_of,
)
from kvferry.tiers.disk.io_queue import DriveHealth, IoQueue
from kvferry.tiers.disk.protocol import (
    Count,
    DriveSetup,
    ReadyMessage,
    StoreAt,
    put_blocks,
)
from kvferry.tiers.disk.quota import DiskBound
from kvferry.tiers.disk.store import Store
from kvferry.tiers.ipc import child, messages
from kvferry.tiers.ipc.memory import HEARTBEAT, MAX_THREADS
from kvferry.tiers.ipc.messages import Channel, FrameKind, frame

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.1
"""How often a drive says that it is alive, and looks for what is late."""

_CLOSE_SECONDS = 5.0
_PATIENCE, _PATIENCE_AGAIN = 10.0, 2.0
"""Seconds for another process to let a store go; fewer if the engine had it before."""


class DriveServer:
    """Owns everything of one drive process, and takes it apart in order."""

    def __init__(
        self, engine: child.EngineLink, *, open_file: Callable[..., BlockFile] = BlockFile
    ) -> None:
        self._engine = engine
        self._channel = engine.channel
        self._status = engine.status
        self._open_file = open_file
        self._epoch = 0

    def serve(self) -> None:
        """Open the store and serve it until the engine hangs up or is gone.

        Raises what opening raises.
        """
        self._open(pickle.loads(self._engine.hello))
        sweep_at = 0.0
        try:
            while not (self._channel.is_ended or self._health.is_lost):
                self._channel.wait(BEAT_SECONDS)
                for kind, body in self._channel.receive():
                    self._obey(kind, body)
                if time.monotonic() >= sweep_at:
                    self._sweep()
                    sweep_at = time.monotonic() + BEAT_SECONDS / 2
        finally:
            self._close()

    def _open(self, setup: DriveSetup) -> None:
        store = self._store = _open_patiently(setup, self._channel)
        pitch = store.superblock.identity.pitch
        prover = open_prover(setup.block_bytes, store.store_id, setup.key)
        file = self._file = self._open_file(str(store.blocks_path), pitch, direct=setup.direct)
        blocks_per_job = max(1, setup.job_bytes // pitch)
        queue = self._queue = IoQueue(
            lambda result: self._channel.send(messages.pack_result(result)),
            blocks_per_job=blocks_per_job,
            deadline=setup.deadline,
        )
        health = self._health = DriveHealth(
            queue,
            file,
            lambda reason: self._channel.send(messages.pack_text(FrameKind.AILS, reason)),
            path=setup.path,
            keep_free=setup.keep_free,
            check_seconds=setup.check_seconds,
        )
        tracker = self._tracker = io_workers.WriteTracker(
            store.journal, self._status, setup.commit_seconds, setup.generation
        )
        self._commits = io_workers.CommitThread(
            tracker,
            store.journal,
            file,
            health,
            self._status,
            check_seconds=setup.check_seconds,
            generation=setup.generation,
            forgot=self._forgot,
        )
        count = store.journal.num_blocks if setup.device is None else 0
        if count:
            put_blocks(self._status, count, store.journal.pieces())
        self._status.put(Count.DIRECT, file.is_direct)
        memory, slots = (
            self._engine.memory,
            threading.Semaphore(max(1, len(os.sched_getaffinity(0)) // 4)),
        )
        context = io_workers.WorkerContext(
            queue,
            tracker,
            file,
            memory,
            prover,
            health,
            self._status,
            pitch,
            blocks_per_job,
            slots,
        )
        most = MAX_THREADS // 2
        num_reads = min(setup.num_threads, most)
        num_writes = min(setup.num_write_threads or setup.num_threads, most)
        for number in range(num_reads + num_writes):
            io_workers.IoWorker(context, Way.READ if number < num_reads else Way.WRITE, number)
        self._commits.thread.start()
        ready = ReadyMessage(
            StoreAt(str(store.folder), store.store_id),
            store.num_places,
            superblock.read_epoch(store.folder),
            os.stat(setup.path).st_dev,
            count,
            "; ".join((*store.notes, str(store.journal.report))),
        )
        self._channel.send(frame(FrameKind.READY, pickle.dumps(ready)))

    def _obey(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.ORDER:
            self._queue.submit(messages.unpack_order(body))
        elif kind is FrameKind.CANCEL:
            self._queue.cancel(messages.unpack_number(body))
        elif kind is FrameKind.FORGET:
            generation, self._epoch = messages.unpack_numbers(body)
            self._tracker.forget(generation)

    def _forgot(self, generation: int) -> None:
        """The journal has forgotten everything before ``generation``, durably: tell the engine."""
        folder = self._store.folder
        known, due = superblock.read_epoch(folder), superblock.mark_in(folder) or 0
        epoch = max(known, self._epoch)
        if known < due:
            # A mark is left to the next process that opens the store: we cannot tell whether our
            # engine had heard of it when it gave this order. If not, it still writes what the mark
            # is for.
            epoch = min(epoch, due - 1)
        if epoch != known:
            try:
                superblock.write_epoch(folder, epoch)
            except OSError as error:  # at worst it will forget once more when it is next opened
                log.warning("its epoch cannot be written: %s", error)
        self._channel.send(messages.pack_number(FrameKind.FORGOT, generation))

    def _sweep(self) -> None:
        self._status.add(HEARTBEAT, 1)
        self._status.put(Count.DIRECT, self._file.is_direct)
        hung = self._queue.sweep()
        began, deadline = self._commits.began, self._queue.deadline
        if began and time.monotonic() - began > deadline:
            hung = hung or f"no answer for {deadline:g} s"
        self._health.ail("hung", hung)

    def _close(self) -> None:
        """Commit what is there and go. What hangs is left: the process ends all the same."""
        end = time.monotonic() + _CLOSE_SECONDS
        self._queue.close(_CLOSE_SECONDS, "the tier was closed")
        if self._commits.close(max(0.1, end - time.monotonic())):
            self._file.close()
            try:
                self._store.close()
            except KvferryError as error:  # what was promised is on the medium all the same
                log.warning("the last commit failed: %s", error)


def open_store(setup: DriveSetup) -> Store:
    """Open the store that a drive is told to serve. Raises StoreError."""
    if setup.device is not None and os.stat(setup.path).st_dev != setup.device:
        raise StoreError(f"{setup.path} is on another file system than it was: is it mounted?")
    key, size = setup.key, superblock.NAMESPACE_BYTES
    identity = superblock.StoreIdentity(
        namespace=setup.namespace,
        block_bytes=setup.block_bytes,
        pitch=pitch_of(setup.block_bytes),
        proof_bytes=(Digests if key is None else Seals).proof_bytes,
        is_sealed=key is not None,
        rank=setup.rank,
        num_ranks=setup.num_ranks,
        stripe=setup.stripe,
        num_stripes=setup.num_stripes,
        family=setup.family,
        label=setup.label,
    )
    families = {setup.families[at : at + size] for at in range(0, len(setup.families), size)}
    bound = DiskBound(
        setup.size, setup.keep_free, setup.num_ranks_here, setup.for_others, frozenset(families)
    )
    return Store.open(
        Path(setup.path),
        identity,
        bound,
        key_check=None if key is None else partial(key_check, key),
        may_create=setup.device is None,
        on_behalf_of=setup.pid,
    )


def _open_patiently(setup: DriveSetup, channel: Channel) -> Store:
    """Open the store; wait a while for a process that has it open.

    The drive process of an engine that was just killed may have its last commit still to do. If our
    engine hangs up meanwhile, because it was interrupted, it need not wait for us.
    """
    patience = _PATIENCE if setup.device is None else _PATIENCE_AGAIN
    began = time.monotonic()
    is_said = False
    while True:
        try:
            return open_store(setup)
        except StoreInUseError as error:
            waited = time.monotonic() - began
            channel.receive(0)  # finds out whether the engine is there; takes no frame
            if waited > patience or channel.is_ended:
                raise
            if waited > _PATIENCE_AGAIN and not is_said:
                is_said = True
                log.warning("%s (waiting %g s for it to let go)", error, patience)
            time.sleep(0.05)


def main() -> None:
    """Run a drive process."""
    child.main(lambda engine: DriveServer(engine).serve())
