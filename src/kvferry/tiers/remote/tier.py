"""A shared store as a tier: blocks by their keys, carried by a process beside the engine.

::

    submit ──> queue, reads and writes apart ──> a few at a time to the process ──> poll

The engine's thread only writes a small frame per batch and reads one per result. No thread of this
process takes part, so one that keeps the interpreter busy costs nothing.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from secrets import randbits

import numpy as np

from kvferry.errors import ClosedError, InputError
from kvferry.tiers.contract import (
    CLOSE_SECONDS,
    Batch,
    BatchId,
    Result,
    Way,
    check_batch,
    check_size,
)
from kvferry.tiers.ipc.channel import FrameKind
from kvferry.tiers.ipc.messages import (
    OrderMessage,
    pack_number,
    pack_order,
    unpack_result,
    unpack_says,
    unpack_text,
)
from kvferry.tiers.ipc.process import ChildProcess
from kvferry.tiers.remote.objects import SHARED
from kvferry.types import TierName

log = logging.getLogger(__name__)

WINDOW = 4
"""Batches that the process has at once, each way; the others wait here."""

GRACE_SECONDS = 2.0
"""The process ends a batch at its deadline. One that is later than this hangs, and is ended."""

OPEN_SECONDS = 5.0
"""How long opening waits for the store's first answer; then it goes on without."""

_END_SECONDS = 3.0
"""How long a process may take to leave its store in order."""

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_STARTING = "its process has not heard from the store yet"


Launch = Callable[[Mapping[str, object], Mapping[str, str]], ChildProcess]


def start_store_process(
    hello: Mapping[str, object], environment: Mapping[str, str]
) -> ChildProcess:
    """Start the process of a shared store. Raises OSError if that is impossible."""
    file = hello.get("host_file")
    return ChildProcess(
        "kvferry.tiers.remote.process",
        json.dumps(hello).encode(),
        environment=environment,
        pass_fds=[file["fd"]] if isinstance(file, dict) else [],
        is_quiet="KVFERRY_DEBUG" not in environment,
    )


@dataclass(eq=False)
class _Errand:
    """One batch on its way; ``generation`` is where its blocks are."""

    batch: Batch
    generation: int
    is_sent: bool = False
    is_cancelled: bool = False

    @property
    def stopped(self) -> str:
        if self.is_cancelled:
            return "cancelled"
        return "not begun in time" if time.monotonic() >= self.batch.deadline else ""


class RemoteTier:
    """Blocks of one rank in a shared store. Owns the process and the batches under way.

    The process keeps count of the store's health and says when it changes; a process that dies or
    hangs is ended and, after a while, started anew. Until then the tier ails.
    """

    num_places: int | None = None

    def __init__(
        self,
        name: TierName,
        block_bytes: int,
        hello: Mapping[str, object],
        launch: Launch = start_store_process,
        most_in_one: int = 1,
    ) -> None:
        """``most_in_one`` blocks of a chain may be in one object, whoever wrote it."""
        check_size(name, 1, block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self.most_in_one = most_in_one
        self._hello = hello
        self._launch = launch
        self._environment = dict(os.environ)  # for every process of its life: who we are to S3
        self._lock = threading.RLock()  # guards all below
        self._lanes: dict[bool, deque[_Errand]] = {True: deque(), False: deque()}
        self._errands: dict[BatchId, _Errand] = {}
        self._results: list[Result] = []
        self._generation = SHARED
        self.refusal = ""
        """Why the process will not serve, where it said so: something is not installed."""
        self._store_ailment = ""
        self._process_ailment = _STARTING
        self._child: ChildProcess | None = None
        self._dying: list[ChildProcess] = []
        self._starting: threading.Thread | None = None
        self._start_at = 0.0
        self._wait = _FIRST_WAIT
        self._abandoned: tuple[BatchId, ...] = ()
        self._is_closing = False
        self._is_closed = False

    # -- the contract -------------------------------------------------------------------------

    @property
    def ailment(self) -> str:
        return self._process_ailment or self._store_ailment

    def attach_memory(self, address: int, num_bytes: int) -> None:
        """The process reaches all of our memory: nothing to register."""

    def submit(self, batch: Batch) -> None:
        check_batch(self, batch)
        with self._lock:
            if self._is_closing:
                raise ClosedError(f"tier {self.name} is closed")
            if batch.id in self._errands:
                raise InputError(f"tier {self.name}: batch {batch.id} is under way already")
            errand = self._errands[batch.id] = _Errand(batch, self._generation)
            if self.ailment:
                self._end(errand, Result.all_failed(batch, self.ailment))
                return
            self._lanes[batch.way is not Way.WRITE].append(errand)
            self._pump()

    def cancel(self, batch_id: BatchId) -> None:
        with self._lock:
            errand = self._errands.get(batch_id)
            if errand is None:
                return
            errand.is_cancelled = True
            if errand.is_sent and self._child is not None:
                self._child.channel.send(pack_number(FrameKind.CANCEL, batch_id))
            self._sweep()

    def poll(self) -> list[Result]:
        with self._lock:
            if not self._is_closed:
                self._receive()
                self._tend()
                self._sweep()
                self._pump()
            results, self._results = self._results, []
        return results

    def drain(self, timeout: float | None = None) -> list[Result]:
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        results = self.poll()
        while self._errands and not self._is_closed and time.monotonic() < end:
            self._wait_for_line(min(0.05, max(0.0, end - time.monotonic())))
            results += self.poll()
        return results

    def forget(self) -> None:
        with self._lock:
            before, self._generation = self._generation, _new_generation()
            # What is shared is others' too, and stays; nobody else knows what was ours alone.
            if before != SHARED and self._child is not None:
                self._child.channel.send(pack_number(FrameKind.FORGET, before))

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[BatchId, ...]:
        with self._lock:
            if self._is_closed:
                return self._abandoned
            self._is_closing = True
        self._results = self.drain(timeout)
        starting = self._starting
        if starting is not None:
            starting.join()
        with self._lock:
            self._give_up_child("the tier was closed", kill=bool(self._errands))
            for child in self._dying:
                child.end(_END_SECONDS)
                child.close()
            if all(child.is_gone for child in self._dying):
                self._fail_all("the tier was closed")
            self._abandoned = tuple(self._errands)
            self._is_closed = True
        return self._abandoned

    # -- the process --------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Start the process, and wait a while for the store's first answer."""
        self._begin_start()
        end = time.monotonic() + timeout
        while self._process_ailment == _STARTING and time.monotonic() < end:
            self._wait_for_line(0.05)
            self.poll()

    def _begin_start(self) -> None:
        # In a thread of its own: to start a process takes milliseconds that are the engine's.
        self._process_ailment = self._process_ailment or _STARTING
        self._starting = threading.Thread(target=self._start, name=f"kvferry-start-{self.name}")
        self._starting.daemon = True
        self._starting.start()

    def _start(self) -> None:
        try:
            child, reason = self._launch(self._hello, self._environment), ""
        except OSError as error:
            child, reason = None, str(error)
        with self._lock:
            self._child, self._starting = child, None
            if child is None:
                self._process_died(f"its process cannot be started: {reason}")

    def _wait_for_line(self, timeout: float) -> None:
        child = self._child
        if child is None:
            time.sleep(min(timeout, 0.01))
        else:
            child.channel.wait(timeout)

    def _receive(self) -> None:
        child = self._child
        if child is None:
            return
        for kind, body in child.channel.receive():
            if kind is FrameKind.RESULT:
                self._take(_read_result(body))
            elif kind is FrameKind.AILS:
                self._store_ailment = unpack_text(body)
            elif kind is FrameKind.READY:
                self._process_ailment, self._wait = "", _FIRST_WAIT
            elif kind is FrameKind.REFUSED:
                self.refusal = self._process_ailment = unpack_text(body)
            elif kind is FrameKind.SAYS:
                log.log(unpack_says(body)[0], "tier %s: %s", self.name, unpack_says(body)[1])
        if child.channel.is_ended and child is self._child:
            self._give_up_child(self.refusal or f"its process {child.ending}", kill=True)

    def _take(self, result: Result) -> None:
        errand = self._errands.get(result.batch_id)
        if errand is None:
            return
        if errand.generation != self._generation and errand.batch.way is not Way.WRITE:
            result = Result.all_failed(errand.batch, f"tier {self.name} was told to forget it")
        reasons = {at: f"tier {self.name}: {why}" for at, why in result.reasons.items()}
        self._end(errand, replace(result, reasons=reasons))

    def _tend(self) -> None:
        """End a process that hangs; start one where there is none; mind those that are dying."""
        now = time.monotonic()
        if any(
            e.is_sent and now > e.batch.deadline + GRACE_SECONDS for e in self._errands.values()
        ):
            self._give_up_child("its process hung", kill=True)
        if self._dying and all(child.is_gone for child in self._dying):
            for child in self._dying:
                child.close()
            self._dying = []
            # From now on nobody touches their memory.
            for errand in [each for each in self._errands.values() if each.is_sent]:
                self._end(errand, Result.all_failed(errand.batch, self.ailment))
        ready = self._child is None and self._starting is None and not self._dying
        if ready and now >= self._start_at and not self._is_closing and self._start_at:
            self._begin_start()

    def _give_up_child(self, reason: str, *, kill: bool) -> None:
        child, self._child = self._child, None
        if child is not None:
            if kill:
                child.kill()
            self._dying.append(child)
            self._process_died(reason)

    def _process_died(self, reason: str) -> None:
        if not self._is_closing:
            log.warning("tier %s: %s; it is started again in %g s", self.name, reason, self._wait)
        self._process_ailment = reason
        self._store_ailment = ""
        self._start_at = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, _LONGEST_WAIT)

    # -- batches ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Hand on what the process has room for."""
        for reads, lane in self._lanes.items():
            sent = sum(
                e.is_sent and (e.batch.way is not Way.WRITE) == reads
                for e in self._errands.values()
            )
            while lane and sent < WINDOW and self._child is not None and not self.ailment:
                errand = lane.popleft()
                if errand.batch.id in self._errands:
                    errand.is_sent = True
                    sent += 1
                    self._child.channel.send(pack_order(_order(errand)))

    def _sweep(self) -> None:
        """End what has not been sent and never will be."""
        for errand in [each for each in self._errands.values() if not each.is_sent]:
            reason = errand.stopped or self.ailment
            if reason:
                self._end(errand, Result.all_failed(errand.batch, reason))

    def _fail_all(self, reason: str) -> None:
        for errand in list(self._errands.values()):
            self._end(errand, Result.all_failed(errand.batch, reason))

    def _end(self, errand: _Errand, result: Result) -> None:
        del self._errands[errand.batch.id]
        self._results.append(result)


def _order(errand: _Errand) -> OrderMessage:
    batch = errand.batch
    return OrderMessage(
        id=batch.id,
        way=batch.way,
        generation=errand.generation,
        deadline=batch.deadline,
        places=np.zeros(len(batch), dtype=np.int64),
        keys=batch.keys.array,
        sizes=batch.sizes,
        addresses=batch.addresses if batch.sizes.size else np.zeros((len(batch), 0), np.int64),
        runs=batch.runs,
    )


def _read_result(body: bytes) -> Result:
    got = unpack_result(body)
    return Result(BatchId(got.id), got.ok, got.reasons, got.num_bytes, got.seconds)


def _new_generation() -> int:
    """One that no other server and no other life has ever had."""
    return randbits(62) + 1
