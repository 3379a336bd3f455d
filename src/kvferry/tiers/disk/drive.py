"""A drive process: one store on one drive, served to one engine over a line.

It is a process of its own because its threads call the kernel and the hash for every few megabytes:
inside the engine each of these calls would wait for the engine's interpreter. And what hangs in the
kernel can keep its own process from ending, but not the engine. It ends when the engine does, or
hangs up; it takes no signals of its own, because what an interrupt means is the engine's to say.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvferry.errors import KvferryError, StoreError, StoreInUseError
from kvferry.tiers.contract import Way
from kvferry.tiers.disk.blocks import BlockFile, Digests, Seals, key_check, open_prover, pitch_of
from kvferry.tiers.disk.commit import Committer
from kvferry.tiers.disk.figures import Count, put_blocks
from kvferry.tiers.disk.folder import DiskBound
from kvferry.tiers.disk.queue import DriveHealth, Lanes
from kvferry.tiers.disk.setup import DriveSetup, ReadyMessage, StoreAt, pack_ready, unpack_forget
from kvferry.tiers.disk.store import Store
from kvferry.tiers.disk.superblock import (
    NAMESPACE_BYTES,
    StoreIdentity,
    ordered_in,
    read_epoch,
    write_epoch,
)
from kvferry.tiers.disk.workers import DriveParts, DriveThread, Shelf, num_hands
from kvferry.tiers.ipc import child
from kvferry.tiers.ipc.channel import Channel, FrameKind
from kvferry.tiers.ipc.child import EngineLink
from kvferry.tiers.ipc.messages import (
    pack_number,
    pack_result,
    pack_text,
    unpack_number,
    unpack_order,
)
from kvferry.tiers.ipc.status_page import HEARTBEAT, MAX_THREADS

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.1
"""How often a drive says that it is alive, and looks for what is late."""

_CLOSE_SECONDS = 5.0
_PATIENCE, _PATIENCE_AGAIN = 10.0, 2.0
"""Seconds for another to let a store go. Shorter where the engine had it before: it tries again."""


class DriveServer:
    """Everything of one drive process, put together and taken apart in order."""

    def __init__(
        self, engine: EngineLink, *, open_file: Callable[..., BlockFile] = BlockFile
    ) -> None:
        self._channel = engine.channel
        self._status = engine.status
        self._memory = engine.memory
        self._setup = DriveSetup.unpack(engine.hello)
        self._open_file = open_file
        self._epoch = 0
        self._threads: list[DriveThread] = []

    def serve(self) -> None:
        """Open the store and serve it until the engine hangs up or is gone.

        Raises what opening raises.
        """
        self._open(self._setup)
        try:
            self._listen()
        finally:
            self._close()

    def _open(self, setup: DriveSetup) -> None:
        self._store = store = _open_patiently(setup, self._channel)
        pitch = store.superblock.identity.pitch
        prover = open_prover(setup.block_bytes, store.store_id, setup.key)
        file = self._open_file(str(store.blocks_path), pitch, direct=setup.direct)
        most_blocks = max(1, setup.job_bytes // pitch)
        self._lanes = Lanes(
            lambda result: self._channel.send(pack_result(result)),
            most_blocks=most_blocks,
            deadline=setup.deadline,
        )
        self._health = DriveHealth(
            self._lanes,
            file,
            lambda reason: self._channel.send(pack_text(FrameKind.AILS, reason)),
            path=setup.path,
            keep_free=setup.keep_free,
            check_seconds=setup.check_seconds,
        )
        self._deadline = setup.deadline
        self._file = file
        self._shelf = Shelf(store.ledger, self._status, setup.commit_seconds)
        self._shelf.start_at(setup.generation)
        self._committer = Committer(
            self._shelf,
            store.ledger,
            file,
            self._health,
            self._status,
            check_seconds=setup.check_seconds,
            forgot=self._forgot,
        )
        self._committer.start_at(setup.generation)
        count = store.ledger.num_blocks if setup.device is None else 0
        if count:
            put_blocks(self._status, count, store.ledger.pieces())
        self._status.put(Count.DIRECT, file.is_direct)
        parts = DriveParts(
            self._lanes,
            self._shelf,
            file,
            self._memory,
            prover,
            self._health,
            self._status,
            pitch,
            most_blocks,
            threading.Semaphore(num_hands()),
        )
        for way, num_threads in (
            (Way.READ, setup.num_threads),
            (Way.WRITE, setup.num_write_threads or setup.num_threads),
        ):
            for _ in range(min(num_threads, MAX_THREADS // 2)):
                self._threads.append(DriveThread(parts, way, len(self._threads)))
        self._committer.start()
        report = "; ".join((*store.notes, str(store.ledger.report)))
        ready = ReadyMessage(
            StoreAt(str(store.folder), store.store_id),
            store.num_places,
            read_epoch(store.folder),
            os.stat(setup.path).st_dev,
            count,
            report,
        )
        self._channel.send(pack_ready(ready))

    def _listen(self) -> None:
        """Take orders until the engine hangs up or is gone."""
        beats = 0
        sweep_at = 0.0
        while not self._channel.is_ended:
            self._channel.wait(BEAT_SECONDS)
            for kind, body in self._channel.receive():
                self._obey(kind, body)
            if self._health.is_lost:
                return
            now = time.monotonic()
            if now >= sweep_at:
                beats += 1
                sweep_at = now + BEAT_SECONDS / 2
                self._status.put(HEARTBEAT, beats)
                self._status.put(Count.DIRECT, self._file.is_direct)
                self._sweep(now)

    def _obey(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.ORDER:
            self._lanes.submit(unpack_order(body))
        elif kind is FrameKind.CANCEL:
            self._lanes.cancel(unpack_number(body))
        elif kind is FrameKind.FORGET:
            generation, self._epoch = unpack_forget(body)
            self._shelf.forget(generation)

    def _forgot(self, generation: int) -> None:
        """All of it is gone for good, as the journal has it."""
        folder = self._store.folder
        known, due = read_epoch(folder), ordered_in(folder) or 0
        epoch = max(known, self._epoch)
        if known < due:
            # A mark is left to whoever opens the store next: we cannot tell whether our engine had
            # heard of it when it gave this order, and if not it still writes what the mark is for.
            epoch = min(epoch, due - 1)
        if epoch != known:
            try:
                write_epoch(folder, epoch)
            except OSError as error:  # at worst it will forget once more when it is next opened
                log.warning("its epoch cannot be written: %s", error)
        self._channel.send(pack_number(FrameKind.FORGOT, generation))

    def _sweep(self, now: float) -> None:
        hung = self._lanes.sweep()
        began = self._committer.began
        if began and now - began > self._deadline:
            hung = hung or f"no answer for {self._deadline:g} s"
        self._health.ail("hung", hung)

    def _close(self) -> None:
        """Commit what is there and go. What hangs is left: the process ends all the same."""
        end = time.monotonic() + _CLOSE_SECONDS
        self._lanes.close(_CLOSE_SECONDS, "the tier was closed")
        if self._committer.close(max(0.1, end - time.monotonic())):
            self._file.close()
            try:
                self._store.close()
            except KvferryError as error:  # what was promised is on the medium all the same
                log.warning("the last commit failed: %s", error)


def open_store(setup: DriveSetup) -> Store:
    """The store that a drive is told to serve."""
    if setup.device is not None and os.stat(setup.path).st_dev != setup.device:
        raise StoreError(f"{setup.path} is on another file system than it was: is it mounted?")
    key = setup.key
    identity = StoreIdentity(
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
    size = NAMESPACE_BYTES
    families = [setup.families[at : at + size] for at in range(0, len(setup.families), size)]
    return Store.open(
        Path(setup.path),
        identity,
        DiskBound(
            setup.size,
            setup.keep_free,
            setup.num_ranks_here,
            setup.for_others,
            frozenset(families),
        ),
        key_check=None if key is None else partial(key_check, key),
        may_create=setup.device is None,
        on_behalf_of=setup.pid,
    )


def _open_patiently(setup: DriveSetup, channel: Channel) -> Store:
    """The drive process of an engine that was just killed may have its last commit still to do.

    An engine that hangs up meanwhile, because somebody has interrupted it, need not wait for us.
    """
    patience = _PATIENCE if setup.device is None else _PATIENCE_AGAIN
    began = time.monotonic()
    is_said = False
    while True:
        try:
            return open_store(setup)
        except StoreInUseError as error:
            waited = time.monotonic() - began
            if waited > patience or channel.has_hung_up:
                raise
            if waited > _PATIENCE_AGAIN and not is_said:
                is_said = True
                log.warning("%s (waiting %g s for it to let go)", error, patience)
            time.sleep(0.05)


def main() -> None:
    """Run a drive process."""
    child.main(lambda engine: DriveServer(engine).serve())
