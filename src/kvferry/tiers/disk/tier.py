"""The disk tier: places (slots) on one or more drives, each served by a child process.

A drive as its engine sees it::

    starting ──> up ──┐
       ^              │ the process died, had to end, or is killed because it does not answer
       └── a pause ───┘

One thread per drive waits for its process. Orders in flight on a process that is gone have failed,
and no process touches their memory any more.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvferry.core.identity import scope
from kvferry.core.keys import KEY_BYTES, Keys, Recovered
from kvferry.core.quantities import format_size
from kvferry.errors import ClosedError, ConfigError, InputError, IntegrityError, words_of
from kvferry.tiers.contract import (
    CLOSE_SECONDS,
    Batch,
    BatchId,
    Result,
    TierSetup,
    check_batch,
    check_size,
)
from kvferry.tiers.disk.block_file import open_prover
from kvferry.tiers.disk.protocol import (
    DiskFigures,
    DriveSetup,
    ReadyMessage,
    add_up,
    figures_of,
    take_blocks,
)
from kvferry.tiers.disk.quota import most_places
from kvferry.tiers.disk.superblock import DiskBound, StoreAt, StoreIdentity
from kvferry.tiers.ipc import messages
from kvferry.tiers.ipc.memory import HEARTBEAT
from kvferry.tiers.ipc.messages import Flags, FrameKind, Numbers, Words
from kvferry.tiers.ipc.process import ChildProcess
from kvferry.types import NO_SLOTS, Reset, TierName

log = logging.getLogger(__name__)

START_SECONDS = 5.0
"""Seconds that opening waits for drives before it continues without them."""

STARTING = "starting"
_TICK_SECONDS = 0.25
_MIN_PAUSE, _MAX_PAUSE = 0.1, 30.0
_PATIENCE = 3600.0
"""Seconds until a drive that is silent while opening is killed; large recoveries take seconds."""
_CLOSE_SECONDS, _GRACE_SECONDS = 3.0, 2.0
"""Seconds that closing waits for batches in flight, and then for the last commit."""

Launch = Callable[[DriveSetup], ChildProcess]


def start_drive(setup: DriveSetup) -> ChildProcess:
    return ChildProcess("kvferry.tiers.disk.drive", pickle.dumps(setup))


@dataclass(frozen=True)
class Stripes:
    """Spreads places over ``num_drives`` drives in turn, ``places_each`` on each.

    So adjacent places are adjacent on each drive too, and are read there in one call.
    """

    num_drives: int
    places_each: int

    @property
    def num_places(self) -> int:
        return self.num_drives * self.places_each

    def split(self, places: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        """Return for each drive concerned: its number, the positions it has, and its own places."""
        there, drives = np.divmod(places, self.num_drives)
        return [
            (drive, positions, there[positions])
            for drive in range(self.num_drives)
            if len(positions := np.flatnonzero(drives == drive))
        ]

    def join(self, drive: int, there: Numbers) -> tuple[Flags, Numbers]:
        """Return which of a drive's places belong to the tier, and their numbers in the tier."""
        here = there < self.places_each
        return here, there[here] * self.num_drives + drive


class DriveClient:
    """Owns a drive process, which it restarts when it is gone, and the thread that waits for it.

    ``changed`` is the tier's lock and guards everything but the thread. ``ended`` is called under
    it with each order and its result, or the reason why it has none.
    """

    def __init__(
        self,
        setup: DriveSetup,
        changed: threading.Condition,
        ended: Callable[[int, Result | str], None],
        launch: Launch = start_drive,
    ) -> None:
        self.path = setup.path
        self.ready: ReadyMessage | None = None
        """The drive's last ready message; None until it is first up."""
        self.ailment = STARTING
        self.refusal = ""
        """Why the last process could not open the drive, or had to end."""
        self.recovered: tuple[Numbers, Words] | None = None
        self.number = 0
        """The reset number that the drive should have; orders carry it."""
        self._setup = setup
        self._changed = changed
        self._ended = ended
        self._launch = launch
        self._child: ChildProcess | None = None
        self._orders: set[int] = set()
        self._abandoned_orders: set[int] = set()
        self._is_kept = True
        self._was_reset = False
        self._persisted = 0
        """The last reset number that the drive has made durable."""
        self.least_places = 0
        """A drive whose store has fewer places than the other drives use cannot be used."""
        self._past_figures = DiskFigures()
        self._num_starts = 0
        self._max_silence = setup.deadline + 1.0
        """Seconds of silence after which a drive that is up is killed."""
        self._is_closing = False
        self._is_given_up = False
        self._thread = threading.Thread(
            target=self._run, name=f"kvferry-disk-{setup.identity.stripe}", daemon=True
        )
        self._thread.start()

    # -- for the tier, with the lock held ---------------------------------------------------------

    def submit(self, order: Batch) -> str:
        """Send an order; return why it cannot be sent, or nothing."""
        if self.ailment:
            return self.ailment
        assert self._child is not None
        self._orders.add(order.id)
        self._child.channel.send(messages.pack_order(order, self.number))
        return ""

    def reset(self, number: int, *, is_kept: bool) -> None:
        """Drop all blocks. A drive that is away gets this order first when it is back."""
        self._is_kept, self._was_reset = is_kept, True
        self.agree(max(number, self.number + 1))

    def agree(self, number: int) -> None:
        """Set the tier's reset number: blocks with an older one are stale."""
        if number > self.number:
            self.number, self.recovered = number, None
            if self._child is not None and self.ready is not None:
                self._send_reset(self._child)

    def _send_reset(self, child: ChildProcess) -> None:
        child.channel.send(messages.pack(FrameKind.FORGET, self.number, int(self._is_kept)))

    @property
    def is_settled(self) -> bool:
        return self.ready is not None or bool(self.refusal)

    @property
    def has_forgotten(self) -> bool:
        """Whether all resets ordered so far are durable."""
        return self._persisted == self.number

    def figures(self) -> DiskFigures:
        now = DiskFigures() if self._child is None else figures_of(self._child.status)
        return replace(
            add_up([self._past_figures, now]),
            restarts=max(0, self._num_starts - 1),
            drives_away=int(bool(self.ailment)),
        )

    # -- closing, without the lock ----------------------------------------------------------------

    def hang_up(self) -> None:
        """Ask the process to end: it commits and exits."""
        with self._changed:
            self._is_closing = True
            child = self._child
        if child is not None:
            child.channel.end()
            child.channel.wake()

    def join(self, timeout: float) -> tuple[int, ...]:
        """Wait for the process to end, else kill it; return orders whose memory it may touch."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._is_given_up = True
            with self._changed:
                if self._child is not None:
                    self._child.channel.wake()
            self._thread.join()  # the thread waits for nothing any more
        return tuple(self._abandoned_orders)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _MIN_PAUSE
        while True:
            began = time.monotonic()
            self._run_process()
            with self._changed:
                if time.monotonic() - began > _MAX_PAUSE:
                    pause = _MIN_PAUSE
                if self._changed.wait_for(lambda: self._is_closing, pause):
                    return
            pause = min(2 * pause, _MAX_PAUSE)

    def _run_process(self) -> None:
        """Run one process, from its start until it is gone and its orders have failed."""
        before = self.ready and replace(self.ready, reset_number=self._persisted)
        setup = replace(self._setup, before=before, is_kept=self._is_kept)
        try:
            child = self._launch(setup)
        except Exception as error:  # after any error, the engine waits for an answer
            self._refuse(words_of(error))
            return
        with self._changed:
            self._child = child
            self._num_starts += 1
            if self._is_closing:
                child.channel.end()
        is_safe = True
        try:
            try:
                reason = self._listen(child)
            except Exception as error:  # without this thread all orders would wait for ever
                log.exception("%s: the drive process sent an invalid reply", self.path)
                reason = f"the drive process sent an invalid reply: {words_of(error)}"
            if not child.wait(0 if reason else 1.0):
                is_safe = child.stop_memory_writes()
            reason = self.refusal or reason or f"the drive process {child.ending}"
            self._process_ended(child, reason, is_safe)
        finally:
            child.close()

    def _listen(self, child: ChildProcess) -> str:
        """Handle messages until the process is gone; return why it must be killed, if so."""
        beat, missed = -1, 0.0
        while not child.channel.is_ended:
            if self._is_given_up:
                return "the tier was closed"
            before = time.monotonic()
            child.channel.wait(_TICK_SECONDS)
            for kind, body in child.channel.receive():
                self._handle(child, kind, body)
            last, beat = beat, child.status.get(HEARTBEAT)
            # A tick counts for 1 s at most: we may have been stopped ourselves.
            missed = 0.0 if last != beat else missed + min(time.monotonic() - before, 1.0)
            if missed > (self._max_silence if self.ready is not None else _PATIENCE):
                return f"the drive process did not answer for {missed:.0f} s"
        return ""

    def _handle(self, child: ChildProcess, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.LOG:
            level, text = messages.unpack(body)
            log.log(level, "%s: %s", self.path, text)
            return
        with self._changed:
            if kind is FrameKind.RESULT:
                result = messages.unpack_result(body)
                if result.batch_id in self._orders:
                    self._ended(result.batch_id, result)
                    self._orders.discard(result.batch_id)
            elif kind is FrameKind.FORGOT:
                self._persisted = messages.unpack(body)
            elif kind is FrameKind.READY:
                self._be_ready(child, pickle.loads(body))
            elif kind is FrameKind.REFUSED:
                self._refuse(messages.unpack(body))
            self._changed.notify_all()

    def _be_ready(self, child: ChildProcess, ready: ReadyMessage) -> None:
        if ready.num_places < self.least_places:
            self._refuse(
                f"it has room for {ready.num_places} blocks, the other directories for "
                f"{self.least_places}"
            )
            child.channel.end()  # the next process tries again, and may find more room
            return
        if self.ready is None:
            self._persisted = ready.reset_number
            # A reset's number must be a new one even if the clock was put back.
            self.number = max(self.number, ready.reset_number + self._was_reset)
            if self.has_forgotten:
                self.recovered = take_blocks(child.status, ready.num_recovered)
            log.info("disk %s: %s", self.path, ready.report)
        self.ready = replace(ready, num_recovered=0)  # its recovered blocks are taken, or stale
        if not self.has_forgotten:
            self._send_reset(child)
        self.refusal = ""
        self._set_ailment("")

    def _set_ailment(self, reason: str) -> None:
        with self._changed:
            if reason and not self.ailment:
                log.warning("disk %s cannot be used: %s", self.path, reason)
            elif self.ailment not in ("", STARTING) and not reason:
                log.warning("disk %s can be used again", self.path)
            self.ailment = f"{self.path}: {reason}" if reason else ""
            self._changed.notify_all()

    def _refuse(self, reason: str) -> None:
        with self._changed:
            self.refusal = reason
            self._set_ailment(reason)

    def _process_ended(self, child: ChildProcess, reason: str, is_safe: bool) -> None:
        """Note that the process is gone, and fail its orders."""
        with self._changed:
            # Its counters stay in the sums; its pending blocks are gone.
            last = replace(figures_of(child.status), pending=0, durable_lag=0.0)
            self._past_figures = add_up([self._past_figures, last])
            self._child = None
            if not self._is_closing:
                self.refusal = reason
                self._set_ailment(reason)
            if is_safe:
                for order_id in self._orders:
                    self._ended(order_id, reason)
                self._orders.clear()
            else:
                self._abandoned_orders |= self._orders
            self._changed.notify_all()


@dataclass(eq=False)
class _InFlightBatch:
    """A batch, its orders to the drives, and the results of its blocks so far."""

    batch: Batch
    ok: Flags
    began: float
    orders: set[int] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)
    num_bytes: int = 0


class DiskTier:
    """Keeps blocks on drives, also across restarts. Owns a client for each drive.

    A drive that is away makes only its own places unavailable. The tier is unavailable while all
    drives are away. Until a drive is open, ``num_places`` is an upper bound.
    """

    def __init__(
        self,
        name: TierName,
        setups: Sequence[DriveSetup],
        launch: Launch = start_drive,
        *,
        start_deadline: float = START_SECONDS,
        most_places: int = 1,
    ) -> None:
        """Open a store for each setup, all at once; wait at most ``start_deadline`` seconds."""
        self.name = name
        self.block_bytes = setups[0].identity.block_bytes
        check_size(name, len(setups), self.block_bytes)
        self.num_places: int | None = most_places * len(setups)
        self.stripes = Stripes(len(setups), 0)
        """The distribution of places over the drives; without places until a drive is open."""
        self._changed = threading.Condition()  # guards all below, and the drive clients
        self._batches: dict[BatchId, _InFlightBatch] = {}
        self._orders: dict[int, tuple[_InFlightBatch, Numbers]] = {}
        self._next_order = 0
        self._results: list[Result] = []
        self._recovered: Recovered = (Keys.empty(), NO_SLOTS)
        self.reset_number = 0
        """The reset number of the last reset that any drive knows of."""
        self._mask = bytes(KEY_BYTES)  # removes the engine's epoch: the next engine begins at 0
        self._abandoned: tuple[BatchId, ...] = ()
        self._is_closing = False
        self._is_closed = False
        self._drives = [
            DriveClient(each, self._changed, self._order_ended, launch) for each in setups
        ]
        try:
            self._wait_until_open(start_deadline)
        except BaseException:
            self.close(0.0)
            raise

    def _wait_until_open(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._changed:
            while not all(drive.is_settled for drive in self._drives):
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    break
            self._lay_out()
            for drive in self._drives:
                if drive.ready is None:
                    reason = drive.refusal or f"it is not open after {seconds:g} s"
                    log.warning("disk %s is left out until it is open: %s", drive.path, reason)

    def is_open(self) -> bool:
        """Return whether a drive is open, or was: then the number of places is known."""
        with self._changed:
            return self._is_laid_out or self._lay_out()

    @property
    def _is_laid_out(self) -> bool:
        return self.stripes.places_each > 0

    def _lay_out(self) -> bool:
        """Set the number of places, by the drives that are open, if any is. The lock is held."""
        ready = [drive.ready for drive in self._drives if drive.ready is not None]
        if not ready:
            return False
        places_each = min(message.num_places for message in ready)
        self.stripes = Stripes(len(self._drives), places_each)
        self.num_places = self.stripes.num_places
        # A drive that was away when the others were reset holds stale blocks: it is reset now.
        self.reset_number = max(self.reset_number, *(message.reset_number for message in ready))
        for drive in self._drives:
            drive.least_places = places_each
            drive.agree(self.reset_number)
        self._recovered = self._gather()
        return True

    def _gather(self) -> Recovered:
        """Return the recovered blocks of all drives, merged by their relative order of writing."""
        keys, places, times = [], [], []
        for number, drive in enumerate(self._drives):
            if drive.recovered is not None:
                here, mine = self.stripes.join(number, drive.recovered[0])
                keys.append(drive.recovered[1][here])
                places.append(mine)
                times.append(np.arange(len(mine)) / max(1, len(mine)))
                drive.recovered = None
        if not keys:
            return Keys.empty(), NO_SLOTS
        order = np.argsort(np.concatenate(times), kind="stable")
        return Keys(np.concatenate(keys)[order]), np.concatenate(places)[order]

    def recovered(self) -> Recovered:
        """Return an earlier process's blocks, in the order written. Only once, before any batch."""
        found, self._recovered = self._recovered, (Keys.empty(), NO_SLOTS)
        return found

    # -- the contract -----------------------------------------------------------------------------

    @property
    def ailment(self) -> str:
        """Why no drive can be used; empty while one can."""
        with self._changed:
            if not self._is_laid_out:
                return self._drives[0].ailment or "it is being opened"
            ailments = [drive.ailment for drive in self._drives]
        return ailments[0] if all(ailments) else ""

    def submit(self, batch: Batch) -> None:
        check_batch(self, batch)
        assert batch.places is not None
        with self._changed:
            if self._is_closing:
                raise ClosedError(f"tier {self.name} is closed")
            if batch.id in self._batches:
                raise InputError(f"tier {self.name}: batch {batch.id} is under way already")
            entry = _InFlightBatch(batch, np.zeros(len(batch), dtype=bool), time.monotonic())
            if not self._is_laid_out:
                self._results.append(Result.all_failed(batch, f"tier {self.name} is not open yet"))
                return
            keys = batch.keys.masked(self._mask)
            self._batches[batch.id] = entry
            parts = self.stripes.split(batch.places)
            numbers = range(self._next_order, self._next_order + len(parts))
            self._next_order += len(parts)
            entry.orders.update(numbers)
            for number, (at, positions, there) in zip(numbers, parts, strict=True):
                self._orders[number] = (entry, positions)
                drive = self._drives[at]
                mine, addresses = keys.take(positions), batch.addresses[positions]
                order = replace(
                    batch, id=BatchId(number), keys=mine, addresses=addresses, places=there
                )
                if reason := drive.submit(order):
                    self._order_ended(number, reason)

    def poll(self) -> list[Result]:
        with self._changed:
            results, self._results = self._results, []
        return results

    def drain(self, timeout: float | None = None) -> list[Result]:
        with self._changed:
            self._changed.wait_for(lambda: not self._batches, timeout)
        return self.poll()

    def forget(self) -> None:
        self.reset(Reset(time.time_ns(), 0))

    def reset(self, reset: Reset) -> None:
        """Drop all blocks; later keys are those of ``reset.epoch``."""
        with self._changed:
            # The number must grow even if the clock was put back.
            self.reset_number = max(reset.number, self.reset_number + 1)
            self._mask = scope(reset.epoch, 0)
            self._recovered = (Keys.empty(), NO_SLOTS)
            for drive in self._drives:
                drive.reset(self.reset_number, is_kept=reset.is_kept)

    def keep_nothing(self) -> None:
        """Hide blocks that are written from now until the next reset from other processes."""
        with self._changed:
            self.reset_number += 1
            for drive in self._drives:
                drive.reset(self.reset_number, is_kept=False)

    def wait_forgotten(self, timeout: float) -> bool:
        """Return whether no dropped block can come back any more, whatever happens next.

        Waits at most ``timeout`` seconds for drives that are well; others drop them on return.
        """
        drives = self._drives
        with self._changed:
            self._changed.wait_for(
                lambda: all(d.has_forgotten or d.ailment for d in drives), timeout
            )
            return all(drive.has_forgotten for drive in drives)

    def stores(self) -> tuple[StoreAt, ...]:
        """Return the stores that hold the blocks, for processes that reach them without us."""
        with self._changed:
            return tuple(drive.ready.store for drive in self._drives if drive.ready is not None)

    def away(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(drive.path for drive in self._drives if drive.ready is None)

    def figures(self) -> DiskFigures:
        with self._changed:
            return add_up([drive.figures() for drive in self._drives])

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[BatchId, ...]:
        with self._changed:
            if self._is_closed:
                return self._abandoned
            self._is_closing = True
            timeout = min(timeout, _CLOSE_SECONDS)
            end = time.monotonic() + timeout
            self._changed.wait_for(lambda: not self._batches, timeout)
            self._is_closed = True
        for drive in self._drives:
            drive.hang_up()
        # The last commit gets some time even if ``timeout`` is short, unless something hangs.
        grace = 0.0 if self._batches else _GRACE_SECONDS
        end = max(end, time.monotonic() + grace)
        left = [
            number
            for drive in self._drives
            for number in drive.join(1.0 if drive.ailment else end - time.monotonic())
        ]
        with self._changed:
            self._abandoned = tuple({self._orders[number][0].batch.id: None for number in left})
            return self._abandoned

    def _order_ended(self, number: int, result: Result | str) -> None:
        """Record the result of one drive's part of a batch, or why it failed; the lock is held."""
        entry, positions = self._orders[number]
        if isinstance(result, str):
            ok = np.zeros(len(positions), dtype=bool)
            result = Result(BatchId(number), ok, dict.fromkeys(range(len(ok)), result))
        if len(result.ok) != len(positions):
            raise IntegrityError(f"{len(result.ok)} results for {len(positions)} blocks")
        del self._orders[number]
        entry.orders.discard(number)
        entry.ok[positions] = result.ok
        entry.num_bytes += result.num_bytes
        for at, reason in result.reasons.items():
            entry.reasons[int(positions[at])] = f"tier {self.name}: {reason}"
        if not entry.orders:
            batch_id = entry.batch.id
            del self._batches[batch_id]
            took = time.monotonic() - entry.began
            self._results.append(Result(batch_id, entry.ok, entry.reasons, entry.num_bytes, took))
            self._changed.notify_all()


def open_disk(setup: TierSetup) -> DiskTier:
    """Open the tier of the setting ``disk``."""
    config = setup.config
    if not config.disk:
        raise ConfigError("disk: no directory is named; give disk = PATH")
    if not setup.namespace:
        raise ConfigError(
            "disk: the namespace of the blocks is missing (TierSetup.namespace); blocks on disk "
            "outlive the process that wrote them"
        )
    count, key = len(config.disk), config.disk_key()
    size, families = config.disk_size // count, frozenset(setup.families)
    bound = DiskBound(size, config.disk_keep_free, setup.num_ranks_here, families)
    identity = StoreIdentity(
        namespace=setup.namespace,
        block_bytes=setup.block_bytes,
        is_sealed=key is not None,
        rank=setup.rank,
        num_ranks=setup.num_ranks,
        num_stripes=count,
        family=setup.family,
        label=setup.label,
    )
    most = most_places(size // setup.num_ranks_here, identity)
    if most < 1:
        raise ConfigError(
            f"disk_size: {format_size(config.disk_size)} over {count} directories and "
            f"{setup.num_ranks_here} ranks has no room for a block of "
            f"{format_size(setup.block_bytes)}; raise it"
        )
    open_prover(setup.block_bytes, bytes(16), key)  # raises ConfigError if a package is missing
    day = config.disk_write_per_day
    per_day = None if day is None else day / (count * setup.num_ranks)
    setups = [
        DriveSetup(
            path,
            replace(identity, stripe=stripe),
            bound,
            os.getpid(),
            key,
            deadline=config.disk_deadline,
            write_per_day=per_day,
        )
        for stripe, path in enumerate(config.disk)
    ]
    deadline = config.disk_start_deadline
    return DiskTier(setup.name, setups, start_deadline=deadline, most_places=most)
