"""A shared store as a tier: finds blocks by their keys, through a child process.

::

    submit ──> queues of reads and of writes ──> a few at a time to the child ──> poll

The engine's thread writes a small frame per batch and reads one per result. No other thread of this
process takes part, so a thread that holds the GIL costs nothing.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from secrets import randbits

from kvferry.errors import ConfigError, install
from kvferry.settings.tiers import MOONCAKE, STORE_KINDS, RemoteAddress, read_remote
from kvferry.tiers.contract import CLOSE_SECONDS, BatchId, Result, TierSetup, Way
from kvferry.tiers.ipc.messages import FrameKind, pack, pack_order, unpack, unpack_result
from kvferry.tiers.ipc.process import ChildProcess
from kvferry.tiers.queued import QueuedTier, Task
from kvferry.tiers.remote.client import READ_ONLY
from kvferry.tiers.remote.objects import SHARED
from kvferry.types import TierName

log = logging.getLogger(__name__)

MOST_SENT = 4
"""Batches per direction that the child has at once; the others wait in this process."""

GRACE_SECONDS = 2.0
"""Seconds after which a child that has not ended a batch at its deadline is killed as hung."""

OPEN_SECONDS = 5.0
"""Seconds that opening waits for the store's first answer before it continues without."""

_END_SECONDS = 3.0
"""Seconds that a child may take to close its store."""

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_STARTING = "its process has not heard from the store yet"

_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(STORE_KINDS, (("obstore", "xxhash"), "s3")),
    MOONCAKE: (("mooncake", "xxhash"), "mooncake"),
}
_HINTS = {
    MOONCAKE: " (Mooncake needs Debian's libibverbs1, libnuma1 and liburing2, or what they are "
    "called where you are)"
}

Launch = Callable[[Mapping[str, object], Mapping[str, str]], ChildProcess]


def start_store_process(
    hello: Mapping[str, object], environment: Mapping[str, str]
) -> ChildProcess:
    """Start the process of a shared store. Raises OSError if that fails."""
    return ChildProcess(
        "kvferry.tiers.remote.process",
        json.dumps(hello).encode(),
        environment=environment,
        is_quiet="KVFERRY_DEBUG" not in environment,
    )


class RemoteTier(QueuedTier):
    """Keeps blocks of one rank in a shared store. Owns the child process.

    The child reports the store's health. A child that dies or hangs is killed and, after a while,
    restarted; until then the tier is unavailable.
    """

    def __init__(
        self,
        name: TierName,
        block_bytes: int,
        hello: Mapping[str, object],
        launch: Launch = start_store_process,
    ) -> None:
        super().__init__(name, block_bytes)
        self._generation = SHARED
        self.refusal = ""
        """Why the child will not serve, in its own words: a package is not installed."""
        self.refusal_to_write = READ_ONLY if hello.get("read_only") else ""
        """Why the store takes no writes now, though it may be read; empty while it takes them."""
        self._hello = hello
        self._launch = launch
        self._environment = dict(os.environ)  # the same S3 identity for every child
        self._store_ailment = ""
        self._process_ailment = _STARTING
        self._child: ChildProcess | None = None
        self._dying: list[ChildProcess] = []
        self._starting: threading.Thread | None = None
        self._start_at = 0.0
        self._wait = _FIRST_WAIT

    # -- the contract -----------------------------------------------------------------------------

    @property
    def ailment(self) -> str:
        return self._process_ailment or self._store_ailment

    def _skip_reason(self, task: Task) -> str:
        return self.ailment or ("" if task.is_read else self.refusal_to_write)

    def poll(self) -> list[Result]:
        with self._changed:
            if not self._is_closed:
                self._receive()
                self._supervise()
                for is_read in self._queues:
                    self._start(is_read=is_read)
            return super().poll()

    def drain(self, timeout: float | None = None) -> list[Result]:
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        results = self.poll()
        while self._tasks and not self._is_closed and time.monotonic() < end:
            self._wait_for_frame(min(0.05, max(0.0, end - time.monotonic())))
            results += self.poll()
        return results

    def forget(self) -> None:
        with self._changed:
            # A random generation, which no other server and no earlier process has had.
            before, self._generation = self._generation, randbits(62) + 1
            # The shared generation belongs to other servers too, and stays. No other server uses a
            # generation of our own, so it is removed.
            if before != SHARED and self._child is not None:
                self._child.channel.send(pack(FrameKind.FORGET, before))

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[BatchId, ...]:
        with self._changed:
            if self._is_closed:
                return self._abandoned
            self._is_closing = True
        self._results = self.drain(timeout)
        if (starting := self._starting) is not None:
            starting.join()
        with self._changed:
            self._give_up_child("the tier was closed", kill=bool(self._tasks))
            self._sweep()
            for child in self._dying:
                child.end(_END_SECONDS)
                child.close()
            if all(child.is_gone for child in self._dying):
                for task in list(self._tasks.values()):
                    self._end(task, Result.all_failed(task.batch, "the tier was closed"))
            self._abandoned = tuple(self._tasks)
            self._is_closed = True
        return self._abandoned

    # -- the child --------------------------------------------------------------------------------

    def open(self, timeout: float) -> None:
        """Start the child, and wait at most ``timeout`` seconds for the store's first answer."""
        self._begin_start()
        end = time.monotonic() + timeout
        while self._process_ailment == _STARTING and time.monotonic() < end:
            self._wait_for_frame(0.05)
            self.poll()

    def _begin_start(self) -> None:
        # In a thread of its own: starting a process would hold up the engine for milliseconds.
        self._process_ailment = self._process_ailment or _STARTING
        self._starting = threading.Thread(
            target=self._launch_child, name=f"kvferry-start-{self.name}", daemon=True
        )
        self._starting.start()

    def _launch_child(self) -> None:
        try:
            child, reason = self._launch(self._hello, self._environment), ""
        except OSError as error:
            child, reason = None, str(error)
        with self._changed:
            self._child, self._starting = child, None
            if child is None:
                self._process_died(f"its process cannot be started: {reason}")

    def _wait_for_frame(self, timeout: float) -> None:
        if (child := self._child) is None:
            time.sleep(min(timeout, 0.01))
        else:
            child.channel.wait(timeout)

    def _receive(self) -> None:
        if (child := self._child) is None:
            return
        for kind, body in child.channel.receive():
            if kind is FrameKind.RESULT:
                self._take_result(body)
            elif kind is FrameKind.UNAVAILABLE:
                self._note_store(unpack(body))
            elif kind is FrameKind.WRITES_REFUSED:
                self._note_full(unpack(body))
            elif kind is FrameKind.READY:
                self._process_ailment, self._wait = "", _FIRST_WAIT
            elif kind is FrameKind.REFUSED:
                self.refusal = self._process_ailment = unpack(body)
            elif kind is FrameKind.LOG:
                level, text = unpack(body)
                log.log(level, "tier %s: %s", self.name, text)
        if child.channel.is_ended and child is self._child:
            self._give_up_child(self.refusal or f"its process {child.ending}", kill=True)

    def _note_store(self, ailment: str) -> None:
        if ailment and not self._store_ailment and not self._process_ailment:
            log.warning("tier %s: cannot be used: %s; it is tried again", self.name, ailment)
        elif not ailment and self._store_ailment:
            log.info("tier %s: can be used again", self.name)
        self._store_ailment = ailment

    def _note_full(self, reason: str) -> None:
        if reason and not self.refusal_to_write:
            log.warning("tier %s: takes no blocks: %s; reads go on", self.name, reason)
        elif not reason and self.refusal_to_write:
            log.info("tier %s: takes blocks again", self.name)
        self.refusal_to_write = reason

    def _take_result(self, body: bytes) -> None:
        result = unpack_result(body)
        task = self._tasks.get(result.batch_id)
        if task is None:
            return
        batch = task.batch
        if task.generation != self._generation and batch.way is not Way.WRITE:
            result = Result.all_failed(batch, f"tier {self.name} was told to forget it")
        reasons = {at: f"tier {self.name}: {why}" for at, why in result.reasons.items()}
        self._end(task, replace(result, reasons=reasons))

    def _supervise(self) -> None:
        """Kill a child that hangs, close those that have ended, start one if there is none."""
        now = time.monotonic()
        sent = [each for each in self._tasks.values() if each.is_begun]
        if any(now > each.batch.deadline + GRACE_SECONDS for each in sent):
            self._give_up_child("its process hung", kill=True)
        if self._dying and all(child.is_gone for child in self._dying):
            for child in self._dying:
                child.close()
            self._dying = []
            for task in sent:  # from now on no process touches their memory
                self._end(task, Result.all_failed(task.batch, self.ailment))
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
        self.refusal_to_write = READ_ONLY if self._hello.get("read_only") else ""
        self._start_at = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, _LONGEST_WAIT)

    def _start(self, *, is_read: bool) -> None:
        num_begun = sum(each.is_begun and each.is_read == is_read for each in self._tasks.values())
        while num_begun < MOST_SENT and self._child is not None and not self.ailment:
            if (task := self._next(is_read=is_read)) is None:
                return
            num_begun += 1
            self._child.channel.send(pack_order(task.batch, task.generation))


def open_remote(setup: TierSetup) -> RemoteTier:
    """Open the tier ``remote``. A store that cannot be reached now does not stop the engine.

    Raises ConfigError if a package is missing, or the caller gave no namespace of the blocks.
    """
    address, config = read_remote("remote", setup.options), setup.config
    if not setup.shared_namespace:
        raise ConfigError(
            "blocks in a shared store outlive this process and are read by others, so say what "
            "they are: open the rank with contents=Contents(namespace)"
        )
    key = config.remote_key()
    require_packages(address, encrypts=key is not None)
    hello: dict[str, object] = {
        "address": str(address),
        "namespace": setup.shared_namespace.hex(),
        "block_bytes": setup.block_bytes,
        "rank": int(setup.rank),
        "num_ranks": setup.num_ranks,
        "key": key.hex() if key is not None else None,
        "label": setup.label,
        "ttl": config.remote_ttl,
        "read_only": config.remote_mode == "read-only",
    }
    tier = RemoteTier(setup.name, setup.block_bytes, hello)
    tier.open(OPEN_SECONDS)
    if tier.refusal:
        tier.close()
        raise ConfigError(f"{tier.refusal}{_HINTS.get(address.kind, '')}")
    if tier.ailment:
        log.warning(
            "tier %s, %s: %s; it is used as soon as it can be", setup.name, address, tier.ailment
        )
    return tier


def require_packages(address: RemoteAddress, *, encrypts: bool = False) -> None:
    """Raise ConfigError if a package that this store needs is not installed."""
    modules, extras = _NEEDS[address.kind]
    if encrypts:
        modules, extras = (*modules, "cryptography"), f"{extras},remote-encryption"
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f"{address} needs {' and '.join(lacking)}: {install(extras)}")
