"""Storage of blocks by key on disk and in shared stores, for engines with their own host memory.

::

    job = storage.store(keys, addresses)      copies blocks down from the engine's memory
    found = storage.lookup(keys)              which blocks can be loaded; asks a shared store
    job = storage.load(keys, addresses)       copies blocks up into the engine's memory
    storage.poll()                            call it until job.is_done
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.policies import policy_named
from kvferry.cache.slots import Lease
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.scheduler.tier import LowerTier, SlotTier, WriteMode, lower_tier
from kvferry.tiers.contract import (
    CLOSE_SECONDS,
    Addresses,
    Batch,
    BatchId,
    Result,
    Tier,
    TierSetup,
    Way,
)
from kvferry.tiers.movers import open_tier, opened
from kvferry.types import FIRST_RANK, SlotArray

log = logging.getLogger(__name__)

Flags = npt.NDArray[np.bool_]
POLL_SECONDS = 0.0005
_kept: list[Any] = []
"""Memory that a hung operation may still touch: it must never be freed."""


class Found(NamedTuple):
    """For each key of a lookup: ready to be loaded, or unknown until a shared store answers."""

    ready: Flags
    unknown: Flags


@dataclass(eq=False)
class StorageJob:
    """One store or load: ``ok[i]`` says that block ``i`` is stored, or was loaded whole.

    A block that another job is still writing counts as stored: if that write fails, it is a
    miss later.
    """

    ok: Flags
    num_bytes: int = 0
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    num_batches: int = 0

    @property
    def is_done(self) -> bool:
        """Whether no batch of the job is under way."""
        return not self.num_batches


def hashed_keys(names: Iterable[bytes], person: bytes) -> Keys:
    """Return keys made from an engine's own block names; ``person`` keeps engines' keys apart."""
    return Keys.from_bytes(blake2b(name, digest_size=32, person=person).digest() for name in names)


class _StorageTier(NamedTuple):
    blocks: LowerTier
    medium: Tier


class Storage:
    """Owns the tiers below an engine's own host memory, and the index of their blocks.

    The engine owns the memory. It must stay mapped until :meth:`close`, and a job's blocks must
    stay unchanged until the job is done. A fault is a failed block, never an exception. Every call
    but ``drain`` and ``close`` returns at once. Not thread-safe.
    """

    def __init__(
        self,
        config: Config,
        setup: TierSetup,
        sizes: Sequence[int],
        keep_alive: object = None,
    ) -> None:
        """Open the tiers that ``config`` names; ConfigError if a setting is wrong.

        A block consists of pieces of ``sizes`` bytes. ``keep_alive`` is the memory: it is never
        freed if a hung drive may still write to it.
        """
        self._sizes = np.array(sizes, dtype=np.int64)
        self._config = config
        self._keep_alive = keep_alive
        self._batches = count(1)
        self._under_way: dict[BatchId, Callable[[Result], None]] = {}
        self._asked: set[bytes] = set()
        self._levels: list[_StorageTier] = []
        setup = replace(setup, block_bytes=sum(sizes), config=config)
        with ExitStack() as undo:
            for spec in config.all_tiers:
                own = replace(setup, name=spec.name, options=spec.options)
                medium = open_tier(spec, own)
                undo.callback(medium.close)
                policy = policy_named(config.tier_policy)
                remains = [] if medium.num_places is None else [opened(medium)]
                blocks = lower_tier(
                    spec.name, medium.num_places, WriteMode.THROUGH, policy, recovered=remains
                )
                self._levels.append(_StorageTier(blocks, medium))
            undo.pop_all()

    @property
    def is_busy(self) -> bool:
        """Whether any batch is under way."""
        return bool(self._under_way)

    def lookup(self, keys: Keys, *, ask: bool = True) -> Found:
        """Return which blocks can be loaded, and which only a shared store may have.

        With ``ask``, starts asking the store for those; look up again for its answer.
        """
        now = time.monotonic()
        ready = np.zeros(len(keys), dtype=bool)
        unknown = np.zeros(len(keys), dtype=bool)
        for level in self._healthy():
            presence = level.blocks.lookup(keys, now)
            ready |= presence.readable
            if level.medium.num_places is None:
                unknown |= presence.unknown
                if ask:
                    self._ask(level, keys, presence.unknown & ~ready, now)
        return Found(ready, unknown & ~ready)

    def store(self, keys: Keys, addresses: Addresses) -> StorageJob:
        """Start to copy blocks to every tier that lacks them; evict as needed."""
        job = self._job(keys)
        now = time.monotonic()
        for level in self._healthy():
            job.ok |= level.blocks.known(keys, now)
            reserved = level.blocks.reserve(keys, now)
            if reserved is not None:
                positions, lease = reserved
                self._move(level, Way.WRITE, job, keys, positions, lease, addresses)
        return job

    def load(self, keys: Keys, addresses: Addresses) -> StorageJob:
        """Start to copy blocks up from the nearest tier that has them; missing blocks fail."""
        job = self._job(keys)
        now = time.monotonic()
        missing = np.ones(len(keys), dtype=bool)
        for level in self._healthy():
            presence = level.blocks.lookup(keys, now)
            positions = (presence.readable & missing).nonzero()[0]
            if len(positions):
                missing[positions] = False
                slots = presence.slots.take(positions) if len(presence.slots) else presence.slots
                lease = level.blocks.read(slots)
                self._move(level, Way.READ, job, keys, positions, lease, addresses)
        return job

    def touch(self, keys: Keys) -> None:
        """Note that these blocks were used: evict them later."""
        for level in self._levels:
            if level.blocks.pool is not None:
                level.blocks.pool.touch(keys)

    def poll(self) -> None:
        """Process the results of batches that ended since the last call."""
        for level in self._levels:
            for result in level.medium.poll():
                self._ended(result)

    def drain(self) -> None:
        """Wait until no batch is under way; each tier's deadlines bound the wait."""
        while self._under_way:
            time.sleep(POLL_SECONDS)
            self.poll()

    def reset(self) -> None:
        """Forget every block, so that later processes do not find it either."""
        for level in self._levels:
            level.blocks.reset()
            level.medium.forget()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Finish the batches under way, for at most ``seconds`` per tier, and close the tiers."""
        levels, self._levels = self._levels, []
        for level in levels:
            if level.medium.close(seconds):
                log.error("tier %s: it hangs; the memory it may touch stays", level.blocks.name)
                _kept.append(self._keep_alive)
        self._under_way.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _healthy(self) -> Iterable[_StorageTier]:
        """Yield the tiers that are available now; update the health of each tier first."""
        for level in self._levels:
            blocks = level.blocks
            if isinstance(blocks, SlotTier) and not blocks.pool.num_ready:
                found = opened(level.medium)
                if found is not None:
                    blocks.open(FIRST_RANK, found)
            ailment = level.medium.ailment
            if ailment != level.blocks.ailment.removeprefix(f"rank {FIRST_RANK}: "):
                log.warning("tier %s: %s", level.blocks.name, ailment or "available again")
                level.blocks.note_health(FIRST_RANK, ailment)
            if not ailment:
                yield level

    def _job(self, keys: Keys) -> StorageJob:
        if keys.has_duplicates():
            raise InputError(f"{len(keys)} keys are not distinct; name each block once")
        return StorageJob(np.zeros(len(keys), dtype=bool))

    def _move(
        self,
        level: _StorageTier,
        way: Way,
        job: StorageJob,
        keys: Keys,
        positions: SlotArray,
        lease: Lease | None,
        addresses: Addresses,
    ) -> None:
        part = keys if len(positions) == len(keys) else keys.take(positions)
        within = self._config.store_deadline if way is Way.WRITE else self._config.promote_deadline
        batch = Batch(
            BatchId(next(self._batches)),
            way,
            part,
            time.monotonic() + within,
            addresses[positions],
            self._sizes,
            lease.slots if lease is not None else None,
        )
        job.num_batches += 1
        self._submit(level, batch, partial(self._moved, level, way, part, job, positions, lease))

    def _ask(self, level: _StorageTier, keys: Keys, unknown: Flags, now: float) -> None:
        new = [at for at in unknown.nonzero()[0].tolist() if keys[at] not in self._asked]
        if not new:
            return
        part = keys.take(np.array(new))
        self._asked.update(part)
        deadline = now + self._config.lookup_deadline
        batch = Batch(BatchId(next(self._batches)), Way.FIND, part, deadline)
        self._submit(level, batch, partial(self._answered, level, part))

    def _submit(self, level: _StorageTier, batch: Batch, end: Callable[[Result], None]) -> None:
        self._under_way[batch.id] = end
        try:
            level.medium.submit(batch)
        except Exception as error:
            log.exception("tier %s refused a batch", level.blocks.name)
            self._ended(Result.all_failed(batch, f"{type(error).__name__}: {error}"))

    def _ended(self, result: Result) -> None:
        end = self._under_way.pop(result.batch_id, None)
        if end is not None:
            end(result)

    def _answered(self, level: _StorageTier, keys: Keys, result: Result) -> None:
        self._asked.difference_update(keys)
        level.blocks.answered(keys, result.ok, time.monotonic())

    def _moved(
        self,
        level: _StorageTier,
        way: Way,
        keys: Keys,
        job: StorageJob,
        positions: SlotArray,
        lease: Lease | None,
        result: Result,
    ) -> None:
        now = time.monotonic()
        failed = (~result.ok).nonzero()[0]
        if lease is not None:
            lease.release(failed) if way is Way.READ else lease.commit(failed)
        level.blocks.moved(keys, result.ok, upward=way is Way.READ, now=now)
        job.ok[positions[result.ok]] = True
        job.num_bytes += result.num_bytes
        job.seconds = now - job.began
        job.num_batches -= 1
