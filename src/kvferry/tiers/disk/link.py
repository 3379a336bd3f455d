"""One drive as its engine sees it: a process that is started, listened to, and started again.

::

    starting ──> up <──> ails ──┐
       ^                        │ it died, or does not answer: killed
       └────── away, a while ───┘

A thread does the waiting. Whatever was under way on a drive that is gone has failed, and its memory
is ours again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvferry.errors import IntegrityError, KvferryError
from kvferry.tiers.disk.figures import DiskFigures, add_up, figures_of, take_blocks
from kvferry.tiers.disk.setup import DriveSetup, ReadyMessage, pack_forget, unpack_ready
from kvferry.tiers.ipc.channel import FrameKind
from kvferry.tiers.ipc.messages import (
    Numbers,
    OrderMessage,
    ResultMessage,
    Words,
    pack_number,
    pack_order,
    unpack_number,
    unpack_result,
    unpack_says,
    unpack_text,
)
from kvferry.tiers.ipc.process import ChildProcess
from kvferry.tiers.ipc.status_page import HEARTBEAT

DRIVE_MODULE = "kvferry.tiers.disk.drive"

log = logging.getLogger(__name__)

STARTING = "starting"
_TICK_SECONDS = 0.25
_FIRST_REST, _LONGEST_REST = 0.1, 30.0
_PATIENCE = 3600.0
"""Recovery of the largest store takes seconds; a drive that says nothing for so long is killed."""


Launch = Callable[[DriveSetup], ChildProcess]


def start_drive(setup: DriveSetup) -> ChildProcess:
    """Start a drive process. Raises OSError if that is impossible."""
    return ChildProcess(DRIVE_MODULE, setup.pack())


class DriveLink:
    """Owns the process and a thread. ``changed`` is the tier's lock, and guards all but the thread.

    ``ended`` is called with it held, with what became of each order.
    """

    def __init__(
        self,
        setup: DriveSetup,
        changed: threading.Condition,
        ended: Callable[[ResultMessage], None],
        launch: Launch = start_drive,
    ) -> None:
        self.path = setup.path
        self.ready: ReadyMessage | None = None
        """What it said when it was first up; None until then."""
        self.ailment = STARTING
        self.refusal = ""
        """Why it could not be opened, the last time."""
        self.recovered: tuple[Numbers, Words] | None = None
        self._setup = setup
        self._changed = changed
        self._ended = ended
        self._launch = launch
        self._device: int | None = None
        self._child: ChildProcess | None = None
        self._orders: dict[int, int] = {}
        self._left_behind: set[int] = set()
        self.generation = setup.generation
        """How often it was told to forget everything; orders carry it."""
        self._epoch = 0
        self._forgotten = setup.generation
        """The last generation that the drive has made durable."""
        self._past: list[DiskFigures] = []
        self._num_starts = 0
        self._silence = setup.deadline + 1.0
        """A drive that is up and says nothing for so many seconds is killed."""
        self._is_closing = False
        self._is_given_up = False
        self._thread = threading.Thread(
            target=self._run, name=f"kvferry-disk-{setup.stripe}", daemon=True
        )
        self._thread.start()

    # -- for the tier, with the lock held ---------------------------------------------------------

    def submit(self, order: OrderMessage) -> str:
        """Send an order; returns why it cannot be, or nothing."""
        if self.ailment:
            return self.ailment
        assert self._child is not None
        self._orders[order.id] = len(order.places)
        self._child.channel.send(pack_order(order))
        return ""

    def cancel(self, order_id: int) -> None:
        if order_id in self._orders and self._child is not None:
            self._child.channel.send(pack_number(FrameKind.CANCEL, order_id))

    def forget(self, epoch: int) -> None:
        """Whoever is away hears of it when it is back, before anything else."""
        self.generation += 1
        self._epoch = epoch
        self.recovered = None
        if self._child is not None and self.ready is not None:
            self._child.channel.send(pack_forget(self.generation, epoch))

    def agree(self, epoch: int) -> None:
        """All drives of the tier forgot by then: what is older here is stale."""
        self._epoch = epoch
        if self.ready is not None and self.ready.epoch < epoch:
            self.forget(epoch)

    @property
    def is_settled(self) -> bool:
        """Whether it was opened, or refused."""
        return self.ready is not None or bool(self.refusal)

    @property
    def has_forgotten(self) -> bool:
        return self._forgotten == self.generation

    def figures(self) -> DiskFigures:
        parts = list(self._past)
        if self._child is not None:
            parts.append(figures_of(self._child.status))
        whole = add_up(parts) if parts else DiskFigures()
        return replace(
            whole,
            direct=parts[-1].direct if parts else False,
            restarts=max(0, self._num_starts - 1),
            drives_away=int(bool(self.ailment)),
        )

    # -- closing ----------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Ask the drive to end: it commits and goes."""
        with self._changed:
            self._is_closing = True
            child = self._child
        if child is not None:
            child.channel.end()
            child.channel.wake()

    def join(self, timeout: float) -> tuple[int, ...]:
        """Wait for that, then end it by force; returns orders whose memory it may still touch."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._is_given_up = True
            with self._changed:
                if self._child is not None:
                    self._child.channel.wake()
            self._thread.join()  # it waits for nothing any more
        return tuple(self._left_behind)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        rest = _FIRST_REST
        while True:
            began = time.monotonic()
            self._live()
            with self._changed:
                if time.monotonic() - began > _LONGEST_REST:
                    rest = _FIRST_REST
                if self._changed.wait_for(lambda: self._is_closing, rest):
                    return
            rest = min(2 * rest, _LONGEST_REST)

    def _live(self) -> None:
        """One life of the process, from its start until it is gone and its orders have failed."""
        try:
            child = self._launch(
                replace(self._setup, generation=self._forgotten, device=self._device)
            )
        except Exception as error:  # whatever it is, who opens us waits for an answer
            self._refuse(_words(error))
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
            except Exception as error:  # with this thread all its orders would wait for ever
                log.exception("%s: the drive process said something that cannot be", self.path)
                reason = f"the drive process said something that cannot be: {_words(error)}"
            if not child.wait(0 if reason else 1.0):
                is_safe = child.take_back_memory()
            self._lose(child, reason or f"the drive process {child.ending}", is_safe)
        finally:
            child.close()

    def _listen(self, child: ChildProcess) -> str:
        """Until the process is gone, or answers no more: then why it must be killed."""
        beat, missed = -1, 0.0
        while not child.channel.is_ended:
            if self._is_given_up:
                return "the tier was closed"
            before = time.monotonic()
            child.channel.wait(_TICK_SECONDS)
            for kind, body in child.channel.receive():
                self._hear(child, kind, body)
            now_beat = child.status.get(HEARTBEAT)
            # Time that we ourselves were stopped does not count: only ticks that we saw pass.
            missed = 0.0 if now_beat != beat else missed + min(time.monotonic() - before, 1.0)
            beat = now_beat
            if missed > (self._silence if self.ready is not None else _PATIENCE):
                return f"the drive process did not answer for {missed:.0f} s"
        return ""

    def _hear(self, child: ChildProcess, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.SAYS:
            tier, text = unpack_says(body)
            log.log(tier, "%s: %s", self.path, text)
            return
        with self._changed:
            if kind is FrameKind.RESULT:
                result = unpack_result(body)
                count = self._orders.get(result.id)
                if count is not None and count != len(result.ok):
                    raise IntegrityError(f"{len(result.ok)} results for {count} blocks")
                if self._orders.pop(result.id, None) is not None:
                    self._ended(result)
            elif kind is FrameKind.AILS:
                self._ail(unpack_text(body))
            elif kind is FrameKind.FORGOT:
                self._forgotten = unpack_number(body)
            elif kind is FrameKind.READY:
                self._be_ready(child, unpack_ready(body))
            elif kind is FrameKind.REFUSED:
                self._refuse(unpack_text(body))
            self._changed.notify_all()

    def _be_ready(self, child: ChildProcess, ready: ReadyMessage) -> None:
        if self.ready is None:
            self.recovered = take_blocks(child.status, ready.num_recovered)
            self.ready = ready
            self._device = ready.device
        if ready.epoch < self._epoch:
            self.generation += 1
        if self._forgotten != self.generation:
            child.channel.send(pack_forget(self.generation, self._epoch))
        self.refusal = ""
        self._ail("")

    def _ail(self, reason: str) -> None:
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
            self._ail(reason)

    def _lose(self, child: ChildProcess, reason: str, is_safe: bool) -> None:
        """The process is gone: so are its orders."""
        with self._changed:
            # What it counted stays counted; what waited there, and since when, went with it.
            last = replace(figures_of(child.status), pending=0, durable_lag=0.0, journal_bytes=0)
            self._past = [add_up([*self._past, last])]
            self._child = None
            if self.ready is None:
                self.refusal = self.refusal or reason
            if not self._is_closing:
                self._ail(self.refusal or reason)
            if is_safe:
                for order_id, count in self._orders.items():
                    ok = np.zeros(count, dtype=bool)
                    reasons = dict.fromkeys(range(count), reason)
                    self._ended(ResultMessage(order_id, ok, reasons, 0, 0.0))
                self._orders.clear()
            else:
                self._left_behind |= set(self._orders)
            self._changed.notify_all()


def _words(error: Exception) -> str:
    is_known = isinstance(error, (KvferryError, OSError))
    return str(error) if is_known else f"{type(error).__name__}: {error}"
