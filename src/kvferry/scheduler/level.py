"""One level below the host, of either kind: what it has, what it takes, whether it can be used.

::

                  what it has                a block goes to       after a move
    placed level  a pool of ours says        a slot of that pool   the leases tell the pool
    keyed level   it is asked, and answers   its key, no slot      what happened is an answer too
                  are remembered
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys, Recovered
from kvferry.pool import Pool
from kvferry.scheduler.gate import Gate
from kvferry.scheduler.joints import Joints
from kvferry.scheduler.outbox import End
from kvferry.scheduler.recovered import agreed
from kvferry.scheduler.remembered import Remembered
from kvferry.scheduler.side_by_side import Runs, SideBySide
from kvferry.slot_states import PoolCounts
from kvferry.types import NO_SLOTS, Key, Rank, RunNumbers, SlotArray, TierName

log = logging.getLogger(__name__)

_FIRST = np.zeros(1, dtype=np.int64)

Flags = npt.NDArray[np.bool_]

REMEMBER_SECONDS = 10.0
REMEMBER_KEYS = 1 << 17

_RESTORE_BLOCKS = 4096
"""So many at a time are taken up again. Of those that were written together, which is mostly one
conversation, the first are its beginning: they are to be evicted last."""


class WriteMode(Enum):
    """When the host's blocks are copied to a lower level."""

    THROUGH = "through"  # as soon as they are stored
    SPILL = "spill"  # when the host is about to evict them


@dataclass(frozen=True, eq=False)
class Room:
    """Where blocks may go: ``end`` takes those at ``positions`` of the keys asked for."""

    positions: SlotArray
    end: End


@dataclass(frozen=True, eq=False)
class Answer:
    """What a level said of some keys: which are ``there``, or that it has not said ``in_time``.

    ``runs`` is what the asker knew to follow what.
    """

    keys: Keys
    there: Flags
    in_time: bool = True
    runs: RunNumbers | None = None


class LevelListener(Protocol):
    """Who wants to know what a level has, as far as that is heard."""

    def came(self, level: TierName, keys: Keys) -> None:
        """These blocks can be read there."""

    def went(self, level: TierName, keys: Keys | None) -> None:
        """These cannot be read there any more; None: whatever was there."""

    def rose(self, keys: Keys) -> None:
        """These were copied up into the host."""


class Level(ABC):
    """One level below the host, by its name on the workers' side.

    Owns what is known of its blocks and of its health; bytes and orders are others'. ``now`` is the
    scheduler's time.
    """

    pool: Pool | None = None
    most_in_one = 1
    """How many blocks of a chain may lie in one object, which has the name of the last."""
    joints: Joints | None = None
    """What of it ends an object, where not every block does."""

    def __init__(self, name: TierName, write: WriteMode = WriteMode.SPILL) -> None:
        self.name = name
        self.write = write
        self.gate: Gate | None = None
        """What may be written to it; None where that is everything."""
        self.listeners: list[LevelListener] = []
        self._ailing: dict[Rank, str] = {}
        self.has_remains = False
        """Whether ranks found blocks of an earlier life here, and none that all of them have. One
        of them may have been told to forget: then the others have what nobody may find again."""

    @property
    def ailment(self) -> str:
        """Why it cannot be used: what the first rank that says so says; empty if none does."""
        return next((f"rank {rank}: {why}" for rank, why in self._ailing.items()), "")

    def heard(self, rank: Rank, reason: str) -> None:
        """A rank says that the level is away there, and why, or (no reason) that it is back."""
        self._ailing.pop(rank, None)
        if reason:
            self._ailing[rank] = reason

    def listen(self, listener: LevelListener) -> None:
        """Tell it from now on what comes and goes."""
        self.listeners.append(listener)

    @abstractmethod
    def there(self, keys: Keys, now: float) -> Flags:
        """For each key, whether its block can be read, as far as is known."""

    def unknown(self, keys: Keys, now: float, runs: RunNumbers | None = None) -> Flags:
        """For each key, whether one would have to ask who knows that these follow each other."""
        return np.zeros(len(keys), dtype=bool)

    @abstractmethod
    def known(self, keys: Keys, now: float) -> Flags:
        """For each key, whether its block is there or on its way, so that sending it is vain."""

    @abstractmethod
    def may_follow(self, parent: Key, now: float) -> bool:
        """Whether a block behind this one could be reached."""

    @abstractmethod
    def read(self, keys: Keys) -> End:
        """Where to read these blocks, which are there; claims them."""

    @abstractmethod
    def reserve(
        self,
        keys: Keys,
        *,
        parent: Key | None,
        chained: bool,
        now: float,
        runs: Runs | None = None,
        tenant: int = 0,
    ) -> Room | None:
        """Where those of these blocks can go that it lacks and has room for; claims that.

        ``runs`` tells what follows what among them where they are no chain, ``tenant`` whose they
        are.
        """

    def answered(self, answer: Answer, now: float) -> None:  # noqa: B027  may be no news
        """It was asked, and has answered or not."""

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        """Blocks were read from it or written to it: which of them really."""
        if upward:
            for listener in self.listeners:
                listener.rose(keys.take(ok))

    def dropped(self, keys: Keys) -> None:  # noqa: B027
        """A write to it will not be sent after all."""

    @abstractmethod
    def reset(self) -> None:
        """Nothing is known to be there any more."""

    def counts(self) -> PoolCounts | None:
        """Its slots, where it has slots of ours."""
        return self.pool.counts if self.pool is not None else None

    def check_integrity(self) -> None:
        if self.pool is not None:
            self.pool.check_integrity()


class PlacedLevel(Level):
    """A level whose places we give out. Owns the pool that says which block lies where."""

    pool: Pool

    def __init__(self, name: TierName, pool: Pool, write: WriteMode = WriteMode.SPILL) -> None:
        super().__init__(name, write)
        self.pool = pool
        self._beside = SideBySide(pool)
        self.num_restored = 0
        """Blocks that were here from an earlier life."""

    def restore(self, recovered: Sequence[Recovered]) -> int:
        """What each rank found here from an earlier life; returns how many blocks all of them have.

        Before anything is stored.
        """
        num_blocks = self.take_up(agreed(recovered, self.pool.num_slots))
        self.has_remains = not num_blocks and any(len(places) for _, places in recovered)
        return num_blocks

    def take_up(self, recovered: Recovered) -> int:
        """These blocks are here, whatever ranks they are on; returns how many are new."""
        keys, places = recovered
        new = ~self.pool.known(keys)
        if not new.all():
            keys, places = keys.take(new), places[new]
        self.pool.give_out_next(places)
        for start in range(0, len(keys), _RESTORE_BLOCKS):
            part = slice(start, start + _RESTORE_BLOCKS)
            # A chain is known when it is stored again.
            lease = self.pool.reserve(keys[part], chained=False, tenant=self.pool.before)
            assert lease is not None
            assert np.array_equal(lease.slots, places[part])
            lease.commit()
        self.num_restored += len(keys)
        return len(keys)

    def there(self, keys: Keys, now: float) -> Flags:
        return self.pool.cached(keys)

    def known(self, keys: Keys, now: float) -> Flags:
        return self.pool.known(keys)

    def may_follow(self, parent: Key, now: float) -> bool:
        return bool(self.pool.known(Keys.from_bytes((parent,)))[0])

    def read(self, keys: Keys) -> End:
        lease = self.pool.pin(keys)
        assert lease is not None
        assert len(lease) == len(keys)
        return End.of(self.name, lease)

    def reserve(
        self,
        keys: Keys,
        *,
        parent: Key | None,
        chained: bool,
        now: float,
        runs: Runs | None = None,
        tenant: int = 0,
    ) -> Room | None:
        beside = None
        if runs is None and chained:
            runs = (_FIRST, (parent,))
        if runs is not None and len(keys):
            beside = self._beside.wish(keys, runs, grows_down=not chained)
        lease = self.pool.reserve(
            keys, parent=parent, chained=chained, beside=beside, tenant=tenant
        )
        if lease is None:
            return None
        if runs is not None and not chained:
            self._beside.note(keys, runs, lease)
        return Room(lease.positions, End.of(self.name, lease))

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        super().moved(keys, ok, upward=upward, now=now)
        if not upward:
            here = ok & self.pool.cached(keys)  # what was dropped meanwhile has not come
            for listener in self.listeners:
                listener.came(self.name, keys.take(here))

    def listen(self, listener: LevelListener) -> None:
        super().listen(listener)
        self.pool.listeners.append(lambda keys: listener.went(self.name, keys))

    def reset(self) -> None:
        self._beside.clear()
        self.pool.reset()


class KeyedLevel(Level):
    """A level that finds blocks by their keys. Owns what is remembered of its answers.

    ``remember`` seconds an answer is believed, yes or no; ``capacity`` keys are remembered at most.
    """

    def __init__(
        self,
        name: TierName,
        write: WriteMode = WriteMode.SPILL,
        *,
        remember: float = REMEMBER_SECONDS,
        capacity: int = REMEMBER_KEYS,
    ) -> None:
        super().__init__(name, write)
        self.num_asked = 0
        self.num_found = 0
        self._remember = remember
        self._answers = Remembered(capacity)

    def there(self, keys: Keys, now: float) -> Flags:
        return self._answers.there(keys, now)

    def unknown(self, keys: Keys, now: float, runs: RunNumbers | None = None) -> Flags:
        return self._answers.unknown(keys, now)

    def known(self, keys: Keys, now: float) -> Flags:
        return self._answers.sent(keys) | self._answers.there(keys, now)

    def may_follow(self, parent: Key, now: float) -> bool:
        """It has room for all: only what is known to be unreachable is not worth sending."""
        key = Keys.from_bytes((parent,))
        return bool(self.known(key, now)[0] or self._answers.unknown(key, now)[0])

    def read(self, keys: Keys) -> End:
        return End(self.name, NO_SLOTS)

    def reserve(
        self,
        keys: Keys,
        *,
        parent: Key | None,
        chained: bool,
        now: float,
        runs: Runs | None = None,
        tenant: int = 0,
    ) -> Room | None:
        positions = np.flatnonzero(~self.known(keys, now))[: self._answers.capacity]
        if not len(positions):
            return None
        self._answers.note_sent(keys.take(positions))
        return Room(positions, End(self.name, NO_SLOTS))

    def answered(self, answer: Answer, now: float) -> None:
        self.num_asked += len(answer.keys)
        self.num_found += int(answer.there.sum())
        self._answers.answer(answer.keys, answer.there, now + self._remember)
        self._tell_found(answer.keys, answer.there)

    def moved(self, keys: Keys, ok: Flags, *, upward: bool, now: float) -> None:
        super().moved(keys, ok, upward=upward, now=now)
        # A "yes" that turned out false, or a write that failed, is a "no" for a while: whoever
        # asked the level again at once would be told the same, and wait for the same failure.
        if not upward or not ok.all():
            self._answers.answer(keys, ok, now + self._remember)
            self._tell_found(keys, ok)

    def dropped(self, keys: Keys) -> None:
        self._answers.answer(keys, np.zeros(len(keys), dtype=bool), float("-inf"))

    def heard(self, rank: Rank, reason: str) -> None:
        super().heard(rank, reason)
        self._answers.doubt()

    def reset(self) -> None:
        self._answers.clear()
        for listener in self.listeners:
            listener.went(self.name, None)

    def _tell_found(self, keys: Keys, there: Flags) -> None:
        for listener in self.listeners:
            listener.came(self.name, keys.take(there))
            listener.went(self.name, keys.take(~there))
