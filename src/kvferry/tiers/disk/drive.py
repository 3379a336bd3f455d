"""A drive process: serves one store on one drive to one engine.

Its threads call the kernel and the hash for every few megabytes. Inside the engine, each of these
calls would wait for the engine's interpreter. And a thread that hangs in the kernel can keep its
own process from ending, but not the engine.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvferry.errors import KvferryError, StoreError, StoreInUseError
from kvferry.tiers.contract import Way
from kvferry.tiers.disk import io_workers, state
from kvferry.tiers.disk.block_file import BlockFile, Buffer, open_prover
from kvferry.tiers.disk.files import DiskFile
from kvferry.tiers.disk.io_queue import DriveHealth, IoQueue
from kvferry.tiers.disk.protocol import Count, DriveSetup, ReadyMessage, put_blocks
from kvferry.tiers.disk.store import Store
from kvferry.tiers.disk.superblock import StoreAt
from kvferry.tiers.ipc import child, messages
from kvferry.tiers.ipc.memory import HEARTBEAT, MAX_THREADS
from kvferry.tiers.ipc.messages import Channel, FrameKind, frame

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.1
"""Seconds between a drive's heartbeats, and between its checks for overdue jobs."""

_CLOSE_SECONDS = 5.0
_PATIENCE = 3.0
"""Seconds to wait until another process releases the store: one without its engine ends sooner."""


class DriveServer:
    """Owns all parts of one drive process, and closes them in order."""

    def __init__(
        self, engine: child.EngineLink, *, open_file: Callable[..., BlockFile] = BlockFile
    ) -> None:
        self._engine = engine
        self._channel = engine.channel
        self._status = engine.status
        self._open_file = open_file
        self._budget: state.DayBudget | None = None
        self._is_hung = False

    def serve(self) -> None:
        """Open the store and serve it until the channel ends or the drive fails.

        Exceptions of opening pass through.
        """
        self._open(pickle.loads(self._engine.hello))
        sweep_at = 0.0
        try:
            while not (self._channel.is_ended or self._health.failure):
                self._channel.wait(BEAT_SECONDS)
                for kind, body in self._channel.receive():
                    self._handle(kind, body)
                if time.monotonic() >= sweep_at:
                    self._sweep()
                    sweep_at = time.monotonic() + BEAT_SECONDS / 2
        finally:
            self._close()

    def _open(self, setup: DriveSetup) -> None:
        store = self._store = _open_when_free(setup, self._channel)
        pitch = store.superblock.identity.pitch
        store_id = store.superblock.store_id
        prover = open_prover(setup.identity.block_bytes, store_id, setup.key)
        file = self._file = self._open_file(str(store.blocks_path), pitch)
        blocks_per_job = max(1, setup.job_bytes // pitch)
        queue = self._queue = IoQueue(
            lambda result: self._channel.send(messages.pack_result(result)),
            blocks_per_job=blocks_per_job,
            deadline=setup.deadline,
        )
        health = self._health = DriveHealth(
            queue,
            file,
            lambda reason: self._channel.send(messages.pack(FrameKind.REFUSED, reason)),
            setup,
        )
        if setup.write_per_day is not None:
            path = store.folder / state.FILE_NAME
            self._budget = state.DayBudget(DiskFile(path), setup.write_per_day)
        self._commits = io_workers.Committer(
            store.index,
            file,
            health,
            self._status,
            setup,
            was_reset=lambda number: self._channel.send(messages.pack(FrameKind.FORGOT, number)),
            budget=self._budget,
        )
        found = store.index.take_recovered()
        count = len(found[1]) if setup.before is None else 0
        if count:
            put_blocks(self._status, found)
        context = io_workers.WorkerContext(
            queue,
            self._commits,
            file,
            self._engine.memory,
            prover,
            health,
            self._status,
            self._budget,
            threading.Semaphore(max(1, len(os.sched_getaffinity(0)) // 4)),
        )
        num_each = min(setup.num_threads, MAX_THREADS // 2)
        for number in range(2 * num_each):
            buffer = Buffer(blocks_per_job, pitch, is_sealed=prover.is_sealed)
            way = Way.READ if number < num_each else Way.WRITE
            io_workers.IoWorker(context, buffer, way, number)
        self._commits.thread.start()
        ready = ReadyMessage(
            StoreAt(str(store.folder), store_id, state.this_host()),
            store.num_places,
            store.index.reset_number,
            os.stat(setup.path).st_dev,
            count,
            "; ".join((*store.notes, str(store.index.report))),
        )
        self._channel.send(frame(FrameKind.READY, pickle.dumps(ready)))

    def _handle(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.ORDER:
            self._queue.submit(*messages.unpack_order(body))
        elif kind is FrameKind.FORGET:
            number, is_kept = messages.unpack(body)
            self._commits.reset(number, is_kept=bool(is_kept))

    def _sweep(self) -> None:
        self._status.add(HEARTBEAT, 1)
        hung = self._queue.sweep()
        self._status.put(Count.LATE, self._queue.num_late)
        began, deadline = self._commits.began, self._queue.deadline
        if began and time.monotonic() - began > deadline:
            hung = hung or f"no answer for {deadline:g} s"
        if hung:
            self._is_hung = True
            self._health.end(hung)

    def _close(self) -> None:
        """Commit and close. A drive that hangs is left as it is: the process ends all the same."""
        if self._is_hung:
            return
        end = time.monotonic() + _CLOSE_SECONDS
        self._queue.close(_CLOSE_SECONDS, self._health.failure or "the tier was closed")
        if self._commits.close(max(0.1, end - time.monotonic())):
            self._file.close()
            try:
                self._store.close()
            except KvferryError as error:  # blocks that were durable stay so
                log.warning("the last commit failed: %s", error)


def _open_when_free(setup: DriveSetup, channel: Channel) -> Store:
    """Open the store; wait ``_PATIENCE`` seconds while another process has it open.

    The drive process of an engine that was just killed may still make its last commit. Waiting ends
    early if our engine hangs up, because it was interrupted.
    """
    if setup.before is not None and os.stat(setup.path).st_dev != setup.before.device:
        raise StoreError(f"{setup.path} is on another file system than it was: is it mounted?")
    began = time.monotonic()
    while True:
        try:
            return Store.open(
                Path(setup.path),
                setup.identity,
                setup.bound,
                key=setup.key,
                before=setup.before,
                is_kept=setup.is_kept,
                on_behalf_of=setup.pid,
            )
        except StoreInUseError:
            channel.receive(0)  # notices if the engine hung up; takes no frame
            if time.monotonic() - began > _PATIENCE or channel.is_ended:
                raise
            time.sleep(0.05)


def main() -> None:
    child.main(lambda engine: DriveServer(engine).serve())
