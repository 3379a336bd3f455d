"""The tier on disk: places on one or more drives, each served by a process of its own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.core.keys import Keys
from kvferry.errors import ClosedError, ConfigError, InputError
from kvferry.tiers.contract import (
    CLOSE_SECONDS,
    Batch,
    BatchId,
    Result,
    TierSetup,
    check_batch,
    check_size,
)
from kvferry.tiers.disk.blocks import pitch_of
from kvferry.tiers.disk.figures import DiskFigures, Flags, add_up
from kvferry.tiers.disk.link import DriveLink, Launch, start_drive
from kvferry.tiers.disk.setup import DriveSetup, StoreAt
from kvferry.tiers.ipc.messages import Numbers, OrderMessage, ResultMessage
from kvferry.types import NO_SLOTS, SlotArray, TierName

RUN_BYTES = 16 << 20
"""As long as a call to a drive should be."""


@dataclass(frozen=True)
class Stripes:
    """``places_each`` places on each of ``num_drives`` drives, whole runs of ``run``."""

    num_drives: int
    places_each: int
    run: int

    @classmethod
    def lay_out(cls, num_drives: int, places_each: int, pitch: int) -> Stripes:
        """Runs are short where there are few places, so that all of them can be used."""
        if num_drives == 1:
            return cls(1, places_each, places_each)
        run = max(1, min(RUN_BYTES // pitch, places_each // 8))
        return cls(num_drives, places_each - places_each % run, run)

    @property
    def num_places(self) -> int:
        return self.num_drives * self.places_each

    def split(self, places: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        """For each drive concerned: its number, the positions it has, and its own places."""
        if self.num_drives == 1:
            return [(0, np.arange(len(places)), places)]
        runs, within = np.divmod(places, self.run)
        drives = runs % self.num_drives
        there = (runs // self.num_drives) * self.run + within
        return [
            (drive, positions, there[positions])
            for drive in range(self.num_drives)
            if len(positions := np.flatnonzero(drives == drive))
        ]

    def join(self, drive: int, there: Numbers) -> tuple[Flags, Numbers]:
        """Which of a drive's own places are places of the tier, and which ones those are."""
        here = there < self.places_each
        runs, within = np.divmod(there[here], self.run)
        return here, (runs * self.num_drives + drive) * self.run + within


# ------------------------------------------------------------------------------------------------
# The tier on disk: places on one or more drives, each served by a process of its own.

log = logging.getLogger(__name__)

OPEN_SECONDS = 120.0
"""How long opening waits for drives to recover before it goes on without them."""

_SAY_AFTER, _SAY_EVERY = 2.0, 10.0
_GRACE_SECONDS = 2.0


@dataclass(eq=False)
class _Moving:
    """A batch under way: its orders to the drives, and what is known of its blocks so far."""

    batch: Batch
    ok: Flags
    began: float
    orders: set[int] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)
    num_bytes: int = 0


class DiskTier:
    """Keeps blocks on drives, and what it has across restarts. Owns the drive processes.

    A drive that is away costs its own places; the tier ails when all are.
    """

    def __init__(
        self, name: TierName, setups: Sequence[DriveSetup], launch: Launch = start_drive
    ) -> None:
        """Open a store for each setup, all at once; ConfigError where none can be opened."""
        block_bytes = setups[0].block_bytes
        check_size(name, len(setups), block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self.num_places: int | None = None
        self._changed = threading.Condition()  # guards all below, and the links
        self._moving: dict[BatchId, _Moving] = {}
        self._orders: dict[int, tuple[_Moving, Numbers]] = {}
        self._next_order = 0
        self._results: list[Result] = []
        self._epoch = 0
        """When all was forgotten last; counts only between several drives."""
        self._abandoned: tuple[BatchId, ...] = ()
        self._is_closing = False
        self._is_closed = False
        self._links = [DriveLink(setup, self._changed, self._hear, launch) for setup in setups]
        try:
            self.stripes = self._wait_until_open()
        except BaseException:
            self.close(0.0)
            raise
        self.num_places = self.stripes.num_places
        self._agree()
        self._recovered = self._gather()

    # -- opening ----------------------------------------------------------------------------------

    def _wait_until_open(self) -> Stripes:
        start = time.monotonic()
        say_at = start + _SAY_AFTER
        with self._changed:
            while not all(link.is_settled for link in self._links):
                now = time.monotonic()
                if now > start + OPEN_SECONDS:
                    break
                if now > say_at:
                    waiting = [link.path for link in self._links if not link.is_settled]
                    log.info("disk: recovering %s: %.0f s", ", ".join(waiting), now - start)
                    say_at = now + _SAY_EVERY
                self._changed.wait(0.5)
            ready = [link.ready for link in self._links if link.ready is not None]
            if not ready:
                raise ConfigError(next((x.refusal for x in self._links if x.refusal), "no answer"))
            each = min(message.num_places for message in ready)
            for link in self._links:
                if link.ready is not None:
                    log.info("disk %s: %s", link.path, link.ready.report)
                else:
                    log.error("disk %s is left out for now: %s", link.path, link.ailment)
        return Stripes.lay_out(len(self._links), each, pitch_of(self.block_bytes))

    def _agree(self) -> None:
        """A drive that was away when the others forgot has what is stale: it forgets now."""
        with self._changed:
            self._epoch = max(link.ready.epoch for link in self._links if link.ready is not None)
            for link in self._links:
                link.agree(self._epoch)

    def _gather(self) -> tuple[Keys, SlotArray]:
        """What all drives still have, each drive's in the order written, side by side in time."""
        keys, places, times = [], [], []
        with self._changed:
            for number, link in enumerate(self._links):
                if link.recovered is None:
                    continue
                here, mine = self.stripes.join(number, link.recovered[0])
                keys.append(link.recovered[1][here])
                places.append(mine)
                times.append(np.arange(len(mine)) / max(1, len(mine)))
                link.recovered = None
        if not keys:
            return Keys.empty(), NO_SLOTS
        if len(keys) == 1:
            return Keys(keys[0]), places[0]
        order = np.argsort(np.concatenate(times), kind="stable")
        return Keys(np.concatenate(keys)[order]), np.concatenate(places)[order]

    def recovered(self) -> tuple[Keys, SlotArray]:
        """What an earlier life left, in the order written. To be asked once, before any batch."""
        found, self._recovered = self._recovered, (Keys.empty(), NO_SLOTS)
        return found

    # -- the contract -----------------------------------------------------------------------------

    @property
    def ailment(self) -> str:
        with self._changed:
            ailments = [link.ailment for link in self._links]
        return ailments[0] if all(ailments) else ""

    def attach_memory(self, address: int, num_bytes: int) -> None:
        """A drive process reaches all of our memory by address: nothing to register."""

    def submit(self, batch: Batch) -> None:
        check_batch(self, batch)
        assert batch.places is not None
        with self._changed:
            if self._is_closing:
                raise ClosedError(f"tier {self.name} is closed")
            if batch.id in self._moving:
                raise InputError(f"tier {self.name}: batch {batch.id} is under way already")
            moving = _Moving(batch, np.zeros(len(batch), dtype=bool), time.monotonic())
            self._moving[batch.id] = moving
            parts = self.stripes.split(batch.places)
            numbers = range(self._next_order, self._next_order + len(parts))
            self._next_order += len(parts)
            moving.orders.update(numbers)
            for number, (drive, positions, there) in zip(numbers, parts, strict=True):
                self._orders[number] = (moving, positions)
                link = self._links[drive]
                reason = link.submit(_order(batch, number, link.generation, positions, there))
                if reason:
                    self._hear(_all_failed(number, len(positions), reason))

    def cancel(self, batch_id: BatchId) -> None:
        with self._changed:
            moving = self._moving.get(batch_id)
            for number in moving.orders if moving is not None else ():
                for link in self._links:
                    link.cancel(number)

    def poll(self) -> list[Result]:
        with self._changed:
            results, self._results = self._results, []
        return results

    def drain(self, timeout: float | None = None) -> list[Result]:
        with self._changed:
            self._changed.wait_for(lambda: not self._moving, timeout)
        return self.poll()

    def forget(self) -> None:
        with self._changed:
            if len(self._links) > 1:
                self._epoch = max(self._epoch + 1, time.time_ns())
            for link in self._links:
                link.forget(self._epoch)

    def wait_forgotten(self, timeout: float) -> bool:
        """Whether nothing forgotten could come back any more, whatever happens next.

        Waits for drives that are well; one that is away forgets when it is back.
        """
        with self._changed:
            links = self._links
            self._changed.wait_for(
                lambda: all(link.has_forgotten or link.ailment for link in links), timeout
            )
            return all(link.has_forgotten for link in links)

    def stores(self) -> tuple[StoreAt, ...]:
        """Where the blocks lie, for who must reach them without us; of drives that were opened."""
        with self._changed:
            return tuple(link.ready.store for link in self._links if link.ready is not None)

    def figures(self) -> DiskFigures:
        """What was moved, and what went wrong, so far."""
        with self._changed:
            parts = [link.figures() for link in self._links]
        return add_up(parts)

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[BatchId, ...]:
        with self._changed:
            if self._is_closed:
                return self._abandoned
            self._is_closing = True
            end = time.monotonic() + timeout
            self._changed.wait_for(lambda: not self._moving, timeout)
            self._is_closed = True
        for link in self._links:
            link.hang_up()
        # The last commit has some time even where the bound is short, if nothing hangs.
        grace = 0.0 if self._moving else _GRACE_SECONDS
        end = max(end, time.monotonic() + grace)
        left = [number for link in self._links for number in link.join(end - time.monotonic())]
        with self._changed:
            self._abandoned = tuple({self._orders[number][0].batch.id: None for number in left})
            return self._abandoned

    # -- answers ----------------------------------------------------------------------------------

    def _hear(self, result: ResultMessage) -> None:
        """What became of one drive's part of a batch; the lock is held."""
        moving, positions = self._orders.pop(result.id)
        moving.orders.discard(result.id)
        moving.ok[positions] = result.ok
        moving.num_bytes += result.num_bytes
        for at, reason in result.reasons.items():
            moving.reasons[int(positions[at])] = f"tier {self.name}: {reason}"
        if not moving.orders:
            del self._moving[moving.batch.id]
            seconds = time.monotonic() - moving.began
            self._results.append(
                Result(moving.batch.id, moving.ok, moving.reasons, moving.num_bytes, seconds)
            )
            self._changed.notify_all()


def _order(
    batch: Batch, number: int, generation: int, positions: Numbers, there: Numbers
) -> OrderMessage:
    return OrderMessage(
        number,
        batch.way,
        generation,
        batch.deadline,
        there,
        batch.keys.array[positions],
        np.asarray(batch.sizes, dtype=np.int64),
        np.asarray(batch.addresses, dtype=np.int64)[positions],
    )


def _all_failed(number: int, count: int, reason: str) -> ResultMessage:
    ok = np.zeros(count, dtype=bool)
    return ResultMessage(number, ok, dict.fromkeys(range(count), reason), 0, 0.0)


def open_disk(setup: TierSetup) -> DiskTier:
    """The tier that the setting ``disk`` makes."""
    settings = setup.disk
    if settings is None or not settings.directories:
        raise ConfigError("disk: no directory is named; give disk = PATH")
    if not setup.namespace:
        raise ConfigError(
            "disk: nobody said whose blocks these are (TierSetup.namespace), and blocks on disk "
            "outlive who wrote them"
        )
    count = len(settings.directories)
    setups = [
        DriveSetup(
            path,
            setup.block_bytes,
            settings.size // count,
            os.getpid(),
            namespace=setup.namespace,
            family=setup.family,
            families=b"".join(setup.families),
            label=setup.label,
            rank=setup.rank,
            num_ranks=setup.num_ranks,
            num_ranks_here=setup.num_ranks_here,
            stripe=stripe,
            num_stripes=count,
            keep_free=settings.keep_free,
            for_others=settings.for_others,
            key=settings.read_key(),
            direct=settings.direct != "never",
            deadline=settings.deadline,
        )
        for stripe, path in enumerate(settings.directories)
    ]
    return DiskTier(setup.name, setups)
